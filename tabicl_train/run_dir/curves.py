"""The curves of a run, from the CSV files that it writes."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from tabicl_train.config.schema import kind_of
from tabicl_train.run_dir.records import Records, number


def training_loss(run_dir: Path) -> float | None:
    """Return the mean over the last tenth of the steps, without non-finite losses; None before the first step."""
    rows = rows_by_step(run_dir, "metrics.csv")
    losses = [value(at_step[-1], "loss") for step, at_step in rows.items() if step > 0.9 * max(rows)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite) if finite else math.nan if losses else None


def curve(run_dir: Path, metric: str) -> list[tuple[int, float]]:
    """Return the mean of each validation over its sets of tables, by ascending optimizer steps done; it may be nan."""
    kind, score = metric.split("/")
    rows = rows_by_step(run_dir, "validation.csv")
    return [
        (step, statistics.fmean(values))
        for step, at_step in rows.items()
        if (values := [value(row, score) for row in at_step if kind_of(row["data"]) == kind])
    ]


def rows_by_step(run_dir: Path, name: str) -> dict[int, list[dict[str, str]]]:
    """Return the complete rows of a CSV file by ascending step, without those that a run has repeated later."""
    rows: dict[int, list[dict[str, str]]] = {}
    latest = -1
    for row in Records(run_dir).rows(name):
        step = number(row.get("step", ""))  # none in a file of another program
        if not isinstance(step, int):
            continue
        if step < latest:
            rows = {earlier: at_step for earlier, at_step in rows.items() if earlier < step}
        rows.setdefault(step, []).append(row)
        latest = step
    return rows


def value(row: dict[str, str], column: str) -> float:
    cell = number(row.get(column, ""))
    return math.nan if isinstance(cell, str) else float(cell)
