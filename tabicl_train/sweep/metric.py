"""The metric of a sweep: what its runs are compared by, read from the files that each of them writes."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from tabicl_train.config.options import closest
from tabicl_train.config.schema import CLASS_SCORES, NUMBER_SCORES, REAL, RunConfig, build_prior, kind_of
from tabicl_train.run_dir.records import Records, number

# Means over data sets or sets of validation tables; `loss` is the mean training loss over the last tenth of the steps.
METRICS = (
    *("real/loss", "real/roc_auc", "real/accuracy", "real/r2", "synthetic/loss", "synthetic/accuracy", "synthetic/r2"),
    *("own/loss", "own/accuracy", "own/r2", "loss"),
)


def problem(metric: str, config: RunConfig) -> str | None:
    """Why a run with this configuration would never write the metric; None if it does."""
    (kind, _, score), settings = metric.partition("/"), config.validation
    if metric not in METRICS:
        near = closest(metric, METRICS)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(METRICS)}"
        return f"metric is {metric!r}; there is no such metric; {hint}"
    if metric == "loss":
        return None
    if score not in (NUMBER_SCORES if config.model.is_regression else CLASS_SCORES):
        task = "regression" if config.model.is_regression else "classification"
        return f"metric is {metric!r}, which runs of task={task} do not have"
    if not settings.every:
        return f"metric is {metric!r}, but validation.every is 0; set the number of steps between validations"
    if kind == REAL:
        return None if settings.real_rows else f"metric is {metric!r}, but validation.real_rows is 0"
    if not settings.rows:
        return f"metric is {metric!r}, but validation.rows is [], which leaves validation tables out"
    if kind not in config.curriculum.parts(build_prior(config.prior)):
        return f"metric is {metric!r}, but prior={config.prior['name']} draws no such tables"
    return None


def is_better_lower(metric: str) -> bool:
    return metric.endswith("loss")


def last(run_dir: Path, metric: str) -> float | None:
    """The metric of a run so far, which may be nan; None if there is no value yet."""
    if metric == "loss":
        return training_loss(run_dir)
    values = curve(run_dir, metric)
    return values[-1][1] if values else None


def training_loss(run_dir: Path) -> float | None:
    """The mean over the last tenth of the steps, without those whose loss was not finite; None before the first one."""
    rows = rows_by_step(run_dir, "metrics.csv")
    losses = [value(at_step[-1], "loss") for step, at_step in rows.items() if step > 0.9 * max(rows)]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite) if finite else math.nan if losses else None


def curve(run_dir: Path, metric: str) -> list[tuple[int, float]]:
    """The means of the validations over their sets of tables, by ascending optimizer steps done; they may be nan."""
    kind, score = metric.split("/")
    rows = rows_by_step(run_dir, "validation.csv")
    return [
        (step, statistics.fmean(values))
        for step, at_step in rows.items()
        if (values := [value(row, score) for row in at_step if kind_of(row["data"]) == kind])
    ]


def rows_by_step(run_dir: Path, name: str) -> dict[int, list[dict[str, str]]]:
    """The complete rows of a CSV file by their step, ascending. Where a run went back to an earlier step, the rows that
    it had written from there on do not count."""
    rows: dict[int, list[dict[str, str]]] = {}
    latest = -1
    for row in Records(run_dir).rows(name):
        step = number(row["step"])
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
