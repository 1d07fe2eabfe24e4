"""Lines for the user on stderr, from one process per machine, and tables as text."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence


def info(line: str) -> None:
    """Print a line on one process per machine."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # torchrun's variable
        print_line(line)


def print_line(line: str) -> None:
    """Print a line, or drop it if that fails: a closed terminal must not end a run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def is_first() -> bool:
    """Return whether this process is rank 0, according to torchrun's variables."""
    return int(os.environ.get("RANK", 0)) == 0


def counted(number: int, noun: str) -> str:
    """Join a number and its noun: 1 worker, 2 workers, 3 classes."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def text_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a table as text: the first column left-aligned, the others right-aligned."""
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip() for first, *others in lines
    )


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([str(cell).replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
