"""The small files of a run: one owner writes, rewinds and reads them.

NAME.csv    a row a step or more, the step (optimiser steps done) in the first column
NAME.jsonl  a JSON object a line; `step`, where there is one, is the number of a step, from 0
others      replaced as a whole

A full disk costs rows and lines, and one warning a file, but never the run. A kill can leave a torn last line: readers
pass over it, and the next writer removes it.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tabicl_train.run_dir.atomic import write_atomically
from tabicl_train.run_dir.console import first_line, tell


class Records:
    """The small files in a run's folder.

    check: called before each write; raises where this process may not write any more
    """

    def __init__(self, folder: Path, check: Callable[[], None] = lambda: None) -> None:
        self.folder, self.check = folder, check
        self.failing: set[str] = set()  # files that there has been a warning about

    def append_rows(self, name: str, *rows: dict) -> None:
        """Add rows to a CSV file, all of them or none; repr of a float reads back as the same float."""
        self._append(name, csv_text(row.values() for row in rows), header=csv_text([rows[0].keys()]))

    def append_line(self, name: str, values: dict) -> None:
        """Add a line to a JSON lines file, or nothing."""
        self._append(name, json.dumps(values) + "\n")

    def _append(self, name: str, text: str, header: str = "") -> None:
        self.check()
        path = self.folder / name
        end = None
        try:
            with open(path, "ab") as file:
                end = whole_lines_end(path)
                file.truncate(end)
                file.write((text if end else header + text).encode())
        except OSError as error:
            if end:
                os.truncate(path, end)  # part of the text may be there
            elif end == 0:
                path.unlink(missing_ok=True)
            self.warn(name, error)
        else:
            self.failing.discard(name)

    def replace(self, name: str, text: str) -> None:
        """Write a file anew: it is the old one or the new one, whenever the process is killed."""
        self.check()
        try:
            write_atomically(self.folder / name, lambda file: file.write(text.encode()))
        except OSError as error:
            self.warn(name, error)
        else:
            self.failing.discard(name)

    def rewind(self, name: str, steps: int, columns: tuple[str, ...] = ()) -> None:
        """Drop what belongs to steps after the first `steps`, which are done again, and torn lines.

        columns: of a CSV file; those that an older version of the program did not write become empty
        On a full disk, where no other copy can be written, everything behind the first dropped line is cut off.
        """
        self.check()
        path = self.folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        lines = content.splitlines(keepends=True)
        kept = kept_rows(lines, steps, columns) if path.suffix == ".csv" else kept_lines(lines, steps)
        same = next((i for i, (a, b) in enumerate(zip(lines, kept, strict=False)) if a != b), len(kept))
        beginning = len(b"".join(kept[:same]))
        try:
            if same == len(kept):
                os.truncate(path, beginning)  # takes no space
            else:
                write_atomically(path, lambda file: file.writelines(kept))
        except OSError as error:
            os.truncate(path, beginning)
            self.warn(name, error)

    def rows(self, name: str) -> list[dict[str, str]]:
        """The whole rows of a CSV file; none where it is missing."""
        with open_or_empty(self.folder / name) as file:
            header, *rows = list(csv.reader(line for line in file if line.endswith("\n"))) or [[]]
        return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]

    def lines(self, name: str) -> list[dict]:
        """The whole lines of a JSON lines file; none where it is missing."""
        with open_or_empty(self.folder / name) as file:
            return [values for line in file if (values := parsed(line)) is not None]

    def json(self, name: str) -> dict | None:
        """The content of a JSON file; None where it is missing or damaged."""
        with open_or_empty(self.folder / name) as file:
            return parsed(file.read())

    def warn(self, name: str, error: OSError) -> None:
        if name not in self.failing:
            self.failing.add(name)
            tell(f"warning   {name} cannot be written ({first_line(error)}); what belongs there is lost")


def open_or_empty(path: Path) -> io.TextIOBase:
    try:
        return open(path, newline="", encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return io.StringIO()


def parsed(text: str) -> dict | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def whole_lines_end(path: Path) -> int:
    """Bytes of a file up to the end of its last whole line."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                return start + newline + 1
            end = start
    return 0


def csv_text(rows: Iterable[Iterable]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([repr(v) if isinstance(v, float) else v for v in row] for row in rows)
    return text.getvalue()


def kept_rows(lines: list[bytes], steps: int, columns: tuple[str, ...]) -> list[bytes]:
    """The header of a CSV file, and its whole rows of the first `steps` steps."""
    rows = [row for row in csv.reader(line.decode(errors="replace") for line in lines if line.endswith(b"\n")) if row]
    if not rows:
        return []
    header, *rows = rows
    rows = [row for row in rows if len(row) == len(header) and row[0].isdecimal() and int(row[0]) <= steps]
    if columns and tuple(header) != columns:
        rows = [[dict(zip(header, row, strict=True)).get(column, "") for column in columns] for row in rows]
        header = list(columns)
    return csv_text([header, *rows]).encode().splitlines(keepends=True)


def kept_lines(lines: list[bytes], steps: int) -> list[bytes]:
    """The whole lines of a JSON lines file that belong to the first `steps` steps."""
    return [
        line
        for line in lines
        if line.endswith(b"\n")
        and (values := parsed(line.decode(errors="replace"))) is not None
        and values.get("step", -1) < steps
    ]
