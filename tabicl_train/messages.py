"""Lines for the person at the terminal: on stderr, from one process a machine."""

from __future__ import annotations

import contextlib
import os
import sys


def tell(line: str) -> None:
    """Print a line. One that cannot be printed is lost: a log on a full disk, or a closed terminal, ends no run."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
