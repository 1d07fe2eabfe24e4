"""Files that stay intact whenever the process is killed: written to a temporary file, flushed, and renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, and rename it to `path`.

    After an error, an OSError of the disk among them, `path` is as before and the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder: only then does a rename in it survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_atomically(content: object, path: Path) -> None:
    """torch.save, atomically. Raises OSError when the disk is full, where torch.save raises a RuntimeError."""
    write_atomically(path, lambda file: save(content, file))


def save(content: object, file: BinaryIO) -> None:
    recorder = ErrorRecorder(file)
    try:
        torch.save(content, recorder)  # type: ignore[arg-type]  # it only calls write and flush
    except RuntimeError:
        if recorder.error is not None:
            raise recorder.error from None
        raise


class ErrorRecorder:
    """A file that keeps the error of a write; torch reports only that there was one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush = file, file.flush
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise
