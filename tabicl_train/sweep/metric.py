"""The metric by which the runs of a sweep are compared, read from their files."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from priors.options import closest
from tabicl_train.config.schema import CLASS_SCORES, NUMBER_SCORES, REAL, RunConfig, configured_prior
from tabicl_train.run.curves import INSIDE, curve, training_loss
from tabicl_train.weights import resolve

if TYPE_CHECKING:
    from tabicl_train.weights.pretrained import TrainedRange

DATA_SETS = "data_sets"  # attribute of a study: what `compared_data_sets` returned when it was begun

# Means over data sets or sets of validation tables; `loss` is the mean training loss over the last tenth of the steps.
SWEEP_METRICS = (
    *("real/loss", "real/roc_auc", "real/accuracy", "real/r2", "synthetic/loss", "synthetic/accuracy", "synthetic/r2"),
    *("own/loss", "own/accuracy", "own/r2", "loss"),
)


def metric_problem(metric: str, config: RunConfig) -> str | None:
    """Return why a run with this configuration does not write the metric, or None."""
    kind, _, score = metric.partition("/")
    settings = config.validation

    # The name, and whether runs of the task have such a score. Every run writes its training loss.
    if metric not in SWEEP_METRICS:
        near = closest(metric, SWEEP_METRICS)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SWEEP_METRICS)}"
        return f"metric is {metric!r}; there is no such metric; {hint}"
    if metric == "loss":
        return None
    if config.model.is_regression and score not in NUMBER_SCORES:
        return f"metric is {metric!r}, which runs of task=regression do not have"
    if not config.model.is_regression and score not in CLASS_SCORES:
        return f"metric is {metric!r}, which runs of task=classification do not have"

    # The validations that the metric is read from.
    if not settings.every:
        return f"metric is {metric!r}, but validation.every is 0; set the number of steps between validations"
    if kind == REAL:
        if not settings.real_suites:
            return f"metric is {metric!r}, but validation.suites is {settings.suites}"
        return None
    if not settings.rows:
        return f"metric is {metric!r}, but validation.rows is [], so no validation tables are drawn"
    if kind not in config.curriculum.priors_by_kind(configured_prior(config.prior)):
        return f"metric is {metric!r}, but prior={config.prior['name']} draws no such tables"
    return None


def is_better_lower(metric: str) -> bool:
    return metric.endswith("loss")


def last_value(run_dir: Path, metric: str, data_sets: Collection[str] | None = None) -> float | None:
    """Return the last value of a run's metric.

    Parameters
    ----------
    run_dir : Path
        The run directory.
    metric : str
        One of SWEEP_METRICS.
    data_sets : collection of str, optional
        The public data sets over which runs are compared. Default: those inside the trained range of the run.

    Returns
    -------
    float or None
        It may be nan; None before the first value.
    """
    if metric == "loss":
        return training_loss(run_dir)
    values = curve(run_dir, metric, data_sets)
    if not values:
        return None
    _, value = values[-1]
    return value


def compared_data_sets(metric: str, configs: Collection[RunConfig]) -> dict[str, bool] | None:
    """Return the public data sets of a metric, and whether each lies inside the trained range of all runs.

    Parameters
    ----------
    metric : str
        One of SWEEP_METRICS.
    configs : collection of RunConfig
        The configurations of the runs.

    Returns
    -------
    dict of str to bool, or None
        None for a metric without public data.

    Raises
    ------
    ConfigError
        If the weights that the runs start from cannot be read.
    """
    if not metric.startswith(f"{REAL}/"):
        return None
    from tabicl_train.training.callbacks.scores import suite_tasks  # pandas and scikit-learn: a second or two
    from tabicl_train.weights.pretrained import position

    inside_all: dict[str, bool] = {}
    for config in configs:
        trained = range_at_end(config)
        for task in suite_tasks(tuple(config.validation.real_suites), config.model.is_regression):
            is_inside = position(trained, task.sizes) == INSIDE
            inside_all[task.name] = is_inside and inside_all.get(task.name, True)
    return inside_all


def range_at_end(config: RunConfig) -> TrainedRange:
    """Return the trained range of the weights at the end of a run with this configuration."""
    from tabicl_train.stream.curriculum import largest_tables
    from tabicl_train.weights.pretrained import trained_range

    prior = configured_prior(config.prior)
    last_checkpoint = {
        "config": asdict(config),
        "global_step": config.total_steps,
        "largest_tables": largest_tables(config.curriculum, prior, config.model.is_regression),
        "inherited_range": inherited_range(config.init_weights, config.model.is_regression),
    }
    return trained_range(last_checkpoint)


@functools.cache
def inherited_range(init_weights: str | None, is_regression: bool) -> dict[str, Any] | None:
    """Return the trained range of the weights that runs start from; None if it is unknown."""
    if init_weights is None:
        return None
    from tabicl_train.weights.reader import read_weights

    weights = read_weights(resolve(init_weights, is_regression))
    if weights.trained_range is None:
        return None
    return weights.trained_range.recorded(weights.config.max_classes)


def counted_data_sets(study: Any) -> list[str] | None:
    """Return the public data sets that count in a study; None if its metric has none, or none are recorded."""
    data_sets = study.user_attrs.get(DATA_SETS)
    if data_sets is None:
        return None
    return [name for name, is_inside in data_sets.items() if is_inside]
