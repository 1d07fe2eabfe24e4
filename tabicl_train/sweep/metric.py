"""The metric by which the runs of a sweep are compared, read from their files."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabicl_train.config.options import closest
from tabicl_train.config.schema import (
    CLASS_SCORES,
    NUMBER_SCORES,
    REAL,
    SYNTHETIC,
    RunConfig,
    StageConfig,
    configured_prior,
)
from tabicl_train.run_dir.curves import INSIDE, curve, training_loss
from tabicl_train.weights import resolve

DATA_SETS = "data_sets"  # attribute of a study: what `compared_data_sets` returned when it was begun
INCOMPARABLE = "incomparable"  # attribute of a study: what `incomparable` returned

# Means over data sets or sets of validation tables; `loss` is the mean training loss over the last tenth of the steps.
SWEEP_METRICS = (
    *("real/loss", "real/roc_auc", "real/accuracy", "real/r2", "synthetic/loss", "synthetic/accuracy", "synthetic/r2"),
    *("own/loss", "own/accuracy", "own/r2", "loss"),
)

# Settings of a stage that decide from which distribution its tables are drawn; the others decide how many, or learning.
OF_DISTRIBUTION = (
    *("rows", "row_distribution", "small_share", "small_rows", "train_share"),
    *("features", "features_per_row", "uses", "mix"),
)


def problem(metric: str, config: RunConfig) -> str | None:
    """Return why a run with this configuration does not write the metric, or None."""
    kind, _, score = metric.partition("/")
    settings = config.validation
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
    if not settings.every:
        return f"metric is {metric!r}, but validation.every is 0; set the number of steps between validations"
    if kind == REAL:
        if not settings.real_rows:
            return f"metric is {metric!r}, but validation.real_rows is 0"
        return None
    if not settings.rows:
        return f"metric is {metric!r}, but validation.rows is [], which leaves validation tables out"
    if kind not in config.curriculum.priors_by_kind(configured_prior(config.prior)):
        return f"metric is {metric!r}, but prior={config.prior['name']} draws no such tables"
    return None


def is_better_lower(metric: str) -> bool:
    return metric.endswith("loss")


def last(run_dir: Path, metric: str, data_sets: Collection[str] | None = None) -> float | None:
    """Return the last value of a run's metric, which may be nan, or None before the first one."""
    # data_sets: the public data sets over which the runs are compared; None takes those inside the run's trained range
    if metric == "loss":
        return training_loss(run_dir)
    values = curve(run_dir, metric, data_sets)
    if not values:
        return None
    _, value = values[-1]
    return value


def compared_data_sets(metric: str, configs: Collection[RunConfig]) -> dict[str, bool] | None:
    """Return the public data sets of a metric, and whether each lies inside the trained range of all runs."""
    # None for a metric without public data. Raises ConfigError if the weights that the runs start from cannot be read.
    if not metric.startswith(f"{REAL}/"):
        return None
    from tabicl_train.callbacks.scores import name_of, real_tasks, sizes_of  # pandas and scikit-learn: a second or two
    from tabicl_train.prediction.origin import position, trained_range

    inside_all: dict[str, bool] = {}
    for config in configs:
        trained = trained_range(last_checkpoint(config))
        for task in real_tasks(config.model.is_regression, config.validation.real_rows):
            name = name_of(task)
            is_inside = position(trained, sizes_of(task)) == INSIDE
            inside_all[name] = is_inside and inside_all.get(name, True)
    return inside_all


def last_checkpoint(config: RunConfig) -> dict[str, Any]:
    """Return what decides the trained range of a checkpoint at the end of a run with this configuration."""
    from tabicl_train.curriculum import largest_tables

    prior = configured_prior(config.prior)
    return {
        "config": asdict(config),
        "global_step": config.total_steps,
        "largest_tables": largest_tables(config.curriculum, prior, config.model.is_regression),
        "inherited_range": inherited_range(config.init_weights, config.model.is_regression),
    }


@functools.cache
def inherited_range(init_weights: str | None, is_regression: bool) -> dict[str, Any] | None:
    """Return the trained range of the weights that runs start from; None if it is unknown."""
    if init_weights is None:
        return None
    from tabicl_train.prediction.export import read_weights

    weights = read_weights(resolve(init_weights, is_regression))
    if weights.trained_range is None:
        return None
    return weights.trained_range.recorded(weights.config.max_classes)


def counted_data_sets(study: Any) -> list[str] | None:
    """Return the public data sets that count in a study; None for another metric, or a study that has not kept them."""
    data_sets = study.user_attrs.get(DATA_SETS)
    if data_sets is None:
        return None
    return [name for name, is_inside in data_sets.items() if is_inside]


