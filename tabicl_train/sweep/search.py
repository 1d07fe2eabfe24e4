"""The points of a sweep one after another: listed, or from Optuna, which can also stop the poor ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabicl_train.run_dir.records import whole_lines_end
from tabicl_train.sweep.metric import is_better_lower
from tabicl_train.sweep.plan import Job, Plan, fingerprint
from tabicl_train.sweep.space import Choices, Point, Range

NAME = "study.log"
STARTUP = 5  # points that end before the median is taken for a limit


@dataclass
class Trial:
    """A point that is tried.

    told: whether Optuna knows its end, or need not
    optuna: Optuna's trial
    """

    point: Point
    told: bool = True
    optuna: Any = None
    reported: set[int] = field(default_factory=set)  # steps whose values Optuna knows
    jobs: list[Job] = field(default_factory=list)


class Listed:
    """The points of a grid, or random ones; none is stopped."""

    def __init__(self, points: list[Point]) -> None:
        self.points = points

    def known(self) -> Iterator[Trial]:
        """The points that do not depend on results still to come."""
        return map(Trial, self.points)

    def next(self) -> Trial | None:
        """Another point, in view of the results so far; None if there is none."""
        return None

    def should_stop(self, trial: Trial, curve: list[tuple[int, float]]) -> bool:
        """Whether a trial does worse than the others. curve: the metric so far of the job with its first seed"""
        return False

    def tell(self, trial: Trial, status: str, value: float) -> None:
        """The end of a trial: finished with a value, failed or pruned."""


class Study(Listed):
    """Points known to Optuna, which proposes them unless they are listed. Its storage lies in the sweep's folder.

    The points that it proposes depend on their numbers and on the results before, not on when the sweep was started.
    """

    def __init__(self, plan: Plan) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.plan, self.sweep = plan, plan.sweep
        self.distributions = {axis.key: distribution(axis) for axis in plan.axes}
        assert self.sweep.metric is not None
        identity = [str(self.distributions), [*plan.settings, *plan.own], self.sweep.seeds, self.sweep.metric]
        identity += [self.sweep.method, self.sweep.pruner]
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(whole_file(plan.folder / NAME)))),
            study_name=fingerprint(identity),
            direction="minimize" if is_better_lower(self.sweep.metric) else "maximize",
            pruner={
                "none": optuna.pruners.NopPruner(),
                "median": optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
                "halving": optuna.pruners.SuccessiveHalvingPruner(),
            }[self.sweep.pruner],
            load_if_exists=True,
        )

    def known(self) -> Iterator[Trial]:
        """The listed points, or those proposed in earlier calls; of these, no more than are wanted now."""
        import optuna

        earlier: dict[str, Trial] = {}
        for frozen in self.study.get_trials(deepcopy=False):
            if "point" not in frozen.user_attrs:  # the sweep was killed before it had the whole point
                if not frozen.state.is_finished():
                    self.study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)
                continue
            trial = Trial(json.loads(frozen.user_attrs["point"]), frozen.state.is_finished())
            trial.optuna = None if trial.told else optuna.trial.Trial(self.study, frozen._trial_id)
            trial.reported = set(frozen.intermediate_values)
            earlier[frozen.user_attrs["point"] if self.plan.points is not None else str(frozen.number)] = trial
        self.count = len(earlier)
        if self.plan.points is None:
            yield from itertools.islice(earlier.values(), self.sweep.trials)
            return
        for point in self.plan.points:
            yield earlier.get(text_of(point)) or self.noted(self.study.ask(), point)

    def next(self) -> Trial | None:
        import optuna

        if self.plan.points is not None or self.count >= self.sweep.trials:
            return None
        self.count += 1
        self.study.sampler = optuna.samplers.TPESampler(seed=self.count, constant_liar=True)
        asked = self.study.ask(self.distributions)
        values = {axis.key: axis.values for axis in self.plan.axes if isinstance(axis, Choices)}
        params = {axis.key: asked.params[axis.key] for axis in self.plan.axes}
        return self.noted(asked, {key: values[key][value] if key in values else value for key, value in params.items()})

    def noted(self, asked: Any, point: Point) -> Trial:
        """The trial of a point; a pruner needs to know no more of it than its values."""
        asked.set_user_attr("point", text_of(point))
        return Trial(point, False, asked)

    def should_stop(self, trial: Trial, curve: list[tuple[int, float]]) -> bool:
        for step, value in curve:
            if not trial.told and step not in trial.reported:
                trial.reported.add(step)
                trial.optuna.report(value, step)
                if trial.optuna.should_prune():
                    return True
        return False

    def tell(self, trial: Trial, status: str, value: float) -> None:
        from optuna.trial import TrialState

        trial.told = True
        if status == "finished" and math.isfinite(value):
            self.study.tell(trial.optuna, value)
        else:
            self.study.tell(trial.optuna, state=TrialState.PRUNED if status == "pruned" else TrialState.FAIL)


def distribution(axis: Choices | Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(axis, Choices):
        return CategoricalDistribution(list(axis.values))
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def text_of(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def whole_file(path: Path) -> Path:
    """Optuna's file, after a kill: without an incomplete last line, which it could not read, and without the lock, for
    which it would wait half a minute. The lock of the sweep is held, so nobody else uses it."""
    path = path.absolute()
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.truncate(whole_lines_end(path))
    return path
