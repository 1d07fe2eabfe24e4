"""The curves of a run, from the CSV files that it writes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tabicl_train.errors import ConfigError
from tabicl_train.run.records import Records, number
from tabicl_train.run.score_names import REAL, validation_kind

# Where a task lies relative to the trained range: cells of the column trained_range in tables of scores.
INSIDE, OUTSIDE = "inside", "outside"
UNKNOWN = "unknown"  # the file of weights does not record the range
THIS_MODEL = "this model"  # the network that was scored: a cell of the column method


def training_loss(run_dir: Path) -> float | None:
    """Return the mean training loss over the last tenth of the steps.

    Non-finite losses do not count; nan if there are no others, None before the first step.
    """
    rows = rows_by_step(run_dir, "metrics.csv")
    last_step = max(rows, default=0)
    losses = []
    for step, rows_of_step in rows.items():
        if step > 0.9 * last_step:
            losses.append(number_in_column(rows_of_step[-1], "loss"))
    if not losses:
        return None
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite) if finite else math.nan


def curve(run_dir: Path, metric: str, data_sets: Collection[str] | None = None) -> list[tuple[int, float]]:
    """Return the mean of each validation over its sets of tables.

    Parameters
    ----------
    run_dir : Path
        The run directory.
    metric : str
        KIND/SCORE, such as real/loss.
    data_sets : collection of str, optional
        The public data sets that count, the same for all runs of a comparison. Default: those inside the trained range.

    Returns
    -------
    list of (int, float)
        Optimizer steps done, ascending, and the mean, which may be nan.

    Raises
    ------
    ConfigError
        If validation.csv was not written by a run.
    """
    kind, score = metric.split("/")
    means = []
    for step, rows in rows_by_step(run_dir, "validation.csv").items():
        if "data" not in rows[0]:
            raise ConfigError([f"{run_dir / 'validation.csv'} has no column data"])
        values = []
        for row in rows:
            if validation_kind(row["data"]) != kind:
                continue
            if counts_in_means(row, data_sets):
                values.append(number_in_column(row, score))
        if values:
            means.append((step, statistics.fmean(values)))
    return means


def counts_in_means(row: Mapping[str, Any], data_sets: Collection[str] | None = None) -> bool:
    """Whether a row of validation.csv counts in means: its tables do not lie outside the trained range.

    If `data_sets` are given, they are the public data sets that count, whatever the trained range.
    """
    if data_sets is not None and validation_kind(row["data"]) == REAL:
        return row["data"] in data_sets
    return row.get("trained_range") != OUTSIDE  # earlier versions did not write the column


def rows_by_step(run_dir: Path, name: str) -> dict[int, list[dict[str, str]]]:
    """Return the complete rows of a CSV file by ascending step, without rows of steps that the run has repeated."""
    rows: dict[int, list[dict[str, str]]] = {}
    latest = -1
    for row in Records(run_dir).rows(name):
        step = number(row.get("step", ""))  # a file of another program may have no such column
        if not isinstance(step, int):
            continue
        if step < latest:  # the run was rewound, and repeats the steps from here on
            rows = {earlier: rows_of_step for earlier, rows_of_step in rows.items() if earlier < step}
        rows.setdefault(step, []).append(row)
        latest = step
    return rows


def number_in_column(row: dict[str, str], column: str) -> float:
    """Return a cell of a row as a number; nan if it is missing or holds a text."""
    cell = number(row.get(column, ""))
    return math.nan if isinstance(cell, str) else float(cell)