def warning_of(metric: str, reasons: Mapping[str, str], folder: Path) -> str | None:
    """Return a line if values of a metric cannot be compared between the points of a sweep; reasons: `incomparable`."""
    if metric not in reasons:
        return None
    instead = f"tabicl-compare {shlex.quote(str(folder))} suite=NAME"
    if f"{REAL}/loss" not in reasons:
        instead = f"real/loss, or by {instead}"
    return f"{reasons[metric]}, and cannot be compared; compare such points by {instead}"


def incomparable(configs: Sequence[RunConfig]) -> dict[str, str]:
    """Say of each metric whose values are not of the same objective and tables in all runs, which settings differ."""
    # Metrics that not all of the runs have are left out, too.
    if len(configs) == 1:
        return {}
    tables_of_runs = [tables_by_kind(config) for config in configs]
    objectives_of_training = differing([objective(config) for config in configs])
    objectives_of_validation = differing([own_loss(config) for config in configs])
    reasons = {}
    for metric in SWEEP_METRICS:
        kind, _, score = metric.partition("/")
        if not all(kind in of_run for of_run in tables_of_runs):
            continue
        tables = differing([of_run[kind] for of_run in tables_of_runs])
        objectives = []
        if metric == "loss":
            objectives = objectives_of_training
        elif score == "loss":
            objectives = objectives_of_validation
        what = []
        if objectives:
            what.append("objectives")
        if tables:
            what.append("tables")
        if what:
            title = "training loss" if metric == "loss" else metric
            settings = ", ".join(dict.fromkeys([*objectives, *tables]))
            reasons[metric] = f"{title} of points that differ in {settings} is of different {' and '.join(what)}"
    return reasons


def objective(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what the training loss is."""
    return {"objective": config.objective, "auxiliary_losses": config.auxiliary_losses, **own_loss(config)}


def own_loss(config: RunConfig) -> dict[str, Any]:
    """Return what decides the network's own loss, which validation reports whatever is minimized."""
    from tabicl_train.model.config import family_of

    family = family_of(config.model)
    levels = config.model.outputs if config.model.is_regression else None  # of quantiles, over which a loss is a mean
    return {"model": {"family": (family.row_losses, family.losses), "num_quantiles": levels}}


def tables_by_kind(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings that decide on which tables a run is scored, by the kinds of metrics that it has."""
    # Of the training loss, the mean over the last tenth of the steps, these are the stages that have a part of it.
    stages = {}
    end = 0
    for name, stage in config.curriculum.stages.items():
        begin, end = end, end + stage.steps
        if begin < config.total_steps and end > 0.9 * config.total_steps:
            stages[name] = {option: getattr(stage, option) for option in OF_DISTRIBUTION}
    classes = {"max_classes": config.model.max_classes}
    by_kind: dict[str, dict[str, Any]] = {}
    by_kind["loss"] = {"prior": config.prior, "model": classes, "curriculum": {"stages": stages}}

    settings = config.validation
    if settings.every and settings.real_rows:
        by_kind[REAL] = {"task": config.model.is_regression, "validation": {"real_rows": settings.real_rows}}
    if settings.every and settings.rows:
        validation = {"rows": settings.rows, "tables": settings.tables, "features": settings.features}
        for kind, prior in drawn_priors(config).items():
            by_kind[kind] = {"prior": prior, "model": classes, "validation": validation}
            if kind == SYNTHETIC:
                by_kind[kind]["curriculum"] = counted_rows(config)
    return by_kind


def drawn_priors(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of the priors of the validation tables by kind: of a mixture, the components of the kind."""
    from priors.mix_scm import MixSCM

    drawn = {}
    for kind, part in config.curriculum.priors_by_kind(configured_prior(config.prior)).items():
        drawn[kind] = config.prior
        if isinstance(part, MixSCM):
            components = {name: dict(options) for name, options in part.components.items()}
            if len(components) == 1:  # whatever its share of all tables is
                for options in components.values():
                    del options["weight"]
            drawn[kind] = {**config.prior, "components": components}
    return drawn


def counted_rows(config: RunConfig) -> list[int]:
    """Return the rows of the synthetic validation tables inside the trained range, which alone count in means."""
    from tabicl_train.prediction.origin import range_of_stages, trained_range

    trained = trained_range(last_checkpoint(config))
    counted = []
    for rows in config.validation.rows:
        stage = StageConfig(rows=[rows, rows], features=list(config.validation.features))  # as validation draws them
        if trained.overlaps(range_of_stages([asdict(stage)], config.model.max_classes)):
            counted.append(rows)
    return counted


def differing(values: Sequence[Any], name: str = "") -> list[str]:
    """Return the dotted names of the settings that nested values do not share; of different choices, the group's."""
    first, *others = values
    if all(other == first for other in others):
        return []
    if not all(isinstance(value, dict) for value in values) or len({value.get("name") for value in values}) > 1:
        return [name]
    names = []
    for key in dict.fromkeys(key for value in values for key in value):
        names += differing([value.get(key) for value in values], f"{name}.{key}" if name else key)
    return names
