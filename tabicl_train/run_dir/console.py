"""Lines for the person at the terminal: on stderr, from one process a machine."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(line: str) -> None:
    """Print a line, on one process of each machine."""
    if is_first_here():
        say(line)


def say(line: str) -> None:
    """Print a line. One that cannot be printed is lost: a log on a full disk, or a closed terminal, ends no run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def is_first_here() -> bool:
    """Whether this process is the first one of its machine, as the launcher says."""
    return rank_of("LOCAL_RANK", "SLURM_LOCALID") == 0


def is_first() -> bool:
    """Whether this process is the first one of its run, as the launcher says: before the processes have joined."""
    return rank_of("RANK", "SLURM_PROCID") == 0


def rank_of(*names: str) -> int:
    """torchrun's variable wins over SLURM's."""
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
