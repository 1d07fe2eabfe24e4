"""The records of a run: its small files, which are written, rewound and read here, and its loggers.

NAME.csv                one or more rows per step; the first column is the step (optimizer steps done)
NAME.jsonl              one JSON object per line; `step`, if present, is the number of a step, counted from 0
NAME.json, config.yaml  replaced as a whole

A kill can leave an incomplete last line: readers skip it, and the next writer removes it.

Weights and Biases and TensorBoard get the same values under these names:

metrics.csv     the names of its columns
scaling.csv     multiplier/LAYER
validation.csv  validation/DATA_ROWS/SCORE; validation/NAME/SCORE for tasks of suites; validation/probes/NAME/SCORE;
                validation/mean/KIND
"""

from __future__ import annotations

import csv
import io
import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from priors.nesting import check_nesting, read_json
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError, unreadable_text
from tabicl_train.outputs import naming, write_atomically

__all__ = ["Records"]

CONFIG = "config.yaml"
# Types of the values that are read from JSON files of a run. A value may be missing if its type has None, or if it is
# [str], a list of texts.
KINDS: dict[str, dict[str, Any]] = {
    "status.json": {"status": str, "step": int, "saved": int | None, "time": str | None, "cause": str | None},
    "test.json": {"step": int, "best_step": int | None, "sentences": [str]},
    "incidents.jsonl": {"step": int | None, "back_to": int | None, "reason": str | None},
    "provenance.jsonl": {
        "step": int,
        "time": str | None,
        "commit": str | None,
        "diff": str | None,
        "versions": dict | None,
        "command": [str],
        "machines": list | None,
    },
}


