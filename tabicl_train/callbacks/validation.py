"""Scores the network during training: on held-out tables of the prior and on public real data.

validation.csv has a row per validation and set of tables:

step            optimizer steps done
data            "synthetic", "own" for tables that the prior draws from real ones, or the name of a public real table
rows            rows of a table
loss, accuracy  of the query rows: mean cross entropy, share of correct predictions; means over held-out tables
roc_auc         one versus rest, for public real tables
guess_loss      of guessing the frequencies of the labels, for held-out tables; see diagnostics.guess_loss

Of regression, in units of the target's standard deviation (see scores.score_numbers):

loss, crps      pinball loss, continuous ranked probability score
rmse, r2        of the mean of the quantiles: root of the mean squared error, share of the variance that is explained
coverage        share of the targets between the quantiles 0.1 and 0.9
guess_loss      of guessing the quantiles of the labeled rows
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Hashable, Iterator
from functools import cached_property

import torch

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import to_host
from tabicl_train.callbacks.held_out import answer
from tabicl_train.callbacks.held_out.draws import Losses, held_out_streams, score_item, unit_losses
from tabicl_train.callbacks.held_out.selection import (
    BEST,
    START,
    is_better,
    out_of_patience,
    paired,
    read_scores,
    real_score,
    start_weights,
)
from tabicl_train.callbacks.loggers import Log, validation_values
from tabicl_train.callbacks.scores import diabetes, score_numbers
from tabicl_train.config.monitoring import CLASS_SCORES, NUMBER_SCORES, OWN, REAL, SYNTHETIC
from tabicl_train.config.schema import RunConfig, StreamConfig
from tabicl_train.console import first_line, info
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.distributed.signals import Stop
from tabicl_train.model.family import Network
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.atomic import save_atomically
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, DamagedCheckpoint, read
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem
from tabicl_train.workers import Loader, Stopped

COLUMNS = ("step", "data", "rows", *CLASS_SCORES)
NUMBER_COLUMNS = ("step", "data", "rows", *NUMBER_SCORES)  # of regression
TABLES = ("rows", "tables", "features", "real_rows")  # the settings that decide which tables are scored
FALLS = 3  # consecutive falls of the mean score on real data after which there is a warning

Row = tuple[str, int, *tuple[float | None, ...]]  # the columns without the step
Result = tuple[Row, Losses]  # without losses for public real data


class Validation:
    """Validates on rank 0; the others wait for up to 24 hours, longer than for an exchange of gradients.

    It computes on a copy of the network and leaves all random states unchanged, so a run is bit-identical with and
    without it. A stop signal to any rank interrupts it, and the next start of the run begins with it.

    checkpoints/best.ckpt holds the best weights and averages so far, and their scores. It is written before the rows:
    a run that is killed in between validates again, and no best weights are lost. Of a run with `init_weights` the
    first ones are those that it starts from, which checkpoints/start.ckpt keeps.

    start_losses: of the weights that the run started from, by units, see held_out/draws.py
    has_ended: whether there was no better score for as long as validation.patience allows
    """

    def __init__(self, config: RunConfig, records: Records, ranks: Ranks, averages: Averages, stop: Stop, log: Log):
        self.config, self.settings = config, config.validation
        self.records, self.best = records, records.folder / BEST
        self.ranks, self.averages, self.stop, self.log = ranks, averages, stop, log
        self.postponed = False  # whether the last validation was left to the next start of the run
        self.has_ended = False
        self.is_paired = config.init_weights is not None and config.validation.best != REAL
        self.start_losses: dict[Hashable, float] | None = None
        self.drawn: dict[str, Loader] | None = None
        self.columns = NUMBER_COLUMNS if config.model.is_regression else COLUMNS

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context workers draw the tables of the first validation, while the run trains."""
        if self.ranks.rank > 0 or not self.settings.every:
            yield
            return
        settings = self.config.stream.local()
        num_workers, prefetch = min(1, settings.workers), max(1, len(self.settings.rows))
        workers = dataclasses.replace(settings, num_workers=num_workers, prefetch=prefetch)
        with contextlib.ExitStack() as stack:
            streams = held_out_streams(self.config)
            self.drawn = {part: stack.enter_context(Loader(stream, workers)) for part, stream in streams.items()}
            for loader in self.drawn.values():
                loader.start(stop=self.stop)
            yield

    @cached_property
    def items(self) -> list[tuple[str, StepItem]]:
        """The validation tables, each item with the name of the prior's part; raises Stopped."""
        if self.drawn is None:
            streams = held_out_streams(self.config)
            self.drawn = {part: Loader(stream, StreamConfig(num_workers=0)) for part, stream in streams.items()}
            for loader in self.drawn.values():
                loader.start(stop=self.stop)
        return [(part, item) for part, loader in self.drawn.items() for item in loader.items]

    @cached_property
    def tasks(self) -> list:
        """Real tables, as score_real takes them."""
        if self.config.model.is_regression:
            return [("diabetes", diabetes(self.settings.real_rows))] if self.settings.real_rows else []
        from tabicl_train.evaluation.suites import load_suite  # scikit-learn and pandas, a second or two

        return list(load_suite("sklearn", None, self.settings.real_rows)) if self.settings.real_rows else []

    @cached_property
    def best_scores(self) -> dict[str, float] | None:
        """The scores of the weights in best.ckpt, unless they are from other tables than the configured ones."""
        try:
            content = read(self.best)
        except FileNotFoundError:
            return None
        except (DamagedCheckpoint, OSError, MemoryError) as error:
            info(f"warning   {first_line(error)}; the next validation replaces {self.best.name}")
            return None
        settings = content["config"]["validation"]
        if any(settings.get(key) != value for key, value in vars(self.settings).items() if key in TABLES):
            return None
        return content.get("scores") or read_scores(self.records.rows("validation.csv")).get(content["global_step"])

    def forget(self) -> None:
        """At the beginning of a run, remove what belongs to an earlier one."""
        self.best_scores = None
        for name in (START, answer.NAME):
            (self.records.folder / name).unlink(missing_ok=True)

    def validate_if_due(self, step: int, module: Pretraining) -> None:
        """Validate after this many steps, if that is due and has not been done; all ranks call this."""
        if not self.is_due(step):
            return
        if self.ranks.rank > 0:
            self.has_ended = self.ranks.wait_for_first(lambda: self.stop.asked)
            return
        if self.is_missing(step):
            self.validate(step, module, {"Averages": self.averages.state_dict()})
        if reason := out_of_patience(self.settings, self.records.rows("validation.csv"), step):
            info(f"validation step {step}: {reason}; the run ends")
        self.has_ended = self.ranks.finish(reason is not None)

    def is_due(self, step: int) -> bool:
        """Whether there is a validation after this many steps; before the first one, only of weights to start from."""
        if not self.settings.every or (step == 0 and self.config.init_weights is None):
            return False
        return step % self.settings.every == 0 or step == self.config.total_steps

    def is_missing(self, step: int) -> bool:
        """Whether the validation after this many steps is due, and has not been done."""
        return self.is_due(step) and step not in read_scores(self.records.rows("validation.csv"))

    def validate(self, step: int, module: Pretraining, averages: dict) -> None:
        started = time.perf_counter()
        network = copy.deepcopy(module.model).eval()
        results = None
        with contextlib.suppress(Stopped):  # while tables are drawn
            parts = [(self.score_drawn, item) for item in self.items]
            results = self.scored(network, module, [*parts, *((self.score_real, task) for task in self.tasks)])
        self.postponed = results is None or not self.know_start(step, module)
        if results is None or self.postponed:
            info(f"validation step {step}: left to the next start, since the run was asked to stop")
            return
        rows = [dict(zip(self.columns, (step, *row), strict=True)) for row, _ in results]
        scores = read_scores(rows)[step]
        if self.is_best(step, scores, results):
            self.keep(step, module, averages, scores)
        self.records.append_rows("validation.csv", *rows)
        self.log(validation_values(rows, scores), step)
        means = [f"loss {scores[kind]:.4f} on {kind} tables" for kind in (OWN, SYNTHETIC) if kind in scores]
        means += [f"{real_score(rows)} on real data {scores[REAL]:.4f}"] if REAL in scores else []
        info(f"validation step {step}: {', '.join(means)} ({time.perf_counter() - started:.1f} s)")
        history = read_scores(self.records.rows("validation.csv"))
        if step in history and (fall := falling(history, real_score(rows))) is not None:
            info(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            self.records.append_line("incidents.jsonl", line)

    def scored(self, network: Network, module: Pretraining, parts: list) -> list[Result] | None:
        """The results of all parts; None if the run is asked to stop meanwhile."""
        results = []
        for score, part in parts:
            if self.ranks.still_working(self.stop.asked):
                return None
            results.append(score(network, module, part))
        return results

    def know_start(self, step: int, module: Pretraining) -> bool:
        """Score the weights that the run started from, if later ones are compared with them and this process has not
        done so; False if the run is asked to stop meanwhile."""
        if not self.is_paired or step == 0 or self.start_losses is not None:
            return True
        if (weights := start_weights(self.config)) is None:
            info("warning   the weights that the run started from are gone; the best ones are not compared with them")
            self.is_paired = False
            return True
        network = copy.deepcopy(module.model).eval()
        network.load_state_dict(weights)
        items = [item for item in self.items if item[0] == self.settings.best]
        results = self.scored(network, module, [(self.score_drawn, item) for item in items])
        self.start_losses = None if results is None else self.deciding(results)
        return results is not None

    def deciding(self, results: list[Result]) -> dict[Hashable, float]:
        """The losses of the units on which the choice of the best weights depends."""
        return unit_losses([loss for row, losses in results if row[0] == self.settings.best for loss in losses])

    def is_best(self, step: int, scores: dict[str, float], results: list[Result]) -> bool:
        """Whether weights are the best so far: the first ones that are validated before the first step, and later ones
        with a better score that is no luck, if it is a loss that can be compared unit by unit with the first ones',
        which are finite."""
        if step == 0:
            self.start_losses = self.deciding(results) if self.is_paired else None
            if self.start_losses is not None and len(self.start_losses) < 2:
                info(
                    "warning   a single held-out table, family or row cannot show a gain, so the weights of the start "
                    "stay the best ones; hold out more (prior.held_out)"
                )
            return True
        if not is_better(scores, self.best_scores, self.settings.best):
            return False
        if self.start_losses is None or not all(map(math.isfinite, self.start_losses.values())):
            return True
        return paired(self.start_losses, self.deciding(results)).exceeds_error

    def score_drawn(self, network: Network, module: Pretraining, part: tuple[str, StepItem]) -> Result:
        name, item = part
        scores, losses = score_item(network, module, item)
        return (name, item.packs[0].shapes[0][0], *map(scores.get, self.columns[3:])), losses

    def score_real(self, network: Network, module: Pretraining, task) -> Result:
        if network.config.is_regression:
            name, pack = task
            scores, _ = score_numbers(network, module, [pack.to(module.device)])
            return (name, pack.shapes[0][0], *map(scores.get, self.columns[3:])), []
        from tabicl_train.evaluation.evaluate import score_task
        from tabicl_train.prediction.classifier import TabICLClassifier

        classifier = TabICLClassifier(network, n_estimators=1, device=str(module.device))
        try:
            (scores,) = score_task(task, {"": lambda: classifier}, splits=1)
        except (ValueError, torch.OutOfMemoryError) as error:  # for example probabilities that are not numbers
            info(f"warning   {task.name} could not be scored: {first_line(error)}")
            scores = dict.fromkeys(("log_loss", "accuracy", "roc_auc"), math.nan)
        return (task.name, len(task.y), scores["log_loss"], scores["accuracy"], scores["roc_auc"], None), []

    def keep(self, step: int, module: Pretraining, averages: dict, scores: dict[str, float]) -> None:
        content = {
            "state_dict": module.state_dict(),
            "global_step": step,
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(self.config),
            "callbacks": averages,
            "scores": scores,
        }
        if step == 0:
            save_atomically(to_host(content), self.records.folder / START)
        save_atomically(to_host(content), self.best)
        self.best_scores = scores


def falling(scores: dict[int, dict[str, float]], name: str) -> str | None:
    """The warning if the score on real data, which has this name, fell in each of the last validations."""
    last = [score.get(REAL, math.nan) for score in scores.values()][-FALLS - 1 :]
    if len(last) <= FALLS or not all(a > b for a, b in itertools.pairwise(last)):
        return None
    return f"the mean {name} on real data fell {FALLS} times in a row: {', '.join(f'{v:.4f}' for v in last)}"
