"""Lines for the user on stderr, from one process per machine, and tables as text."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence

# Line breaks, escapes and other control characters, and marks that change the direction of what follows.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def one_line(text: object) -> str:
    """Make a text safe to print in one line: control characters, including line breaks, are escaped as in `repr`.

    Names and messages may come from untrusted files. Unescaped, they could move the cursor or imitate our lines.
    """
    return CONTROLS.sub(lambda control: repr(control[0])[1:-1], str(text))


def info(line: str) -> None:
    """Print a line to stderr, on one process per machine."""
    if number_of_rank("LOCAL_RANK") == 0:
        print_line(line)


def print_line(line: str) -> None:
    """Print a line to stderr as `one_line`; drop it if that fails, since a closed terminal must not end a run."""
    with contextlib.suppress(OSError):
        print(one_line(line), file=sys.stderr, flush=True)


def print_above_bar(line: str) -> None:
    """Print a line as `info` does, above the progress bar of tqdm if one is shown."""
    from tqdm import tqdm  # takes 0.1 s, which commands without a bar need not spend

    with tqdm.external_write_mode(file=sys.stderr):
        info(line)


def is_first() -> bool:
    """Return whether this process is rank 0, according to torchrun's variables."""
    return number_of_rank("RANK") == 0


def number_of_rank(variable: str) -> int:
    """Return one of torchrun's variables; 0 if torchrun did not start this process, or it is not a number."""
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    value = os.environ.get(variable, "")
    return int(value) if is_rank and value.isdecimal() else 0


def counted(number: int, noun: str) -> str:
    """Join a number and a noun: 1 worker, 2 workers, 3 classes."""
    if number == 1:
        return f"{number} {noun}"
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {plural}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def text_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a table as text: the first column left-aligned, the others right-aligned."""
    lines = [list(map(one_line, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        aligned.append("  ".join(cells).rstrip())
    return "\n".join(aligned)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Format a table in Markdown."""
    lines = []
    for cells in (header, ["---"] * len(header), *rows):
        lines.append(f"| {' | '.join(escaped_cell(cell) for cell in cells)} |")
    return "\n".join(lines)


def escaped_cell(value: object) -> str:
    """Escape the text of a value for a table in Markdown."""
    return str(value).replace("|", r"\|").replace("\n", " ")
