"""Scores the network during training, keeps the best weights, and ends the run if scores no longer improve.

validation.csv has a row per validation and set of tables:

step            optimizer steps done
data            "synthetic", "own" for tables that the prior draws from real ones, or the name of a public real table
rows            rows of a table
loss, accuracy  of the query rows: mean cross entropy, share of correct predictions; means over validation tables
roc_auc         one versus rest, for public real tables
guess_loss      of predicting the frequencies of the labels, for validation tables
is_best         1 if the weights of this step became the best ones, otherwise 0
trained_range   inside or outside, where the tables lie; empty for tables drawn from real ones. Sets that are outside do
                not count in means. A set of synthetic tables is outside if none of its sizes is one of training.

For regression, in units of the target's standard deviation (see scores.score_packs):

loss, crps      pinball loss, continuous ranked probability score
rmse, r2        of the mean of the quantiles: root of the mean squared error, share of the variance that is explained
coverage        share of the targets between the quantiles 0.1 and 0.9
guess_loss      of predicting the quantiles of the labeled rows
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from priors import Prior
from priors.real import real_tables
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.callback import Callback, Reason, state_name
from tabicl_train.callbacks.checkpoints import to_host
from tabicl_train.callbacks.scores import Scored, cluster_means, real_tasks, score_network, sizes_of
from tabicl_train.callbacks.validation_history import (
    History,
    falling,
    is_improvement,
    read_history,
    read_scores,
    real_score,
    tables_of,
)
from tabicl_train.config.schema import (
    CLASS_SCORES,
    NUMBER_SCORES,
    OWN,
    REAL,
    SYNTHETIC,
    CurriculumConfig,
    RunConfig,
    StageConfig,
    ValidationConfig,
    kind_of,
)
from tabicl_train.console import info
from tabicl_train.model.family import Network, NetworkConfig
from tabicl_train.module import Pretraining
from tabicl_train.outputs import save_atomically
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.prediction.origin import TrainedRange, position, range_of_stages, trained_range
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION
from tabicl_train.run_dir.choice import BEST_FILE
from tabicl_train.run_dir.curves import INSIDE, OUTSIDE, counts
from tabicl_train.run_dir.records import Records
from tabicl_train.state import TrainState
from tabicl_train.statistics import paired_gain
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import StopRequested

START, BEST = "checkpoints/start.ckpt", BEST_FILE  # in the run directory
VALIDATION = "validation.csv"
# Instead of a run's seed, which is at least 0, so that no step has these tables and all runs share them.
VALIDATION_SEED, TEST_SEED = -1, -2
PACK_TOKENS = 100_000  # few, since tables may be long: 0.84 instead of 0.90 GB after validation at step 20 of demo_long


def validation_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """Return the validation tables by the parts of the prior; item k holds those with the k-th number of rows."""
    # Besides the settings of validation, they depend only on the prior and the number of classes. A prior of real
    # tables draws them from tables that training never draws.
    priors = {name: real.for_validation() if (real := real_tables(part)) else part for name, part in parts.items()}
    streams = {name: stream(settings, prior, model, VALIDATION_SEED) for name, prior in priors.items()}
    for name, drawn in streams.items() if settings.every else ():
        kept = [stage.rows[0] for stage in drawn.curriculum.stages.values()]
        if too_long := [str(rows) for rows in settings.rows if rows not in kept]:
            info(f"warning   validation.rows: {', '.join(too_long)} left out, as no {name} table for it is that long")
    return streams


def final_test_streams(
    settings: ValidationConfig, parts: dict[str, Prior], model: NetworkConfig
) -> dict[str, StepStream]:
    """Return the tables of the final test; real ones are those that training and validation never draw."""
    priors = {name: real.for_test() if (real := real_tables(part)) else part for name, part in parts.items()}
    return {name: stream(settings, prior, model, TEST_SEED) for name, prior in priors.items()}


def stream(settings: ValidationConfig, prior: Prior, model: NetworkConfig, seed: int) -> StepStream:
    """Return the tables of a prior, without numbers of rows that none of its real tables has."""
    real = real_tables(prior)
    counts = {rows: real.eligible(rows, model.is_regression) if real else None for rows in settings.rows}
    eligible = [rows for rows, count in counts.items() if count is None or count[0] > 0]
    stages = {
        f"{k}": StageConfig(
            steps=1, rows=[n, n], features=list(settings.features), tables=settings.tables, pack_tokens=PACK_TOKENS
        )
        for k, n in enumerate(eligible)
    }
    return StepStream(prior, CurriculumConfig(stages), model, seed, range(len(stages)), keeps_clusters=True)


def is_validation_due(config: RunConfig, step: int) -> bool:
    """Whether there is a validation after `step` steps; before the first one, only of given weights."""
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
    After a stop signal to any rank, it is left to the next start of the run.

    checkpoints/best.ckpt holds the best weights and averages so far. It is written before the rows, so a run that is
    killed in between validates again. In a run that starts from given weights, these are the first best ones, and
    checkpoints/start.ckpt keeps them. With `best` own or synthetic, later ones replace them only if the mean difference
    to the start over the clusters exceeds its standard error.
    """

    on_all_ranks = True

    def __init__(self) -> None:
        self.postponed = False  # whether the last validation was left to the next start of the run
        self.has_ended = False  # whether the score has not improved within validation.patience
        self.start_losses: dict[Hashable, float] | None = None  # by cluster

    @property
    def settings(self) -> ValidationConfig:
        """The settings of validation."""
        return self.context.config.validation

    @property
    def start_file(self) -> Path:
        """The weights that the run started from, if they were given."""
        return self.context.records.folder / START

    @property
    def best_file(self) -> Path:
        """The best weights so far."""
        return self.context.records.folder / BEST

    @cached_property
    def streams(self) -> dict[str, StepStream]:
        """The validation tables, by the parts of the prior."""
        config = self.context.config
        return validation_streams(config.validation, config.curriculum.parts(self.context.prior), config.model)

    def start(self, state: TrainState) -> None:
        """Validate given weights, or after a kill between save and validation."""
        self.has_ended = state.step == state.last and state.step < self.context.config.total_steps
        if self.settings.every:
            _ = self.streams  # which warns of tables that are too long
        self.warn_of_range(state.module)
        self.validate_if_due(state)

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Validate if it is due."""
        self.validate_if_due(state)

    def reason_to_end(self, state: TrainState) -> Reason | None:
        """Return that scores no longer improve."""
        return Reason.NO_GAIN if self.has_ended else None

    def end(self, state: TrainState, reason: Reason) -> Reason | None:
        """Return that the run was asked to stop if that came before the last validation."""
        if reason.is_end and self.context.ranks.any(self.postponed):
            return Reason.STOPPED
        return None

    def history(self, step: int) -> History:
        """Read the validations up to a step."""
        return read_history(self.context.records.rows(VALIDATION), self.settings, step)

    def validate_if_due(self, state: TrainState) -> None:
        """Validate if that is due and has not been done; all ranks call this."""
        config, ranks, step = self.context.config, self.context.ranks, state.step
        if not is_validation_due(config, step):
            return
        if ranks.rank > 0:
            self.has_ended = ranks.wait_for_first(lambda: self.context.stop.asked)
            return
        if is_validation_missing(config, self.context.records, step):
            try:
                self.validate(step, state.module)
            except StopRequested:
                self.postponed = True
                info(f"validation step {step}: left to the next start, since the run was asked to stop")
        ended = None if self.postponed else self.history(step).ended
        if ended is not None:
            info(f"validation step {step}: {ended}; the run ends")
        self.has_ended = ranks.finish(ended is not None)

    def validate(self, step: int, module: Pretraining) -> None:
        """Score the network, keep its weights if they are the best ones, and write the rows; raises StopRequested."""
        started = time.perf_counter()
        found = self.score(copy.deepcopy(module.model).eval(), module)
        columns = NUMBER_SCORES if module.model.config.is_regression else CLASS_SCORES
        rows: list[dict[str, Any]] = []
        for one in found:
            scores = {column: one.scores.get(column) for column in columns}
            marks = {"is_best": 0, "trained_range": one.trained_range}
            rows.append({"step": step, "data": one.data, "rows": one.rows, **scores, **marks})
        if self.is_best(step, rows, cluster_means(found, self.settings.best), module):
            rows = [row | {"is_best": 1} for row in rows]
            self.save(step, module)
        self.context.records.add_columns(VALIDATION, rows[0])
        self.context.records.append_rows(VALIDATION, *rows)
        means = read_scores(rows)[step]
        self.context.records.log_metrics(validation_values(rows, means, columns), step)
        in_words = ", ".join(means_in_words(rows, means))
        info(f"validation step {step}: {in_words} ({time.perf_counter() - started:.1f} s)")
        if (fall := falling(self.history(step).scores, real_score(rows))) is not None:
            info(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            self.context.records.append_line("incidents.jsonl", line)

    def score(self, network: Network, module: Pretraining) -> list[Scored]:
        """Score a network, and mark what lies outside the trained range; raises StopRequested."""
        found = score_network(network, self.items, self.settings.real_rows, module.precision, self.check_stop)
        trained = self.trained_range(module)
        return [replace(one, trained_range=self.position(one.data, one.rows, one.sizes, trained)) for one in found]

    def trained_range(self, module: Pretraining) -> TrainedRange:
        """Return the range of the whole run, which is the same at each validation."""
        content = {
            "config": self.context.values,
            "global_step": self.context.config.total_steps,
            "inherited_range": module.inherited_range,
        }
        return trained_range(content)

    def position(self, data: str, rows: int, sizes: dict[str, int] | None, trained: TrainedRange) -> str:
        """Return inside or outside for a public data set, or for synthetic tables with so many rows; else ""."""
        # Tables drawn from real ones have the sizes of the tables that the run trains on.
        if sizes is not None:
            return position(trained, sizes)
        stages = self.streams[data].curriculum.stages.values() if data == SYNTHETIC else ()
        for stage in stages:
            if stage.rows[0] == rows:
                of_set = range_of_stages([asdict(stage)], self.context.config.model.max_classes)
                return INSIDE if trained.overlaps(of_set) else OUTSIDE
        return ""

    def warn_of_range(self, module: Pretraining) -> None:
        """Print a warning if nothing that decides about the best weights lies inside the trained range."""
        kind = self.settings.best
        if self.context.ranks.rank > 0 or not self.settings.every or kind == OWN:
            return
        trained, real = self.trained_range(module), []
        if kind == REAL:  # read now instead of in the first validation
            real = real_tasks(module.model.config.is_regression, self.settings.real_rows)
        positions = [position(trained, sizes_of(task)) for task in real]
        if kind == SYNTHETIC:
            positions = [self.position(kind, rows, None, trained) for rows in self.settings.rows]
        if positions and INSIDE not in positions:
            what = "data set" if kind == REAL else "set of synthetic tables"
            advice = "choose validation.best=synthetic" if kind == REAL else "change validation.rows and .features"
            info(f"warning   no {what} of validation lies inside the trained range ({trained}), so none counts, and no")
            info(f"          weights are kept as the best ones by validation.best={kind}: {advice}")

    @cached_property
    def items(self) -> list[tuple[str, StepItem]]:
        """The validation tables, each item with the name of the prior's part; raises StopRequested."""
        return [(part, stream.draw(k, self.check_stop)) for part, stream in self.streams.items() for k in stream.steps]

    def check_stop(self, _: int = 0) -> None:
        """Raise StopRequested if any rank is asked to stop."""
        if self.context.ranks.still_working(self.context.stop.asked):
            raise StopRequested

    def is_best(self, step: int, rows: list[dict], losses: dict[Hashable, float], module: Pretraining) -> bool:
        """Decide whether weights are the best so far: those of the start, or later ones that are better than noise."""
        if step == 0:
            self.start_losses = losses
            return True
        best = self.history(step).best_step if self.best_file.exists() else None
        of_best = [row for row in self.context.records.rows(VALIDATION) if int(row["step"]) == best]
        if not is_improvement(rows, of_best, self.settings):
            return False
        start = self.losses_of_start(module)
        if start is not None and all(map(math.isfinite, start.values())):
            before, after = np.array(list(start.values())), np.array([losses[key] for key in start])
            if not paired_gain(before, after).exceeds_error:
                return False
        if of_best and tables_of(of_best, self.settings.best) != tables_of(rows, self.settings.best):
            info(f"validation step {step}: other tables than before; best.ckpt, of step {best}, is replaced")
        return True

    def losses_of_start(self, module: Pretraining) -> dict[Hashable, float] | None:
        """Return the losses of the weights of the start, if later ones are compared with them."""
        if self.settings.best == REAL or not self.start_file.exists():
            return None
        if self.start_losses is None:  # the run was resumed
            network = copy.deepcopy(module.model).eval()
            network.load_state_dict(load_checkpoint(str(self.start_file))[1])
            self.start_losses = cluster_means(self.score(network, module), self.settings.best)
        return self.start_losses

    def save(self, step: int, module: Pretraining) -> None:
        """Write best.ckpt and, before the first step, start.ckpt."""
        averages = self.context.find(Averages)
        content = {
            "state_dict": module.state_dict(),
            "global_step": step,
            "format_version": FORMAT_VERSION,
            "config": self.context.values,
            "callbacks": {} if averages is None else {state_name(averages): averages.state_dict()},
            "inherited_range": module.inherited_range,
        }
        for path in (self.start_file, self.best_file) if step == 0 else (self.best_file,):
            save_atomically(to_host(content), path)


def means_in_words(rows: list[dict[str, Any]], means: dict[str, float]) -> list[str]:
    """Describe the means of a validation, and how many public data sets lie inside the trained range."""
    texts = [f"loss {means[kind]:.4f} on {kind} tables" for kind in (OWN, SYNTHETIC) if kind in means]
    real = [row for row in rows if kind_of(row["data"]) == REAL]
    inside = [row for row in real if counts(row)]
    if not real:
        return texts
    if not inside:
        return [*texts, f"none of {len(real)} real data sets is inside the trained range"]
    sets = "real data" if len(inside) == len(real) else f"{len(inside)} of {len(real)} real data sets"
    return [*texts, f"{real_score(rows)} on {sets} {means[REAL]:.4f}"]


def validation_values(rows: list[dict[str, Any]], means: dict[str, float], columns: Iterable[str]) -> dict[str, float]:
    """Return the values to log: validation/DATA_ROWS/SCORE, validation/NAME/SCORE (real), validation/mean/KIND."""
    values = {f"validation/mean/{kind}": mean for kind, mean in means.items()}
    for row in rows:
        name = row["data"] if kind_of(row["data"]) == REAL else f"{row['data']}_{row['rows']}"
        for score in columns:
            if row[score] is not None:
                values[f"validation/{name}/{score}"] = row[score]
    return values
