"""Errors that users see as a message instead of a stack trace, and errors that are sent between processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent

# How to start ranks on several machines or in a SLURM job, for errors about another way of starting them.
TORCHRUN = (
    "start one torchrun on each machine: torchrun --nnodes=N --nproc-per-node=DEVICES --rdzv-backend=c10d "
    "--rdzv-endpoint=HOST:PORT -m tabicl_train ... (launch/slurm.sbatch does this in a SLURM job)"
)


class ConfigError(Exception):
    """Raised for a configuration that cannot run.

    Parameters
    ----------
    problems : list of str
        The reasons, one line each.
    config : object, optional
        The configuration, if there is one in spite of the problems.
    """

    def __init__(self, problems: list[str], config: object = None) -> None:
        super().__init__(problems)
        self.problems = problems
        self.config = config

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Diverged(Exception):
    """Raised to end a run that no longer learns, with the reason and advice."""


class ForeignExit(Exception):
    """Raised in place of a SystemExit of code outside this package, such as a plug-in, with its place in the code."""


def exit_of_foreign_code(error: SystemExit) -> str | None:
    """Describe a SystemExit that was raised by code outside this package; None if this package raised it.

    With code 0, such an exit would look like a command that has done its work.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The innermost frame, except those of argparse and of a function that replaces sys.exit, such as wandb's.
    hook = getattr(getattr(sys.exit, "__func__", sys.exit), "__code__", None)
    while frames and (frames[-1].f_code is hook or frames[-1].f_code.co_filename == argparse.__file__):
        frames.pop()
    if not frames or Path(frames[-1].f_code.co_filename).is_relative_to(PACKAGE):
        return None
    source = frames[-1].f_code.co_filename
    return f"{source} called sys.exit({error.code!r}) in line {frames[-1].f_lineno}, which a plug-in must not do"


@contextlib.contextmanager
def wrong_records(source: object) -> Iterator[None]:
    """Turn errors about missing records of a file, or records of unexpected types, into a ConfigError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError([f"{source} cannot be read: its records are not those of tabicl-train ({reason})"]) from error


@contextlib.contextmanager
def foreign_exits() -> Iterator[None]:
    """Raise ForeignExit in place of a SystemExit of code outside this package; that of this package passes."""
    try:
        yield
    except SystemExit as error:
        place = exit_of_foreign_code(error)
        if place is None:
            raise
        raise ForeignExit(place) from None


def picklable(error: Exception | SystemExit) -> Exception:
    """Return the error, or another one with its text if it cannot be sent to another process."""
    if isinstance(error, SystemExit):  # it would also end the other process
        return ForeignExit(exit_of_foreign_code(error) or f"SystemExit({error.code!r})")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def unreadable_text(path: Path | str, error: Exception) -> str:
    """Describe in one line why a text file, such as one in YAML, cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        line = error.object[: error.start].count(b"\n") + 1
        return f"{path} is not UTF-8 text: line {line} has the byte {error.object[error.start]:#04x}; save it as UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return f"{path} cannot be read: {error.strerror}"
    if isinstance(error, RecursionError):
        return f"{path} cannot be read: it is nested too deeply"
    mark = getattr(error, "problem_mark", None)  # of a yaml.MarkedYAMLError, whose own text has six lines
    if mark is not None:
        return f"{path} is not valid YAML: {getattr(error, 'problem', None)} in line {mark.line + 1}"
    return f"{path} cannot be read: {' '.join(str(error).split())}"


def install(packages: str, extra: str) -> str:
    """Describe how to install the packages of an extra, since this project is not on a package index."""
    return f"pip install {packages}, or pip install -e '.[{extra}]' in the project's folder"


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A mere folder with its name, such as wandb/, has a spec but no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def require_matplotlib() -> None:
    if not is_installed("matplotlib"):
        raise ConfigError([f"pictures need matplotlib: {install('matplotlib', 'plots')}"])


def require_sweep_packages() -> None:
    """Raise ConfigError if a package that all sweeps need is not installed; on SLURM they also need submitit."""
    if missing := [name for name in ("optuna", "matplotlib") if not is_installed(name)]:
        raise ConfigError([f"sweeps need {', '.join(missing)}: {install(' '.join(missing), 'sweep')}"])
