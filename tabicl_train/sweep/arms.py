"""The points of a sweep as arms of a comparison, paired by seed, and which of them are trained on the same tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from tabicl_train.config.schema import PROBES, REAL, validation_kind
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import Networks
from tabicl_train.evaluation.compare import Arm
from tabicl_train.run_dir.curves import OUTSIDE, counts, rows_by_step, training_loss, value
from tabicl_train.run_dir.records import Records
from tabicl_train.sweep.metric import SWEEP_METRICS
from tabicl_train.sweep.results import Sweep, SweepRun

# Settings of a stage that do not change its tables. A setting that is not named here counts as one that does.
OF_LEARNING = (
    *("learning_rate", "schedule", "warmup", "decay", "final_learning_rate", "clip", "weight_decay"),
    *("fresh_optimizer", "frozen", "checkpoint_rows", "col_attention_fp32", "pack_tokens"),
)


class Points:
    """The finished points of a sweep, in the order of its values, so that the first one is the first of each setting.

    by: a setting whose values are the arms; scores are then means over the values of all others
    """

    def __init__(self, sweep: Sweep, by: str | None = None) -> None:
        self.sweep = sweep
        self.finished = [point for point in sweep.points if point.trial.state == TrialState.COMPLETE]
        self.finished.sort(key=lambda point: place(point.trial))
        if len(self.finished) < 2:
            raise ConfigError([f"{sweep.folder}: {counted(len(self.finished), 'point')} finished; two are needed"])
        self.by = None if by is None else self.key_of(by)

    def key_of(self, by: str) -> str:
        """Return the key of a setting that varies, from the key or its short name."""
        for key, short_name in self.sweep.parameters.items():
            if by in (key, short_name):
                return key
        there = ", ".join(self.sweep.parameters.values())
        raise ConfigError([f"by is {by!r}, which does not vary in {self.sweep.folder}; there are {there}"])

    def name(self, trial: FrozenTrial, keys: Collection[str] | None = None) -> str:
        """Return the name of a point: its settings, or only those with these keys."""
        values = self.sweep.params(trial)
        settings = []
        for key, short_name in self.sweep.parameters.items():
            if keys is None or key in keys:
                settings.append(f"{short_name}={values[short_name]}")
        return ", ".join(settings)

    def networks(self) -> list[Networks]:
        """Return the runs of each point, by seed."""
        networks = []
        for trial, runs in self.finished:
            folders = {run.seed: str(run.folder) for run in runs}
            networks.append(Networks(self.name(trial), folders))
        return networks

    def validations(self) -> list[Arm]:
        """Return the last validations of each point: a row for each set of tables, a column for each metric."""
        arms = []
        for trial, runs in self.finished:
            scores: dict[Hashable, pd.DataFrame] = {run.seed: self.last_validation(run) for run in runs}
            arms.append(Arm(self.name(trial), scores))
        return arms

    def last_validation(self, run: SweepRun) -> pd.DataFrame:
        """Return the rows of the last validation that count, and one for the training loss."""
        rows = [{"data": "training", "split": 0, "loss": training_loss(run.folder)}]
        by_step = rows_by_step(run.folder, "validation.csv")
        last_rows = by_step[max(by_step)] if by_step else []
        for row in last_rows:
            kind = validation_kind(row["data"])
            if kind == PROBES:  # no metric of a sweep is of them; tabicl-compare SWEEP suite=probes compares by them
                continue
            if not counts(row, self.sweep.data_sets):
                continue
            data = row["data"] if kind == REAL else f"{kind} {row.get('rows', '')} rows"
            scores = {}
            for metric in SWEEP_METRICS:
                metric_kind, _, score = metric.partition("/")
                if metric_kind == kind:
                    scores[metric] = value(row, score)
            rows.append({"data": data, "split": 0, **scores})
        return pd.DataFrame(rows).set_index(["data", "split"])

    def merged(self, arms: Sequence[Arm]) -> list[Arm]:
        """Return an arm for each value of the setting `by`: the means over the settings that all of the values have."""
        if self.by is None:
            return list(arms)
        other_keys = [key for key in self.sweep.parameters if key != self.by]
        by_value: dict[str, dict[str, Arm]] = {}  # the arms of each value of `by`, by their other settings
        for (trial, _), arm in zip(self.finished, arms, strict=True):
            arms_of_value = by_value.setdefault(self.name(trial, [self.by]), {})
            arms_of_value[self.name(trial, other_keys)] = arm

        first, *rest = by_value.values()
        shared = [others for others in first if all(others in arms_of_value for arms_of_value in rest)]
        if not shared:
            raise ConfigError([f"by is {self.by!r}, but no two finished points differ in nothing else"])
        means = []
        for name, arms_of_value in by_value.items():
            means.append(mean_arm(name, [arms_of_value[others] for others in shared]))
        return means


def place(trial: FrozenTrial) -> tuple:
    """Return the place of a point among the values of a grid; in the order of trials if there are ranges."""
    places = []
    for key, distribution in trial.distributions.items():
        if not isinstance(distribution, CategoricalDistribution):
            return (trial.number,)
        places.append(distribution.choices.index(trial.params[key]))
    return tuple(places)


def mean_arm(name: str, arms: Sequence[Arm]) -> Arm:
    """Return the means of several arms over the seeds and tasks that all of them have."""
    first, *rest = arms
    scores = {}
    for seed in first.scores:
        if not all(seed in arm.scores for arm in rest):
            continue
        frames = [arm.scores[seed] for arm in arms]
        shared = frames[0].index
        for frame in frames[1:]:
            shared = shared[shared.isin(frame.index)]
        frames = [frame.loc[shared] for frame in frames]
        # nan stays nan: the mean over the other settings would not be paired with that of another value.
        total = frames[0].select_dtypes("number")
        for frame in frames[1:]:
            total = total + frame.select_dtypes("number")
        means = total / len(frames)
        if "trained_range" in frames[0]:  # outside for the mean if outside for any arm
            ranges = pd.concat([frame["trained_range"] for frame in frames], axis=1)
            means["trained_range"] = ranges.iloc[:, 0].mask((ranges == OUTSIDE).any(axis=1), OUTSIDE)
        scores[seed] = means
    return Arm(name, scores, listed=first.listed)


def tables_of(config: dict[str, Any]) -> str:
    """Return what decides the tables of a run apart from its seed, as text, from its configuration."""
    stages = {}
    for name, stage in config["curriculum"]["stages"].items():
        stages[name] = {key: setting for key, setting in stage.items() if key not in OF_LEARNING}
    model = config["model"]
    decisive = [
        config["prior"],
        stages,
        config["curriculum"].get("start"),
        [model.get("max_classes"), model.get("missing_values")],
        config.get("task"),
    ]
    return json.dumps(decisive, sort_keys=True, default=str)


def shared_in_words(names: Sequence[str], configs: Iterable[dict[str, Any]]) -> str | None:
    """Say which points are trained on identical tables with the same seed; None if there is one point only."""
    groups: dict[str, list[str]] = {}
    for name, config in zip(names, configs, strict=True):
        groups.setdefault(tables_of(config), []).append(name)
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


def shared_of_runs(points: Points) -> str | None:
    """Say which points of a sweep are trained on identical tables; None if its runs have no configuration."""
    names = []
    configs = []
    for trial, runs in points.finished:
        config = Records(Path(runs[0].folder)).config()
        if config is None or not {"prior", "curriculum", "model"} <= config.keys():
            return None
        names.append(points.name(trial))
        configs.append(config)
    return shared_in_words(names, configs)
