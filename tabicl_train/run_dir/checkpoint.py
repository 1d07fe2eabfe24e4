"""Checkpoints of a run: written beside training, aside, flushed and renamed; verified when they are read.

A file is torch.save's zip archive, whose records carry a CRC-32 each. Beside Lightning's own entries it holds
`config` (the whole run configuration) and `run` (step, stage, address of the next step, and where it comes from).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.console import first_line, tell


class DamagedCheckpoint(Exception):
    """A file that is truncated, altered, or no checkpoint."""


def read(path: Path) -> dict:
    """The content of a checkpoint, tensors on the CPU; raises DamagedCheckpoint, and what is no fault of the file:
    OSError, MemoryError."""
    verify(path)
    with damage(path):
        return torch.load(path, map_location="cpu", weights_only=True)


def verify(path: Path) -> None:
    """Compare a file with its checksums, at which torch.load does not look; raises what `read` does."""
    with damage(path), zipfile.ZipFile(path) as archive:
        if (record := archive.testzip()) is not None:
            raise DamagedCheckpoint(f"{path}: the checksum of {record} is wrong")


def checksum(path: Path) -> str:
    """A digest of the checksums in a file; equal for equal contents."""
    with damage(path), zipfile.ZipFile(path) as archive:
        records = [(record.filename, record.CRC, record.file_size) for record in archive.infolist()]
    return hashlib.sha256(repr(records).encode()).hexdigest()


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """zipfile and torch raise many kinds of errors for a damaged file; within it they become DamagedCheckpoint."""
    try:
        yield
    except (DamagedCheckpoint, MemoryError):
        raise
    except Exception as error:
        # EINVAL is what a damaged offset comes to; "allocate" is in torch's words for an allocation that failed.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise MemoryError(first_line(error)) from None
        raise DamagedCheckpoint(f"{path} is damaged: {first_line(error)}") from None


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first. A copy under another name is none of them."""
    return sorted((p for p in folder.glob("step-*.ckpt") if re.fullmatch(r"step-\d{8,}", p.stem)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def newest_valid(folder: Path, until: int | None = None) -> tuple[Path, dict] | None:
    """The newest whole checkpoint, if any, and its content.

    until: a step; checkpoints of later ones are left out
    Damaged files are reported. Raises ConfigError if all are damaged, or if one cannot be read for another reason: to
    pass over it would silently go back in time.
    """
    damaged, gone = set(), set()
    while True:
        paths = [path for path in saved(folder) if until is None or step_of(path) <= until]
        left = [path for path in paths if path not in damaged | gone]
        if not left:
            break
        path = left[-1]
        try:
            return path, read(path)
        except FileNotFoundError:
            gone.add(path)  # a run that is being trained has removed it, and written a newer one
        except DamagedCheckpoint as error:
            tell(f"warning   {error}; the checkpoint before it is used")
            damaged.add(path)
        except (OSError, MemoryError) as error:
            raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    if damaged:
        raise ConfigError([f"{folder} holds damaged checkpoints only; move it away to start anew"])
    return None


def sweep(folder: Path) -> None:
    """Remove what a killed process left behind."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def load(checkpoint: str) -> tuple[Path, dict]:
    """The checkpoint that a path means, and its content: the file itself, or the newest whole one of a run directory.

    Raises ConfigError that names the path when there is none, or it cannot be read.
    """
    path = Path(checkpoint)
    if path.is_dir():
        if (newest := newest_valid(path / "checkpoints")) is None:
            raise ConfigError([f"checkpoint is {checkpoint!r}; the run directory holds no checkpoint yet"])
        return newest
    try:
        return path, read(path)
    except FileNotFoundError:
        raise ConfigError([f"checkpoint is {checkpoint!r}; there is no such file or run directory"]) from None
    except DamagedCheckpoint as error:
        raise ConfigError([str(error)]) from None
    except (OSError, MemoryError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
