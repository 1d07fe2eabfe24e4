"""Paths from users and output files: checked before the work starts, and written completely or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from tabicl_train.errors import ConfigError

# Names of temporary files and folders: .NAME.PID.tabicl-train.tmp, and .old for a folder that is being replaced.
TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+\.tabicl-train\.(?P<kind>tmp|old)")

# The files and folders of a run and of a sweep, to which no command may write its output. OWNED has them by the file
# that marks a folder as that of a run or a sweep.
RUN_FILES = (
    *("checkpoints", "config.yaml", "jobs", "lock", "metrics.csv", "profile", "scaling.csv", "status.json"),
    *("tensorboard", "test.json", "validation.csv", "wandb", "wandb.json"),
)
STUDY = "study.log"  # Optuna's journal, in the folder of a sweep
SWEEP_FILES = ("lock", "results.csv", STUDY, "sweep.html")
OWNED = {"provenance.jsonl": RUN_FILES, "status.json": RUN_FILES, "config.yaml": RUN_FILES, STUDY: SWEEP_FILES}


def expand_home(path: str | Path) -> str:
    """Replace ~ or ~NAME at the beginning of a path by the home folder, which a shell does only in some places.

    Raises
    ------
    ConfigError
        If there is no user NAME and the path is a text. A Path is left as it is, since it drops the ./ of ./~NAME.
    """
    expanded = os.path.expanduser(path)
    if isinstance(path, str) and expanded.startswith("~"):
        raise ConfigError([f"{path!r}: no user has this name; if it is a file or folder, write {f'./{path}'!r}"])
    return expanded


def impossible(path: Path) -> str | None:
    """Return why a file or folder cannot exist, such as "File name too long"; None if it can, or does."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except OSError as error:
        return error.strerror
    return None


def owner_problem(path: str | Path) -> str | None:
    """Return a problem if an output would be a file of a run or a sweep, or lie in one of its folders; or None."""
    path = Path(os.path.realpath(path))
    for folder in path.parents:
        file = folder / path.relative_to(folder).parts[0]
        reserved: list[str] = []
        for mark, names in OWNED.items():
            if os.path.exists(folder / mark):
                reserved += names
        if reserved and (file.name in reserved or is_record(file)):
            return f"{file} belongs to the run or sweep in {folder}; choose another name"
    return None


def is_record(path: Path) -> bool:
    """Whether a file looks like a record in a run directory: JSON lines, the log of a rank, or CSV by step."""
    if path.suffix == ".csv" and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read(5) == b"step,"
    return path.suffix == ".jsonl" or re.fullmatch(r"rank-\d+\.log", path.name) is not None


def unwritable_folder(path: Path) -> str | None:
    """Return why files cannot be created in a folder, which need not exist yet; None if they can."""
    reason = impossible(path)
    if reason is not None:
        return f"{path} cannot be created ({reason})"
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def make_folder(setting: str, path: Path) -> None:
    """Create a folder; raises a ConfigError that names the setting if files cannot be created in it."""
    if problem := folder_problem(path):
        raise ConfigError([f"{setting} is {str(path)!r}; {problem}"])


def folder_problem(path: Path) -> str | None:
    """Create a folder; returns why it cannot be created, or None."""
    if problem := owner_problem(path) or unwritable_folder(path):
        return problem
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # os.access allows it on file systems like /proc
        return f"{path} cannot be created ({error.strerror})"
    return None


def output_problems(setting: str, path: str | Path | None) -> list[str]:
    """Return why an output file cannot be written, in a list, and create its folder; [] if `path` is None."""
    if path is None:
        return []
    path = Path(path)
    # os.path.isdir, since Path.is_dir raises OSError for a name that is too long.
    if problem := owner_problem(path):
        pass
    elif os.path.isdir(path):
        problem = "it is a folder, not a file"
    elif reason := impossible(temporary_name(path)):  # longer than the name of the file itself
        problem = f"it cannot be created ({reason})"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        problem = "it is not writable"
    else:
        problem = folder_problem(path.parent)
    if problem is None:
        return []
    return [f"{setting} is {str(path)!r}; {problem}"]


def check_output(path: str | Path) -> None:
    """Raise ConfigError if the file of the setting `output` cannot be written."""
    if problems := output_problems("output", path):
        raise ConfigError(problems)


def input_problems(
    setting: str, output: str | Path | None, inputs: Iterable[tuple[str, str | Path | None]]
) -> list[str]:
    """Return a problem, in a list, if an output would replace an input of the command, also through a link.

    Parameters
    ----------
    setting : str
        The setting of the output.
    output : str, Path or None
        The output; None if there is none.
    inputs : iterable of (str, str, Path or None)
        The setting of each input, and its file or folder, which need not exist.

    Returns
    -------
    list of str
        The problem, or [].
    """
    if output is None:
        return []
    for name, path in inputs:
        if path is not None and is_same(output, path):
            return [f"{setting} is {str(output)!r}, which is the input {name} ({path}); choose another name"]
    return []


def is_same(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths are the same file or folder, even if it does not exist yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def existing_problems(setting: str, output: str | Path | None, overwrite: bool) -> list[str]:
    """Return a problem, in a list, if an output already exists, which commands replace only with overwrite=true."""
    if output is None or overwrite or not os.path.isfile(output):
        return []
    return [f"{setting} is {str(output)!r}, which already exists; set overwrite=true to replace it"]


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: `write` fills a temporary file, which is then renamed.

    Parameters
    ----------
    path : Path
        The file. An error leaves it as it was.
    write : callable
        Writes the content to an open file.
    """
    temporary = temporary_name(path)
    try:
        with naming(path, temporary), open(temporary, "wb") as file:
            lock(file.fileno())
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Add the path of the file that is written to an OSError that lacks one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def temporary_name(path: Path, kind: str = "tmp") -> Path:
    """Return the temporary name, in the same folder, under which this process writes a file or folder."""
    return path.with_name(f".{path.name}.{os.getpid()}.tabicl-train.{kind}")


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed or the process ends; return whether that succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has locked it, or the file system has no locks
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file or folder within the context; its value says whether that succeeded."""
    # NFS locks only what is open for writing, which is impossible for a folder.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        yield lock(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this program have left in a folder, and restore what they were replacing."""
    for path in list(folder.iterdir()):
        name = TEMPORARY.fullmatch(path.name)
        if name is None:
            continue
        replaced = folder / name["name"]
        with contextlib.suppress(OSError), locked(path) as is_abandoned:  # it may be gone, or belong to another user
            if not is_abandoned:
                continue
            if name["kind"] == "old" and not replaced.exists():
                path.rename(replaced)  # the process was killed before the new folder took its place
            else:
                remove(path)


def sync_folder(path: Path) -> None:
    """Flush a folder; otherwise a rename in it may not survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_atomically(content: object, path: Path) -> None:
    """Call torch.save atomically, and create the folder. Raises OSError, not RuntimeError, if writing fails."""
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: save_tensors(content, file))


def save_tensors(content: object, file: BinaryIO) -> None:
    import torch  # takes 2 s, and only this function needs it

    recorder = ErrorRecorder(file)
    try:
        torch.save(content, recorder)  # type: ignore[arg-type]  # it only calls write and flush
    except RuntimeError:
        if recorder.error is not None:
            raise recorder.error from None
        raise


class ErrorRecorder:
    """A file that remembers the OSError of a write, which torch.save does not report."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise
