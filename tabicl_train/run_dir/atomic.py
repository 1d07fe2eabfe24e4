"""Files that are whole whenever the process is killed: written aside, flushed, and renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Give `write` a file beside `path`, and rename it to `path`; raises OSError and leaves nothing behind."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A rename survives a power cut only after it."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_atomically(content: object, path: Path) -> None:
    """torch.save, atomically; raises OSError when the disk is full, as torch.save itself does not."""
    write_atomically(path, lambda file: save(content, file))


def save(content: object, file: BinaryIO) -> None:
    target = Target(file)
    try:
        torch.save(content, target)
    except RuntimeError:
        if target.error is not None:
            raise target.error from None
        raise


class Target:
    """A file that remembers the error of a write, of which torch tells only that there was one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush, self.error = file, file.flush, None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise
