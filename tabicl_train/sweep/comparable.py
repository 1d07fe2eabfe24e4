"""What differs between runs: whether they are trained on identical tables, and whether a metric compares them.

Values of a metric can be compared if they come from the same objective and from tables of the same distribution.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabicl_train.config.schema import REAL, SYNTHETIC, RunConfig, StageConfig, configured_prior, steps_of_stages
from tabicl_train.run.removed import as_of_now
from tabicl_train.sweep.metric import SWEEP_METRICS, is_better_lower, range_at_end

INCOMPARABLE = "settings that differ"  # attribute of a study: what `incomparable` returned

# Settings of a stage that do not change its tables. Any setting that is not listed here counts as one that does.
LEARNING_SETTINGS = (
    *("learning_rate", "schedule", "schedule_options", "warmup", "decay", "final_learning_rate", "clip"),
    *("weight_decay", "fresh_optimizer", "frozen", "checkpoint_rows", "col_attention_fp32", "pack_tokens"),
)
# Settings that change how many tables are drawn, or drawn together, but not the distribution of a single table.
COUNT_SETTINGS = ("steps", "tables", "group_size")


def incomparable(configs: Sequence[RunConfig]) -> dict[str, dict[str, list[str]]]:
    """Return the metrics by which runs cannot be compared, and the settings that are the reason.

    Parameters
    ----------
    configs : sequence of RunConfig
        The configurations of the runs.

    Returns
    -------
    dict
        By metric, then by what the settings change ("objectives" or "tables"), their dotted names. For example
        {"loss": {"objectives": ["objective.label_smoothing"], "tables": ["prior"]}}. Metrics that some of the runs do
        not have are left out.
    """
    tables_of_runs = [tables_by_kind(config) for config in configs]
    found = {}
    for metric in SWEEP_METRICS:
        kind, _, _ = metric.partition("/")
        if not all(kind in tables for tables in tables_of_runs):
            continue
        differences = {
            "objectives": differing([objective(metric, config) for config in configs]),
            "tables": differing([tables[kind] for tables in tables_of_runs]),
        }
        if any(differences.values()):
            found[metric] = {what: settings for what, settings in differences.items() if settings}
    return found


def warning_of(metric: str, found: Mapping[str, Mapping[str, list[str]]], folder: Path) -> str | None:
    """Return a warning if the points of a sweep cannot be compared by a metric, otherwise None.

    Parameters
    ----------
    metric : str
        The metric.
    found : mapping
        What `incomparable` returned for the runs of the sweep.
    folder : Path
        The folder of the sweep, which the advice names.

    Returns
    -------
    str or None
    """
    if metric not in found:
        return None
    title = "training loss" if metric == "loss" else metric
    settings = ", ".join(dict.fromkeys(itertools.chain(*found[metric].values())))
    reason = f"their {' and '.join(found[metric])} differ"
    instead = f"tabicl-compare {shlex.quote(str(folder))} suite=NAME"
    if f"{REAL}/loss" not in found:
        instead = f"real/loss, or by {instead}"
    return f"{title} cannot be compared between points that differ in {settings}: {reason}; compare them by {instead}"


def shared_in_words(names: Sequence[str], configs: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence about which points are trained on identical tables with the same seed.

    Parameters
    ----------
    names : sequence of str
        The names of the points.
    configs : iterable of mapping
        The configuration of each point in plain values, as in config.yaml.

    Returns
    -------
    str or None
        None for a single point.
    """
    groups: dict[str, list[str]] = {}
    for name, values in zip(names, configs, strict=True):
        config = as_of_now(dict(values))  # a sweep may have runs of two versions
        # A network that does not read missing values gets the same tables, but imputed.
        decisive = [training_tables(config), config["model"].get("missing_values")]
        groups.setdefault(json.dumps(decisive, sort_keys=True, default=str), []).append(name)
    if len(names) < 2:
        return None
    if len(groups) == 1:
        return "with the same seed, all points are trained on identical tables"
    shared = []
    for group in groups.values():
        if len(group) > 1:
            shared.append(" and ".join(f"({name})" for name in group))
    if not shared:
        return "no two points are trained on identical tables: their priors or curricula differ"
    return f"with the same seed, these points are trained on identical tables: {'; '.join(shared)}"


