"""The metric by which the runs of a sweep are compared, read from their files."""

from __future__ import annotations

from pathlib import Path

from tabicl_train.config.options import closest
from tabicl_train.config.schema import CLASS_SCORES, NUMBER_SCORES, REAL, RunConfig, build_prior
from tabicl_train.run_dir.curves import curve, training_loss

# Means over data sets or sets of validation tables; `loss` is the mean training loss over the last tenth of the steps.
METRICS = (
    *("real/loss", "real/roc_auc", "real/accuracy", "real/r2", "synthetic/loss", "synthetic/accuracy", "synthetic/r2"),
    *("own/loss", "own/accuracy", "own/r2", "loss"),
)


def problem(metric: str, config: RunConfig) -> str | None:
    """Return why a run with this configuration does not write the metric, or None."""
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
    """Return the last value of a run's metric, which may be nan, or None before the first one."""
    if metric == "loss":
        return training_loss(run_dir)
    values = curve(run_dir, metric)
    return values[-1][1] if values else None
