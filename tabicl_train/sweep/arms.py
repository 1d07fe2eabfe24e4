"""The points of a sweep as arms of a comparison, paired by seed."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from tabicl_train.config.schema import PROBES, REAL, validation_kind
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import mean_arm
from tabicl_train.evaluation.compare import Arm
from tabicl_train.run.curves import counts_in_means, number_in_column, rows_by_step, training_loss
from tabicl_train.run.records import Records
from tabicl_train.sweep.comparable import shared_in_words
from tabicl_train.sweep.metric import SWEEP_METRICS
from tabicl_train.sweep.results import Sweep, SweepPoint, SweepRun


def arms_of_sweep(sweep: Sweep, by: str | None = None, validated: bool = False) -> list[Arm]:
    """Return the finished points of a sweep as arms.

    Parameters
    ----------
    sweep : Sweep
        A sweep of which at least two points have finished.
    by : str, optional
        A setting whose values become the arms, each the mean over those other settings that all of the values have.
        Default: every point is an arm.
    validated : bool, optional
        Whether the arms have the scores of the last validations. Otherwise their networks are still to be scored.

    Returns
    -------
    list of Arm
        In the order of the values of the grid.

    Raises
    ------
    ConfigError
        If fewer than two points have finished, or `by` does not vary or has no two values with the same other settings.
    """
    # Every finished point is an arm. With `by`, they are also grouped by its value, and then by the other settings.
    key = None if by is None else varied_key(sweep, by)
    other_keys = [each for each in sweep.parameters if each != key]
    arms: dict[str, Arm] = {}  # by name
    by_value: dict[str, dict[str, Arm]] = {}  # of each value of `by`, by the other settings
    for trial, runs in finished_points(sweep):
        name = point_name(sweep, trial, sweep.parameters)
        if validated:
            arm = Arm(name, {run.seed: last_validation(sweep, run) for run in runs})
        else:
            arm = Arm(name, paths={run.seed: str(run.folder) for run in runs})
        arms[name] = arm
        if key is not None:
            by_value.setdefault(point_name(sweep, trial, [key]), {})[point_name(sweep, trial, other_keys)] = arm
    if key is None:
        return list(arms.values())

    # Only settings that all values were combined with count, so that each mean is over the same points.
    first, *rest = by_value.values()
    shared = [others for others in first if all(others in arms_of_value for arms_of_value in rest)]
    if not shared:
        raise ConfigError([f"by is {key!r}; no two finished points differ in this setting alone"])
    means = []
    for name, arms_of_value in by_value.items():
        parts = tuple(arms_of_value[others] for others in shared)
        means.append(mean_arm(name, parts) if validated else Arm(name, parts=parts))
    return means


def finished_points(sweep: Sweep) -> list[SweepPoint]:
    """Return the finished points in the order of the values, so that the first one is the first of each setting."""
    finished = [point for point in sweep.points if point.trial.state == TrialState.COMPLETE]
    if len(finished) < 2:
        raise ConfigError([f"{sweep.folder}: {counted(len(finished), 'point')} finished; two are needed"])
    return sorted(finished, key=lambda point: grid_place(point.trial))


def grid_place(trial: FrozenTrial) -> tuple:
    """Return a sort key: the indices of the point's values in a grid, or its trial number if a range varies."""
    places = []
    for key, distribution in trial.distributions.items():
        if not isinstance(distribution, CategoricalDistribution):
            return (trial.number,)
        places.append(distribution.choices.index(trial.params[key]))
    return tuple(places)


def varied_key(sweep: Sweep, by: str) -> str:
    """Return the key of a setting that varies, from the key or its short name."""
    for key, short_name in sweep.parameters.items():
        if by in (key, short_name):
            return key
    there = ", ".join(sweep.parameters.values())
    raise ConfigError([f"by is {by!r}, which does not vary in {sweep.folder}; there are {there}"])


def point_name(sweep: Sweep, trial: FrozenTrial, keys: Collection[str]) -> str:
    """Return the name of a point: its settings with these keys."""
    values = sweep.params(trial)
    return ", ".join(f"{name}={values[name]}" for key, name in sweep.parameters.items() if key in keys)


def last_validation(sweep: Sweep, run: SweepRun) -> pd.DataFrame:
    """Return the last validation of a run: a row for each set of tables that counts, and one for the training loss."""
    rows = [{"data": "training", "split": 0, "loss": training_loss(run.folder)}]
    by_step = rows_by_step(run.folder, "validation.csv")
    last_rows = by_step[max(by_step)] if by_step else []
    for row in last_rows:
        kind = validation_kind(row["data"])
        if kind == PROBES:  # no sweep has a metric on probes; tabicl-compare SWEEP suite=probes compares them
            continue
        if not counts_in_means(row, sweep.data_sets):
            continue
        data = row["data"] if kind == REAL else f"{kind} {row.get('rows', '')} rows"
        scores = {}
        for metric in SWEEP_METRICS:
            metric_kind, _, score = metric.partition("/")
            if metric_kind == kind:
                scores[metric] = number_in_column(row, score)
        rows.append({"data": data, "split": 0, **scores})
    return pd.DataFrame(rows).set_index(["data", "split"])


def shared_of_runs(sweep: Sweep) -> str | None:
    """Say which points of a sweep are trained on identical tables; None if its runs have no configuration."""
    names = []
    configs = []
    for trial, runs in finished_points(sweep):
        config = Records(runs[0].folder).config()
        if config is None or not {"prior", "curriculum", "model"} <= config.keys():
            return None
        names.append(point_name(sweep, trial, sweep.parameters))
        configs.append(config)
    return shared_in_words(names, configs)