def training_tables(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, in plain values, that decide on which tables a run is trained, apart from its seed."""
    stages = {}
    for name, stage in config["curriculum"]["stages"].items():
        stages[name] = {key: setting for key, setting in stage.items() if key not in LEARNING_SETTINGS}
    classes = {"max_classes": config["model"].get("max_classes")}
    return {"prior": config["prior"], "model": classes, "curriculum": {"stages": stages}}


def objective(metric: str, config: RunConfig) -> dict[str, Any]:
    """Return the settings that define the loss of a metric; empty for metrics that are no losses."""
    from tabicl_train.model.config import family_of

    # On real tables, `loss` is the log loss or pinball loss of an estimator, whatever the network was trained by.
    if metric == f"{REAL}/loss" or not is_better_lower(metric):
        return {}
    family = family_of(config.model)
    # Validation reports the network's own loss, whatever is minimized.
    own = {"the network's loss": (family.row_losses, family.losses, family.targets, family.means)}
    model: dict[str, Any] = {}
    if config.model.is_regression:
        model["num_quantiles"] = config.model.outputs  # the loss is a mean over their levels
    if metric != "loss":
        return {**own, "model": model}
    model["dropout"] = config.model.dropout  # in training only
    return {**own, "objective": config.objective, "auxiliary_losses": config.auxiliary_losses, "model": model}


def tables_by_kind(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return, for each kind of metric that a run has, the settings that decide on which tables it is computed."""
    trained = training_tables(asdict(config))
    classes = trained["model"]
    stages = stages_at_end(config, trained["curriculum"]["stages"])
    by_kind: dict[str, dict[str, Any]] = {"loss": {**trained, "curriculum": {"stages": stages}}}

    settings = config.validation
    if settings.every and settings.real_suites:
        by_kind[REAL] = {"task": config.model.is_regression, "validation": {"suites": settings.real_suites}}
    if settings.every and settings.rows:
        validation = {"rows": settings.rows, "tables": settings.tables, "features": settings.features}
        for kind, prior in priors_of_validation(config).items():
            by_kind[kind] = {"prior": prior, "model": classes, "validation": validation}
        if SYNTHETIC in by_kind:
            by_kind[SYNTHETIC]["the trained range"] = rows_that_count(config)
    return by_kind


def stages_at_end(config: RunConfig, settings: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, for each stage in the last tenth of the run, the settings that decide the distribution of its tables.

    The training loss of a run is the mean over the last tenth of its steps.
    """
    stages = {}
    lengths = {name: stage.steps for name, stage in config.curriculum.stages.items()}
    end = 0
    for name, steps in steps_of_stages(lengths, config.total_steps).items():
        end += steps
        if end > 0.9 * config.total_steps:
            stages[name] = {key: value for key, value in settings[name].items() if key not in COUNT_SETTINGS}
    return stages


def priors_of_validation(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of the priors of the validation tables by kind, for a mixture its components of the kind."""
    from priors.mix_scm import MixSCM

    by_kind = {}
    for kind, part in config.curriculum.priors_by_kind(configured_prior(config.prior)).items():
        by_kind[kind] = config.prior
        if isinstance(part, MixSCM):
            components = part.components
            if len(components) == 1:  # it draws all tables of the kind, whatever its weight is
                components = {name: {**options, "weight": 1.0} for name, options in components.items()}
            by_kind[kind] = {**config.prior, "components": components}
    return by_kind


def rows_that_count(config: RunConfig) -> list[int]:
    """Return those numbers of rows of synthetic validation tables that lie inside the trained range.

    Only they count in means.
    """
    from tabicl_train.weights.pretrained import range_of_stages

    trained = range_at_end(config)
    rows_inside = []
    for rows in config.validation.rows:
        stage = StageConfig(rows=[rows, rows], features=list(config.validation.features))  # as validation draws them
        if trained.overlaps(range_of_stages([asdict(stage)], config.model.max_classes)):
            rows_inside.append(rows)
    return rows_inside


def differing(values: Sequence[Any], name: str = "") -> list[str]:
    """Return the names of the settings in which values differ.

    For example, [{"prior": {"name": "mlp_scm", "layers": 2}}, {"prior": {"name": "mlp_scm", "layers": 3}}] differ in
    ["prior.layers"]; if the second prior had another name, they would differ in ["prior"], since the settings of
    different choices are not the same settings.

    Parameters
    ----------
    values : sequence
        The values to compare, one for each run: dictionaries, which may be nested, or plain values.
    name : str
        The dotted name of the values themselves; the returned names begin with it.

    Returns
    -------
    list of str
        In the order of the dictionaries; empty if all values are equal.
    """
    first, *others = values
    if all(other == first for other in others):
        return []
    # Plain values, and different choices such as two priors, differ as a whole.
    if not all(isinstance(value, dict) for value in values):
        return [name]
    if len({value.get("name") for value in values}) > 1:
        return [name]
    # A difference inside dictionaries, which need not have the same keys.
    keys = dict.fromkeys(itertools.chain(*values))  # each once, in order
    names = []
    for key in keys:
        dotted = f"{name}.{key}" if name else key
        names += differing([value.get(key) for value in values], dotted)
    return names
