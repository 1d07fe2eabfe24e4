"""Lines for the user on stderr, from one process per machine."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(line: str) -> None:
    """Print a line on one process per machine."""
    if is_first_here():
        say(line)


def say(line: str) -> None:
    """Print a line. If it cannot be printed it is lost: a full disk or a closed terminal must not end a run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def is_first_here() -> bool:
    """Whether this process is the first one on its machine, according to the launcher's variables."""
    return rank_of("LOCAL_RANK", "SLURM_LOCALID") == 0


def is_first(nodes: int | None = None) -> bool:
    """Whether this process is rank 0, according to the launcher's variables; for use before the processes have joined.

    nodes: trainer.nodes; with several and no launcher, NODE_RANK counts
    """
    return rank_of("RANK", "SLURM_PROCID", *(["NODE_RANK"] if (nodes or 1) > 1 else [])) == 0


def rank_of(*names: str) -> int:
    """The first of these variables that is set, else 0: torchrun's wins over SLURM's."""
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
