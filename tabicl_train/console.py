"""Lines for the user on stderr, from one process per machine."""

from __future__ import annotations

import contextlib
import os
import sys


def info(line: str) -> None:
    """Print a line on one process per machine."""
    if is_first_here():
        print_line(line)


def print_line(line: str) -> None:
    """Print a line. If it cannot be printed it is lost: a closed terminal must not end a run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def is_first_here() -> bool:
    """Say whether this process is the first one on its machine, according to torchrun's variables."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def is_first() -> bool:
    """Say whether this process is rank 0, according to torchrun's variables."""
    return int(os.environ.get("RANK", 0)) == 0


def counted(number: int, noun: str) -> str:
    """Join a number and its noun: 1 worker, 2 workers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
