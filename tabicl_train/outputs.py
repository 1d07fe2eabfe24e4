"""Output files: checked before the work starts, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tabicl_train.errors import ConfigError


def unwritable_folder(path: Path) -> str | None:
    """Return why files cannot be created in a folder, which need not exist yet; None if they can."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:  # a name that is too long
        return f"{path} cannot be created ({error.strerror})"
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def make_folder(setting: str, path: Path) -> None:
    """Create a folder; raises ConfigError that names the setting if files cannot be created in it."""
    if problem := folder_problem(path):
        raise ConfigError([f"{setting} is {str(path)!r}; {problem}"])


def folder_problem(path: Path) -> str | None:
    """Create a folder; returns why it cannot be created, or None."""
    if problem := unwritable_folder(path):
        return problem
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # os.access allows it on file systems like /proc
        return f"{path} cannot be created ({error.strerror})"
    return None


def output_problems(setting: str, path: str | Path | None) -> list[str]:
    """List why a file cannot be written, if one is asked for. Its folder is created."""
    if path is None:
        return []
    path = Path(path)
    if path.is_dir():
        problem: str | None = "it is a folder, not a file"
    elif path.exists() and not os.access(path, os.W_OK):
        problem = "it is not writable"
    else:
        problem = folder_problem(path.parent)
    return [f"{setting} is {str(path)!r}; {problem}"] if problem else []


def check_output(path: str | Path) -> None:
    """Raise ConfigError if the file of the setting `output` cannot be written."""
    if problems := output_problems("output", path):
        raise ConfigError(problems)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file, and rename it to `path`; an error leaves `path` as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path, temporary), open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Add the path of the file that is written to an OSError without one, as that of a full disk is."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def sync_folder(path: Path) -> None:
    """Flush a folder, without which a rename in it may not survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_atomically(content: object, path: Path) -> None:
    """Call torch.save atomically, and create the folder. Raises OSError where torch.save raises a RuntimeError."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: save(content, file))


def save(content: object, file: BinaryIO) -> None:
    import torch  # takes 2 s, and only this function needs it

    recorder = ErrorRecorder(file)
    try:
        torch.save(content, recorder)  # type: ignore[arg-type]  # it only calls write and flush
    except RuntimeError:
        if recorder.error is not None:
            raise recorder.error from None
        raise


class ErrorRecorder:
    """A file that keeps the OSError of a write, which torch.save does not report."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.flush = file, file.flush
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise
