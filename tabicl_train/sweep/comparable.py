"""What differs between runs: whether they are trained on identical tables, and whether a metric compares them.

The values of a metric can be compared if they are of the same objective and of tables of the same distribution.
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

# Settings of a stage that do not change its tables. A setting that is not named here counts as one that does.
OF_LEARNING = (
    *("learning_rate", "schedule", "schedule_options", "warmup", "decay", "final_learning_rate", "clip"),
    *("weight_decay", "fresh_optimizer", "frozen", "checkpoint_rows", "col_attention_fp32", "pack_tokens"),
)
# How many tables a stage draws, and how many of them share their sizes; each table is of the same distribution.
OF_NUMBERS = ("steps", "tables", "group_size")


def incomparable(configs: Sequence[RunConfig]) -> dict[str, dict[str, list[str]]]:
    """Return the metrics by which runs cannot be compared, each with the settings that differ, by what they decide.

    For example {"loss": {"objectives": ["objective.label_smoothing"], "tables": ["prior"]}}. Metrics of a kind that not
    all of the runs have are left out.
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
    """Return a line if the points of a sweep cannot be compared by a metric; found: what `incomparable` returned."""
    if metric not in found:
        return None
    title = "training loss" if metric == "loss" else metric
    settings = ", ".join(dict.fromkeys(itertools.chain(*found[metric].values())))
    reason = f"{title} of points that differ in {settings} is of different {' and '.join(found[metric])}"
    instead = f"tabicl-compare {shlex.quote(str(folder))} suite=NAME"
    if f"{REAL}/loss" not in found:
        instead = f"real/loss, or by {instead}"
    return f"{reason}, and cannot be compared; compare such points by {instead}"


def shared_in_words(names: Sequence[str], configs: Iterable[Mapping[str, Any]]) -> str | None:
    """Say which points are trained on identical tables with the same seed; None if there is one point only.

    configs: as in config.yaml
    """
    groups: dict[str, list[str]] = {}
    for name, values in zip(names, configs, strict=True):
        config = as_of_now(dict(values))  # a sweep may have runs of two versions
        # For networks that do not read missing values the same tables are imputed.
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
    """Return the settings that decide on which tables a run is trained, apart from its seed; config: plain values."""
    stages = {}
    for name, stage in config["curriculum"]["stages"].items():
        stages[name] = {key: setting for key, setting in stage.items() if key not in OF_LEARNING}
    classes = {"max_classes": config["model"].get("max_classes")}
    return {"prior": config["prior"], "model": classes, "curriculum": {"stages": stages}}


def objective(metric: str, config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide what a loss is; nothing for other scores."""
    from tabicl_train.model.config import family_of

    # On real tables the loss is that of an estimator, whatever the network's own loss is.
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
    """Return the settings that decide on which tables a run is scored, by the kinds of metrics that it has."""
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
            stages[name] = {key: value for key, value in settings[name].items() if key not in OF_NUMBERS}
    return stages


def priors_of_validation(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of the priors of the validation tables by kind: of a mixture, the components of the kind."""
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
    """Return the rows of the synthetic validation tables inside the trained range, which alone count in means."""
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
        The values to compare, one of each run: dictionaries, which may be nested, or plain values.
    name : str
        The dotted name of the values themselves, with which the returned names begin.

    Returns
    -------
    list of str
        In the order of the dictionaries; empty if all values are equal.
    """
    first, *others = values
    if all(other == first for other in others):
        return []
    # A difference without parts: of plain values, or of different choices, such as priors.
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
