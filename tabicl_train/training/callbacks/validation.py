"""Scores the network during training, keeps the best weights, and ends the run if scores no longer improve.

validation.csv has a row for each validation and set of tables:

step            optimizer steps done
data            "synthetic", "own" for tables that the prior draws from real ones, the name of a task of
                validation.suites, or "probe NAME" (see evaluation/probes.py)
rows            rows of a table
loss, accuracy  mean cross entropy and share of correct predictions of the query rows, averaged over tables
roc_auc         one versus rest, for tasks of suites
guess_loss      loss of predicting the frequencies of the labels, for drawn tables
possible        ROC AUC, or R2, of a prediction that knows how a probe was made
is_best         1 if the weights of this step became the best ones, otherwise 0
trained_range   whether the tables lie inside or outside of the trained range; empty for tables drawn from real ones.
                Sets outside do not count in means. A set of synthetic tables is outside if training has none of its
                sizes.

For regression, in units of the target's standard deviation (see scores.py):

loss, crps      pinball loss (at nine levels for tasks of suites); continuous ranked probability score, for drawn tables
rmse, r2        of the mean of the quantiles: root mean squared error, share of the variance that is explained
coverage        share of the targets between the quantiles 0.1 and 0.9
guess_loss      loss of predicting the quantiles of the labeled rows
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from priors import Prior
from priors.real import real_tables
from tabicl_train.config.schema import (
    CLASS_SCORES,
    NUMBER_SCORES,
    OWN,
    PROBE,
    PROBES,
    REAL,
    SYNTHETIC,
    CurriculumConfig,
    RunConfig,
    StageConfig,
    ValidationConfig,
    validation_kind,
)
from tabicl_train.console import info
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.run.curves import INSIDE, OUTSIDE, counts_in_means
from tabicl_train.run.records import Records
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import StopRequested
from tabicl_train.training.callbacks.best_weights import BestWeights
from tabicl_train.training.callbacks.callback import Callback, Reason
from tabicl_train.training.callbacks.checkpoints import check_ranks
from tabicl_train.training.callbacks.scores import Scored, score_network, suite_tasks
from tabicl_train.training.callbacks.validation_history import (
    VALIDATION,
    History,
    falling,
    read_history,
    read_scores,
    real_score,
)
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.state import TrainState
from tabicl_train.weights.pretrained import TrainedRange, position, range_of_stages, trained_range

# These take the place of a run's seed, which is at least 0: no step draws these tables, and all runs share them.
VALIDATION_SEED, TEST_SEED = -1, -2
# Few, since tables may be long. After validation at step 20, demo_long had 0.84 instead of 0.90 GB.
PACK_TOKENS = 100_000


def validation_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """Return the validation tables, and warn of numbers of rows that no table has.

    A prior of real tables draws them from tables that training never draws.

    Parameters
    ----------
    settings : ValidationConfig
        The settings of validation.
    parts : dict
        The parts of the prior by name, "own" or "synthetic".
    model : NetworkConfig
        The settings of the network, for its number of classes.

    Returns
    -------
    dict
        A stream for each part; item k holds the tables with the k-th number of rows.
    """
    streams = {}
    for name, part in parts.items():
        real = real_tables(part)
        drawn = part if real is None else real.for_validation()
        streams[name] = stream(settings, drawn, model, VALIDATION_SEED)
        used = [stage.rows[0] for stage in streams[name].curriculum.stages.values()]
        too_long = [str(rows) for rows in settings.rows if rows not in used]
        if settings.every and too_long:
            info(f"warning   validation.rows: {', '.join(too_long)} left out: no {name} validation table is that long")
    return streams


def final_test_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """Return the tables of the final test, by part of the prior; training and validation draw none of the real ones."""
    streams = {}
    for name, part in parts.items():
        real = real_tables(part)
        drawn = part if real is None else real.for_test()
        streams[name] = stream(settings, drawn, model, TEST_SEED)
    return streams


def stream(settings: ValidationConfig, prior: Prior, model: NetworkConfig, seed: int) -> StepStream:
    """Return the tables of a prior, one item for each number of rows that its real tables have."""
    # Each number of rows is a stage of one step, unless no real table has so many rows.
    real = real_tables(prior)
    stages: dict[str, StageConfig] = {}
    for rows in dict.fromkeys(settings.rows):
        eligible = None if real is None else real.eligible(rows, model.is_regression)
        if eligible is not None and eligible.long_enough == 0:
            continue
        stages[f"{len(stages)}"] = StageConfig(
            steps=1,
            rows=[rows, rows],
            features=list(settings.features),
            tables=settings.tables,
            pack_tokens=PACK_TOKENS,
        )
    return StepStream(prior, CurriculumConfig(stages), model, seed, range(len(stages)), keeps_clusters=True)


def is_validation_due(config: RunConfig, step: int) -> bool:
    """Whether there is a validation after `step` steps; before the first one, only given weights are validated."""
    every = config.validation.every
    if not every or (step == 0 and config.init_weights is None):
        return False
    return step % every == 0 or step == config.total_steps


def is_validation_missing(config: RunConfig, records: Records, step: int) -> bool:
    """Whether the validation after `step` steps is due and has not been done."""
    if not is_validation_due(config, step):
        return False
    return step not in read_history(records.rows(VALIDATION), config.validation, step).scores


def end_by_patience(config: RunConfig, records: Records, step: int) -> str | None:
    """Return why the validations up to `step` end the run, or None."""
    if config.validation.patience == 0:
        return None
    return read_history(records.rows(VALIDATION), config.validation, step).ended


class Validation(Callback):
    """Validate on rank 0, while the other ranks wait for up to 24 hours.

    It uses a copy of the network and does not change random states, so a run is bit-identical with and without it.
    After a stop signal to any rank, validation is postponed to the next start of the run. best_weights.py decides which
    weights are the best, and keeps them.
    """

    on_all_ranks = True

    def __init__(self) -> None:
        self.has_ended = False  # on all ranks: whether the last validation ends the run by validation.patience

    @cached_property
    def streams(self) -> dict[str, StepStream]:
        """The validation tables, by part of the prior."""
        config = self.context.config
        return validation_streams(config.validation, config.curriculum.priors_by_kind(self.context.prior), config.model)

    @cached_property
    def best(self) -> BestWeights:
        """The best weights so far."""
        return BestWeights(self.context, self.score)

    def start(self, state: TrainState) -> None:
        """Validate given weights, or a checkpoint whose validation is missing since the process was killed."""
        if self.context.config.validation.every:
            # This prints a warning about tables that are too long.
            _ = self.streams
        self.warn_of_range(state.module)
        self.validate_if_due(state)

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Validate if it is due."""
        self.validate_if_due(state)

    def reason_to_end(self, state: TrainState) -> Reason | None:
        """End the run if scores no longer improve."""
        return Reason.NO_GAIN if self.has_ended else None

    def end(self, state: TrainState, reason: Reason) -> Reason | None:
        """Return STOPPED if the run was asked to stop before the validation of its last step was done."""
        if not reason.is_end:
            return None
        context = self.context
        is_missing = context.ranks.rank == 0 and is_validation_missing(context.config, context.records, state.step)
        return Reason.STOPPED if context.ranks.any(is_missing) else None

    def validate_if_due(self, state: TrainState) -> None:
        """Validate if that is due: rank 0 works, and the others wait to learn whether the run ends."""
        ranks = self.context.ranks
        if not is_validation_due(self.context.config, state.step):
            return
        check_ranks(state, ranks)
        if ranks.rank > 0:
            self.has_ended = ranks.wait_for_first(lambda: self.context.stop.asked)
        else:
            self.has_ended = ranks.finish(self.validate_if_missing(state))

    def validate_if_missing(self, state: TrainState) -> bool:
        """Validate unless an earlier start did so; return whether the run ends by validation.patience."""
        step = state.step
        if is_validation_missing(self.context.config, self.context.records, step):
            try:
                self.validate(step, state.module)
            except StopRequested:
                # The run stops before its next step, and the next start of the run finds that the rows are missing.
                info(f"validation step {step}: postponed to the next start, since the run was asked to stop")
                return False
        ended = self.history(step).ended
        if ended is None:
            return False
        info(f"validation step {step}: {ended}; the run ends")
        return True

    def validate(self, step: int, module: TrainedNetwork) -> None:
        """Score the network, keep its weights if they are the best ones, and write the rows; raises StopRequested."""
        # The scores, on a copy of the network.
        started = time.perf_counter()
        records = self.context.records
        scored = self.score(copy.deepcopy(module.model).eval(), module)
        columns = NUMBER_SCORES if module.model.config.is_regression else CLASS_SCORES
        rows = [row_of(one, step, columns) for one in scored]

        # The weights are saved before the rows, so that a run that is killed in between validates again.
        if self.best.keep_if_best(step, module, rows, scored):
            for row in rows:
                row["is_best"] = 1
        records.append_rows(VALIDATION, *rows)

        # Log and print the means, and warn if scores on real data keep falling.
        means = read_scores(rows)[step]
        records.log_metrics(validation_values(rows, means, columns), step)
        seconds = time.perf_counter() - started
        info(f"validation step {step}: {', '.join(means_in_words(rows, means))} ({seconds:.1f} s)")
        fall = falling(self.history(step).scores, real_score(rows))
        if fall is not None:
            info(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            records.append_line("incidents.jsonl", line)

    def history(self, step: int) -> History:
        """Read the validations up to a step."""
        return read_history(self.context.records.rows(VALIDATION), self.context.config.validation, step)

    def score(self, network: Network, module: TrainedNetwork) -> list[Scored]:
        """Score a network, and mark what lies inside or outside the trained range; raises StopRequested."""
        settings = self.context.config.validation
        scored = score_network(network, self.items, settings.suites, module.precision, self.check_stop)
        trained = self.trained_range(module)
        marked = []
        for one in scored:
            position_of_set = self.position(one.data, one.rows, one.sizes, trained)
            marked.append(replace(one, trained_range=position_of_set))
        return marked

    def trained_range(self, module: TrainedNetwork) -> TrainedRange:
        """Return the trained range at the end of the run, so that all validations use the same one."""
        content = {
            "config": self.context.values,
            "global_step": self.context.config.total_steps,
            "largest_tables": self.context.largest_tables,
            "inherited_range": module.inherited_range,
        }
        return trained_range(content)

    def position(self, data: str, rows: int, sizes: dict[str, int] | None, trained: TrainedRange) -> str:
        """Return where tables lie with respect to the trained range.

        Parameters
        ----------
        data : str
            A part of the prior, or the name of a task.
        rows : int
            Rows of a table.
        sizes : dict or None
            The sizes of a task; None for drawn tables.
        trained : TrainedRange
            The trained range.

        Returns
        -------
        str
            inside or outside for a task or synthetic tables, otherwise empty.
        """
        if sizes is not None:
            return position(trained, sizes)
        # Tables drawn from real ones have the sizes of the tables that the run trains on.
        if data != SYNTHETIC:
            return ""
        for stage in self.streams[data].curriculum.stages.values():
            if stage.rows[0] == rows:
                range_of_set = range_of_stages([asdict(stage)], self.context.config.model.max_classes)
                return INSIDE if trained.overlaps(range_of_set) else OUTSIDE
        return ""

    def warn_of_range(self, module: TrainedNetwork) -> None:
        """Print a warning if nothing that decides which weights are best lies inside the trained range."""
        settings = self.context.config.validation
        if self.context.ranks.rank > 0 or not settings.every:
            return

        # Where the tables lie that decide.
        trained = self.trained_range(module)
        if settings.best == REAL:
            # The data sets are read now instead of in the first validation.
            tasks = suite_tasks(tuple(settings.real_suites), module.model.config.is_regression)
            positions = [position(trained, task.sizes) for task in tasks]
            what = "data set"
            advice = "choose validation.best=synthetic"
        elif settings.best == SYNTHETIC:
            positions = [self.position(SYNTHETIC, rows, None, trained) for rows in settings.rows]
            what = "set of synthetic tables"
            advice = "change validation.rows and validation.features"
        else:
            # Tables drawn from real ones have no position.
            return
        if positions and INSIDE not in positions:
            why = f"no {what} of validation lies inside the trained range ({trained})"
            info(f"warning   validation.best={settings.best} keeps no best weights: {why}; {advice}")

    @cached_property
    def items(self) -> list[tuple[str, StepItem]]:
        """The validation tables, each item with the name of its part of the prior; raises StopRequested."""
        items = []
        for part, stream in self.streams.items():
            items += [(part, stream.draw(step, self.check_stop)) for step in stream.steps]
        return items

    def check_stop(self, _: int = 0) -> None:
        """Raise StopRequested if any rank is asked to stop."""
        if self.context.ranks.still_working(self.context.stop.asked):
            raise StopRequested


def row_of(scored: Scored, step: int, columns: Iterable[str]) -> dict[str, Any]:
    """Return a row of validation.csv, not yet marked as that of the best weights."""
    scores = {column: scored.scores.get(column) for column in columns}
    marks = {"is_best": 0, "trained_range": scored.trained_range}
    return {"step": step, "data": scored.data, "rows": scored.rows, **scores, **marks}


def means_in_words(rows: list[dict[str, Any]], means: dict[str, float]) -> list[str]:
    """Describe the means of a validation, and how many real data sets and probes lie inside the trained range."""
    # Drawn tables, then real data and probes, as far as they lie inside the trained range.
    texts = [f"loss {means[kind]:.4f} on {kind} tables" for kind in (OWN, SYNTHETIC) if kind in means]
    for kind, name, names in ((REAL, "real data", "real data sets"), (PROBES, "probes", "probes")):
        rows_of_kind = [row for row in rows if validation_kind(row["data"]) == kind]
        if not rows_of_kind:
            continue
        total = len(rows_of_kind)
        inside = sum(counts_in_means(row) for row in rows_of_kind)
        if inside == 0:
            texts.append(f"none of {total} {names} is inside the trained range")
            continue
        sets = name if inside == total else f"{inside} of {total} {names}"
        text = f"{real_score(rows)} on {sets} {means[kind]:.4f}"
        if kind == PROBES:
            text += f" (possible {mean_possible(rows):.4f})"
        texts.append(text)
    return texts


def mean_possible(rows: Iterable[dict[str, Any]]) -> float | None:
    """Return the mean of the best possible scores on the probes inside the trained range; None without probes."""
    possible = [row["possible"] for row in rows if validation_kind(row["data"]) == PROBES and counts_in_means(row)]
    return statistics.fmean(possible) if possible else None


def validation_values(rows: list[dict[str, Any]], means: dict[str, float], columns: Iterable[str]) -> dict[str, float]:
    """Return the values to log, by the names in run/records.py."""
    values = {f"validation/mean/{kind}": mean for kind, mean in means.items()}
    possible = mean_possible(rows)
    if possible is not None:
        values["validation/mean/probes_possible"] = possible
    for row in rows:
        kind = validation_kind(row["data"])
        if kind == REAL:
            name = row["data"]
        elif kind == PROBES:
            name = f"probes/{row['data'].removeprefix(PROBE).replace(' ', '_')}"
        else:
            name = f"{row['data']}_{row['rows']}"
        for score in columns:
            if row[score] is not None:
                values[f"validation/{name}/{score}"] = row[score]
    return values
