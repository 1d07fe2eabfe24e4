"""Scores the network during training: on held-out synthetic tables and on real data.

validation.csv has a row per validation and set of tables:

step            optimiser steps done
data            "synthetic", or the name of a real table
rows            rows of a table
loss, accuracy  of the query rows: mean cross entropy, share of correct predictions; means over synthetic tables
roc_auc         one versus rest, for real tables
guess_loss      of guessing the frequencies of the labels, for synthetic tables; see diagnostics.guess_loss

Of regression, in units of the target's standard deviation (see scores.score_numbers):

loss, crps      pinball loss, continuous ranked probability score
rmse, r2        of the mean of the quantiles: root of the mean squared error, share of the variance that is explained
coverage        share of the targets between the quantiles 0.1 and 0.9
guess_loss      of guessing the quantiles of the labelled rows
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from functools import cached_property

import lightning as L
import torch

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import to_host
from tabicl_train.callbacks.scores import diabetes, score_classes, score_numbers
from tabicl_train.config.monitoring import CLASS_SCORES, NUMBER_SCORES, REAL_SCORES, judged_by
from tabicl_train.config.schema import SYNTHETIC, CurriculumConfig, RunConfig, StageConfig, build_prior
from tabicl_train.console import first_line, say, tell
from tabicl_train.model.family import Network
from tabicl_train.module import Pretraining
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.signals import Stop
from tabicl_train.run_dir.atomic import save_atomically
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, DamagedCheckpoint, read
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import Loader

COLUMNS = ("step", "data", "rows", *CLASS_SCORES)
NUMBER_COLUMNS = ("step", "data", "rows", *NUMBER_SCORES)  # of regression
TABLES = ("rows", "tables", "features", "real_rows")  # the settings that decide which tables are scored
HELD_OUT = -1  # in place of a run's seed, which is at least 0: no step has these tables, and all runs share them
LONG = 60.0  # seconds of waiting before the first line about it; the next ones after twice, four times, ... that
DONE, STOP = "validation/{}", "validation/stop"  # keys in the store: a step is validated; a process is to stop
FALLS = 3  # consecutive falls of the mean score on real data after which there is a warning

Row = tuple[str, int, *tuple[float | None, ...]]  # the columns without the step


class Validation(L.Callback):
    """Validates on rank 0; the others wait as long as it is alive, longer than for an exchange of gradients if need be.

    It computes on a copy of the network and leaves all random states unchanged, so a run is bit-identical with and
    without it. A stop signal to any rank interrupts it, and the next start of the run begins with it.

    checkpoints/best.ckpt holds the best weights and averages so far, and their scores. It is written before the rows:
    a run that is killed in between validates again, and no best weights are lost.
    """

    def __init__(self, config: RunConfig, records: Records, processes: Processes, stop: Stop) -> None:
        self.config, self.settings = config, config.validation
        self.records, self.best = records, records.folder / "checkpoints" / "best.ckpt"
        self.processes, self.stop = processes, stop
        self.postponed = False  # whether the last validation was left to the next start of the run
        self.columns = NUMBER_COLUMNS if config.model.is_regression else COLUMNS

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context a worker draws the synthetic tables, which the first validation needs."""
        if self.processes.rank > 0 or not self.settings.every:
            yield
            return
        stream, settings = held_out_stream(self.config), self.config.stream.local()
        num_workers, prefetch = min(1, settings.workers), max(1, len(stream.steps))
        workers = dataclasses.replace(settings, num_workers=num_workers, prefetch=prefetch)
        with Loader(stream, workers) as self.loader:
            yield

    @cached_property
    def items(self) -> list[StepItem]:
        return list(self.loader)

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
            tell(f"warning   {first_line(error)}; the next validation replaces {self.best.name}")
            return None
        settings = content["config"]["validation"]
        if any(settings.get(key) != value for key, value in vars(self.settings).items() if key in TABLES):
            return None
        return content.get("scores") or read_scores(self.records.rows("validation.csv")).get(content["global_step"])

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        if self.processes.rank == 0 and self.settings.every:
            self.records.rewind("validation.csv", trainer.global_step, self.columns)
            if trainer.global_step == 0:
                self.best_scores = None  # an existing file belongs to another run
        self.validate_if_due(trainer, module)  # the run may have been killed between save and validation

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, *_) -> None:
        self.validate_if_due(trainer, module)

    def validate_if_due(self, trainer: L.Trainer, module: Pretraining) -> None:
        """All processes call this after the same steps."""
        step = trainer.global_step
        if not self.is_due(step):
            return
        if self.processes.rank > 0:
            self.wait(step)
            return
        if self.is_missing(step):
            averages = next(callback for callback in trainer.callbacks if isinstance(callback, Averages))
            self.validate(step, module, {averages.state_key: averages.state_dict()})
        if self.processes.size > 1:
            self.processes.put(DONE.format(step), True)

    def is_due(self, step: int) -> bool:
        """Whether there is a validation after this many steps; before the first one, only of weights to start from."""
        if not self.settings.every or (step == 0 and self.config.init_weights is None):
            return False
        return step % self.settings.every == 0 or step == self.config.total_steps

    def is_missing(self, step: int) -> bool:
        """Whether the validation after this many steps is due, and has not been done."""
        return self.is_due(step) and step not in read_scores(self.records.rows("validation.csv"))

    def wait(self, step: int) -> None:
        """Wait until rank 0 has validated; raises ProcessLost if it is lost."""
        started, due, passed_on = time.monotonic(), LONG, False

        def is_done() -> bool:
            nonlocal due, passed_on
            if self.stop.asked and not passed_on:
                self.processes.put(STOP, True)
                passed_on = True
            seconds = time.monotonic() - started
            if self.processes.rank == 1 and seconds >= due:
                due = 2 * due
                say(f"waiting for rank 0, which has been validating step {step} for {seconds:.0f} s")
            return self.processes.has(DONE.format(step))

        self.processes.until(is_done)

    def is_asked_to_stop(self) -> bool:
        if self.stop.asked or self.processes.size == 1:
            return self.stop.asked
        return self.processes.has(STOP)

    def finish(self, checkpoint: dict, device: torch.device) -> None:
        """Do the last validation of a run whose steps are all done, if it is missing. On rank 0 alone.

        checkpoint: the content of the run's last checkpoint
        """
        step = checkpoint["global_step"]
        if not self.is_missing(step):
            return
        module = Pretraining(self.config)
        module.load_state_dict(checkpoint["state_dict"])
        averages = Averages(self.config.averages).state_key
        self.loader = held_out_stream(self.config)
        self.validate(step, module.to(device), {averages: checkpoint["callbacks"][averages]})

    def validate(self, step: int, module: Pretraining, averages: dict) -> None:
        started, self.postponed = time.perf_counter(), False
        network = copy.deepcopy(module.model).eval()
        parts = [(self.score_synthetic, item) for item in self.items]
        parts += [(self.score_real, task) for task in self.tasks]
        results = []
        for score, part in parts:
            if self.is_asked_to_stop():
                self.postponed = True
                tell(f"validation step {step}: left to the next start, since the run was asked to stop")
                return
            results.append(score(network, module, part))
        rows = [dict(zip(self.columns, (step, *row), strict=True)) for row in results]
        scores = read_scores(rows)[step]
        if is_better(scores, self.best_scores, self.settings.best):
            self.keep(step, module, averages, scores)
        self.records.append_rows("validation.csv", *rows)
        means = [f"loss {scores['synthetic']:.4f}"] if self.items else []
        means += [f"{real_score(rows)} on real data {scores['real']:.4f}"] if self.tasks else []
        tell(f"validation step {step}: {', '.join(means)} ({time.perf_counter() - started:.1f} s)")
        history = read_scores(self.records.rows("validation.csv"))
        if step in history and (fall := falling(history, real_score(rows))) is not None:
            tell(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            self.records.append_line("incidents.jsonl", line)

    def score_synthetic(self, network: Network, module: Pretraining, item: StepItem) -> Row:
        score = score_numbers if network.config.is_regression else score_classes
        scores = score(network, module, [pack.to(module.device) for pack in item.packs])
        return SYNTHETIC, item.packs[0].shapes[0][0], *map(scores.get, self.columns[3:])

    def score_real(self, network: Network, module: Pretraining, task) -> Row:
        if network.config.is_regression:
            name, pack = task
            scores = score_numbers(network, module, [pack.to(module.device)])
            return name, pack.shapes[0][0], *map(scores.get, self.columns[3:])
        from tabicl_train.evaluation.evaluate import score_task
        from tabicl_train.prediction.classifier import TabICLClassifier

        classifier = TabICLClassifier(network, n_estimators=1, device=str(module.device))
        try:
            (scores,) = score_task(task, {"": lambda: classifier}, splits=1)
        except (ValueError, torch.OutOfMemoryError) as error:  # for example probabilities that are not numbers
            tell(f"warning   {task.name} could not be scored: {first_line(error)}")
            scores = dict.fromkeys(("log_loss", "accuracy", "roc_auc"), math.nan)
        return task.name, len(task.y), scores["log_loss"], scores["accuracy"], scores["roc_auc"], None

    def keep(self, step: int, module: Pretraining, averages: dict, scores: dict[str, float]) -> None:
        content = {
            "state_dict": module.state_dict(),
            "global_step": step,
            "format_version": FORMAT_VERSION,
            "config": dataclasses.asdict(self.config),
            "callbacks": averages,
            "scores": scores,
        }
        self.records.check()
        try:
            save_atomically(to_host(content), self.best)
        except OSError as error:
            tell(f"warning   {self.best.name} could not be written ({first_line(error)})")
        else:
            self.best_scores = scores


def held_out_stream(config: RunConfig) -> StepStream:
    """The validation's synthetic tables: item k holds those with the k-th number of rows.

    Apart from the validation's own settings they depend on the prior and the number of classes only. A prior of real
    tables draws them from those that it holds out.
    """
    settings = config.validation
    stages = {
        f"{k}": StageConfig(steps=1, rows=[rows, rows], features=list(settings.features), tables=settings.tables)
        for k, rows in enumerate(settings.rows)
    }
    prior = build_prior(config).for_validation()
    return StepStream(prior, CurriculumConfig(stages), config.model, HELD_OUT, range(len(stages)))


def read_scores(rows: list[dict[str, str]]) -> dict[int, dict[str, float]]:
    """Scores by step, from the rows of validation.csv: the mean loss on synthetic tables (`synthetic`) and the mean
    ROC AUC or R2 on real ones (`real`); nan if there are none."""
    by_step: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        scores = by_step.setdefault(int(row["step"]), {"synthetic": [], "real": []})
        if row["data"] == SYNTHETIC:
            scores["synthetic"].append(float(row["loss"]))
        else:
            scores["real"].append(float(row[judged_by(row)]))
    return {
        step: {kind: statistics.fmean(values) if values else math.nan for kind, values in scores.items()}
        for step, scores in by_step.items()
    }


def real_score(rows: list[dict]) -> str:
    """The name of the score by which these rows of validation.csv judge real data."""
    return REAL_SCORES[judged_by(rows[0])]


def is_better(scores: dict[str, float], best: dict[str, float] | None, kind: str) -> bool:
    """Whether scores beat the best ones so far: a lower loss, or a higher score on real data."""
    if not math.isfinite(scores[kind]) or best is None or not math.isfinite(best[kind]):
        return math.isfinite(scores[kind])
    return scores[kind] < best[kind] if kind == SYNTHETIC else scores[kind] > best[kind]


def falling(scores: dict[int, dict[str, float]], name: str) -> str | None:
    """The warning if the score on real data, which has this name, fell in each of the last validations."""
    last = [score["real"] for score in scores.values()][-FALLS - 1 :]
    if len(last) <= FALLS or not all(a > b for a, b in itertools.pairwise(last)):
        return None
    return f"the mean {name} on real data fell {FALLS} times in a row: {', '.join(f'{v:.4f}' for v in last)}"