class WithoutAliases(yaml.SafeLoader):
    """Refuses aliases, which no run writes: with them, a short text could unfold to billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the node of the next event."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="an alias (*name), which no run writes,", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)


class Records:
    """The small files in a run directory, and the loggers of a run.

    Parameters
    ----------
    folder : Path
        The run directory; it must exist before something is written.

    Attributes
    ----------
    loggers : list
        Each has a `name`, `log_metrics` and `close`. A logger opens when it gets its first values, after all workers
        are forked. If it raises an error, it is dropped with a warning and the run continues.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loggers: list[Any] = []

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values by name after `step` optimizer steps: numbers, and texts, which a logger may leave out."""
        self._call_loggers("log_metrics", values, step)

    def close_loggers(self, exit_code: int = 0) -> None:
        """Write or upload what was logged; an exit code other than 0 marks the run as failed."""
        self._call_loggers("close", exit_code)
        self.loggers = []

    def _call_loggers(self, method: str, *arguments: Any) -> None:
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # of many types in wandb
                info(f"warning   {logger.name} has failed and logs nothing more: {first_line(error)}")
                self.loggers.remove(logger)

    def append_rows(self, name: str, *rows: dict) -> None:
        """Add rows to a CSV file, by column; floats keep all digits."""
        self._append(name, csv_text(row.values() for row in rows), header=csv_text([rows[0].keys()]))

    def append_line(self, name: str, values: dict) -> None:
        """Add a line to a JSON lines file."""
        self._append(name, json.dumps(values) + "\n")

    def _append(self, name: str, text: str, header: str = "") -> None:
        path = self.folder / name
        with naming(path), open(path, "ab") as file:
            end = whole_lines_end(path)
            file.truncate(end)  # removes an incomplete last line after a kill
            if end == 0:
                text = header + text
            file.write(text.encode())

    def replace(self, name: str, text: str) -> None:
        """Replace a file atomically: if the process is killed, it has the old or the new content."""
        write_atomically(self.folder / name, lambda file: file.write(text.encode()))

    def rewind(self, name: str, steps: int) -> None:
        """Drop incomplete lines, and lines of steps after the first `steps`, which will be repeated."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        lines = content.splitlines(keepends=True)
        kept = kept_rows(lines, steps) if path.suffix == ".csv" else kept_lines(lines, steps)
        if kept != lines:
            write_atomically(path, lambda file: file.writelines(kept))

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the complete rows of a CSV file, by column; empty if it is missing.

        Raises ConfigError if it cannot be read.
        """
        with open_or_empty(self.folder / name) as file:
            lines = [line for line in file if line.endswith("\n")]
        if not lines:
            return []
        try:
            header, *rows = csv.reader(lines)
        except csv.Error as error:
            raise ConfigError([f"{self.folder / name} cannot be read: {error}"]) from None
        return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]

    def lines(self, name: str) -> list[dict]:
        """Return the complete lines of a JSON lines file; empty if it is missing.

        Raises ConfigError if a line holds values of other types than those in KINDS.
        """
        found = []
        with open_or_empty(self.folder / name) as file:
            for number, line in enumerate(file, 1):
                values = parsed(line)
                if values is None:
                    continue
                if wrong := wrong_kinds(values, KINDS.get(name, {})):
                    raise ConfigError([f"{self.folder / name}: line {number} was not written by a run: {wrong}"])
                found.append(values)
        return found

    def config(self) -> dict[str, Any] | None:
        """Return the configuration in config.yaml; None if it is missing. Raises ConfigError if it cannot be read."""
        path = self.folder / CONFIG
        try:
            values = read_yaml(path.read_text(encoding="utf-8"), WithoutAliases)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or no date
            raise ConfigError([unreadable_text(path, error)]) from None
        if values is None:
            raise ConfigError([f"{path} is empty"])
        if not isinstance(values, dict):
            raise ConfigError([f"{path} is not the configuration of a run"])
        return values

    def json(self, name: str) -> dict | None:
        """Return the content of a JSON file; None if it is missing or damaged."""
        with open_or_empty(self.folder / name) as file:
            return parsed(file.read())

    def checked_json(self, name: str) -> dict | None:
        """Return the content of a JSON file like `json`, but None if its types are not those in KINDS."""
        values = self.json(name)
        return None if values is None or wrong_kinds(values, KINDS[name]) else values


def read_yaml(text: str, loader: type = yaml.SafeLoader) -> Any:
    """Parse YAML; raises yaml.YAMLError or ValueError whatever is wrong with it, also if it contains itself."""
    try:
        content = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError):
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # such as an IndexError for !!int ""
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from None
    check_nesting(content)
    return content


def wrong_kinds(values: dict, kinds: Mapping[str, Any]) -> str:
    """Return which values have other types than they should; "" if all are right."""
    wrong = []
    for key, kind in kinds.items():
        value = values.get(key)
        if isinstance(kind, list):
            is_right = isinstance(value, list | None) and all(isinstance(item, kind[0]) for item in value or [])
        else:
            is_right = isinstance(value, kind) and not isinstance(value, bool)
        if not is_right:
            wrong.append(f"{key} is {reprlib.repr(value)}")
    return ", ".join(wrong)


def number(text: str) -> int | float | str:
    """Convert a text to a number if it is one, otherwise return the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def open_or_empty(path: Path) -> io.TextIOBase:
    """Open a text file for reading; a missing one reads as empty."""
    try:
        return open(path, newline="", encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return io.StringIO()


def parsed(text: str) -> dict | None:
    """Parse a JSON object; None if it is incomplete or not an object."""
    try:
        values = read_json(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def whole_lines_end(path: Path) -> int:
    """Return the offset of the end of the last complete line of a file, in bytes."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 4096)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def csv_text(rows: Iterable[Iterable]) -> str:
    """Format rows as CSV; floats keep all digits."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for row in rows:
        writer.writerow([repr(cell) if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


def kept_rows(lines: list[bytes], steps: int) -> list[bytes]:
    """Return the header of a CSV file and the complete rows of the first `steps` steps."""
    complete = [line.decode(errors="replace") for line in lines if line.endswith(b"\n")]
    rows = [row for row in csv.reader(complete) if row]
    if not rows:
        return []
    header, *rows = rows
    kept = []
    for row in rows:
        if len(row) == len(header) and row[0].isdecimal() and int(row[0]) <= steps:
            kept.append(row)
    return csv_text([header, *kept]).encode().splitlines(keepends=True)


def kept_lines(lines: list[bytes], steps: int) -> list[bytes]:
    """Return the complete lines of a JSON lines file that belong to the first `steps` steps."""
    kept = []
    for line in lines:
        values = parsed(line.decode(errors="replace")) if line.endswith(b"\n") else None
        if values is None:
            continue
        step = values.get("step", -1)
        if not isinstance(step, int) or step < steps:
            kept.append(line)
    return kept
