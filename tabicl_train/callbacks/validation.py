"""How good the network is while it is trained: on synthetic tables that no step has, and on real data.

validation.csv has a row a validation and set of tables:

step            optimiser steps done
data            "synthetic", or the name of a real table
rows            of a table
loss, accuracy  of the query rows: mean cross entropy, share predicted right; of synthetic tables the means
roc_auc         one versus rest, of real tables
guess_loss      of guessing the frequencies of the labels, on synthetic tables; see lengths.guess_losses
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
import torch.nn.functional as F

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import to_host
from tabicl_train.callbacks.diagnostics import guess_losses
from tabicl_train.config.schema import SYNTHETIC, CurriculumConfig, RunConfig, StageConfig, build_prior
from tabicl_train.model import TabICL
from tabicl_train.module import Pretraining
from tabicl_train.prediction.predict import predict_logits
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.signals import Stop
from tabicl_train.run_dir.atomic import save_atomically
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, DamagedCheckpoint, read
from tabicl_train.run_dir.console import first_line, say, tell
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import Loader

COLUMNS = ("step", "data", "rows", "loss", "accuracy", "roc_auc", "guess_loss")
TABLES = ("rows", "tables", "features", "real_rows")  # of the settings, those on which scores depend
FROZEN = -1  # in place of a run's seed, which is at least 0: tables that no step has, the same ones in every run
LONG = 60.0  # seconds of waiting before the first line about it; then at two, four, ... times as many
DONE, STOP = "validation/{}", "validation/stop"  # keys of the processes' store: of a step; that a process is to stop
FALLS = 3  # in a row of the mean ROC AUC on real data, after which there is a warning

Row = tuple[str, int, float, float, float | None, float | None]  # COLUMNS without the step


class Validation(L.Callback):
    """On the first rank; the others wait as long as it lives, which may be longer than an exchange of gradients.

    It computes on a copy of the network and leaves all random states as they are, so a run with it is the same to the
    bit as one without. A stop signal to any rank ends it, and the next start of the run begins with it.

    checkpoints/best.ckpt holds the weights and averages that were best so far, and their scores. It is written before
    the rows: a run that is killed in between validates again, and no best weights are lost.
    """

    def __init__(self, config: RunConfig, records: Records, processes: Processes, stop: Stop) -> None:
        self.config, self.settings = config, config.validation
        self.records, self.best = records, records.folder / "checkpoints" / "best.ckpt"
        self.processes, self.stop = processes, stop
        self.postponed = False  # the last one was left to the next start of the run

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Has a worker draw the synthetic tables meanwhile; they are needed at the first validation."""
        if self.processes.rank > 0 or not self.settings.every:
            yield
            return
        stream, settings = frozen_stream(self.config), self.config.stream
        num_workers, prefetch = min(1, settings.num_workers), max(1, len(stream.steps))
        workers = dataclasses.replace(settings, num_workers=num_workers, prefetch=prefetch)
        with Loader(stream, workers) as self.loader:
            yield

    @cached_property
    def items(self) -> list[StepItem]:
        return list(self.loader)

    @cached_property
    def tasks(self) -> list:
        from tabicl_train.evaluation.suites import load_suite  # scikit-learn and pandas, a second or two

        return list(load_suite("sklearn", None, self.settings.real_rows)) if self.settings.real_rows else []

    @cached_property
    def best_scores(self) -> dict[str, float] | None:
        """Of the weights in best.ckpt, where they come from the tables that are used now."""
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
            self.records.rewind("validation.csv", trainer.global_step, COLUMNS)
            if trainer.global_step == 0:
                self.best_scores = None  # a file that is there is of another run
        self.validate_if_due(trainer, module)  # the run may have ended between the save and the validation

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, *_) -> None:
        self.validate_if_due(trainer, module)

    def validate_if_due(self, trainer: L.Trainer, module: Pretraining) -> None:
        """All processes come here after the same steps."""
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
        """Whether there is a validation after so many steps: also of the weights that a run starts from."""
        if not self.settings.every or (step == 0 and self.config.init_weights is None):
            return False
        return step % self.settings.every == 0 or step == self.config.total_steps

    def is_missing(self, step: int) -> bool:
        """Whether the validation after so many steps is due, and has not been done."""
        return self.is_due(step) and step not in read_scores(self.records.rows("validation.csv"))

    def wait(self, step: int) -> None:
        """Until the first process has validated; raises ProcessLost when it is gone."""
        started, due, passed_on = time.monotonic(), LONG, False

        def is_done() -> bool:
            nonlocal due, passed_on
            if self.stop.asked and not passed_on:
                self.processes.put(STOP, True)
                passed_on = True
            seconds = time.monotonic() - started
            if self.processes.rank == 1 and seconds >= due:
                due = 2 * due
                line = f"waiting for rank 0, which has been at the validation of step {step} for {seconds:.0f} s"
                say(line)
            return self.processes.ask(lambda: self.processes.store.check([DONE.format(step)]))

        self.processes.until(is_done)

    def is_asked_to_stop(self) -> bool:
        if self.stop.asked or self.processes.size == 1:
            return self.stop.asked
        return self.processes.ask(lambda: self.processes.store.check([STOP]))

    def finish(self, checkpoint: dict, device: torch.device) -> None:
        """The last validation of a run whose steps are all done, where it is missing. By the first rank alone.

        checkpoint: the content of the last one
        """
        step = checkpoint["global_step"]
        if not self.is_missing(step):
            return
        module = Pretraining(self.config)
        module.load_state_dict(checkpoint["state_dict"])
        averages = Averages(self.config.averages).state_key
        self.loader = frozen_stream(self.config)
        self.validate(step, module.to(device), {averages: checkpoint["callbacks"][averages]})

    def validate(self, step: int, module: Pretraining, averages: dict) -> None:
        started, self.postponed = time.perf_counter(), False
        network = copy.deepcopy(module.model).eval()
        parts = [(self.score_synthetic, item) for item in self.items]
        parts += [(self.score_real, task) for task in self.tasks]
        scored = []
        for score, part in parts:
            if self.is_asked_to_stop():
                self.postponed = True
                tell(f"validation step {step}: left to the next start, for the run is asked to stop")
                return
            scored.append(score(network, module, part))
        rows = [dict(zip(COLUMNS, (step, *row), strict=True)) for row in scored]
        scores = read_scores(rows)[step]
        if is_better(scores, self.best_scores, self.settings.best):
            self.keep(step, module, averages, scores)
        self.records.append_rows("validation.csv", *rows)
        means = [f"loss {scores['synthetic']:.4f}"] if self.items else []
        means += [f"ROC AUC on real data {scores['real']:.4f}"] if self.tasks else []
        tell(f"validation step {step}: {', '.join(means)} ({time.perf_counter() - started:.1f} s)")
        history = read_scores(self.records.rows("validation.csv"))
        if step in history and (fall := falling(history)) is not None:
            tell(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            self.records.append_line("incidents.jsonl", line)

    def score_synthetic(self, network: TabICL, module: Pretraining, item: StepItem) -> Row:
        losses, accuracies, guesses, tables = [], [], [], []
        for batch in (b.to(module.device) for b in item.batches):
            n = batch.train_size
            with module.precision.autocast(module.device.type):
                logits = predict_logits(network, batch.X, batch.y[:, :n], network.config.max_classes).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch.y[:, n:].flatten()).item())
            accuracies.append((logits.argmax(-1) == batch.y[:, n:]).float().mean().item())
            guesses.append(guess_losses(batch.y, n).mean().item())
            tables.append(batch.X.shape[0])
        loss, accuracy, guess = (statistics.fmean(values, tables) for values in (losses, accuracies, guesses))
        return SYNTHETIC, batch.X.shape[1], loss, accuracy, None, guess

    def score_real(self, network: TabICL, module: Pretraining, task) -> Row:
        from tabicl_train.evaluation.evaluate import score_task
        from tabicl_train.prediction.classifier import TabICLClassifier

        classifier = TabICLClassifier(network, n_estimators=1, device=str(module.device))
        try:
            (scores,) = score_task(task, {"": lambda: classifier}, splits=1)
        except (ValueError, torch.OutOfMemoryError) as error:  # such as probabilities that are not numbers
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


def frozen_stream(config: RunConfig) -> StepStream:
    """The validation's tables: item k holds those of the k-th number of rows. Of the run they depend on the prior and
    the number of classes alone."""
    told = config.validation
    stages = {
        f"{k}": StageConfig(steps=1, rows=[rows, rows], features=list(told.features), tables=told.tables)
        for k, rows in enumerate(told.rows)
    }
    return StepStream(build_prior(config), CurriculumConfig(stages), config.model, FROZEN, range(len(stages)))


def read_scores(rows: list[dict[str, str]]) -> dict[int, dict[str, float]]:
    """Scores by step, from the rows of validation.csv: the mean loss on synthetic tables (`synthetic`) and the mean
    ROC AUC on real ones (`real`); nan where there are none."""
    by_step: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        found = by_step.setdefault(int(row["step"]), {"synthetic": [], "real": []})
        if row["data"] == SYNTHETIC:
            found["synthetic"].append(float(row["loss"]))
        else:
            found["real"].append(float(row["roc_auc"]))
    return {
        step: {kind: statistics.fmean(values) if values else math.nan for kind, values in found.items()}
        for step, found in by_step.items()
    }


def is_better(scores: dict[str, float], best: dict[str, float] | None, kind: str) -> bool:
    """Whether scores beat the best ones so far: by a lower loss, or a higher ROC AUC."""
    if not math.isfinite(scores[kind]) or best is None or not math.isfinite(best[kind]):
        return math.isfinite(scores[kind])
    return scores[kind] < best[kind] if kind == SYNTHETIC else scores[kind] > best[kind]


def falling(scores: dict[int, dict[str, float]]) -> str | None:
    """What to say when the ROC AUC on real data fell in each of the last validations."""
    last = [score["real"] for score in scores.values()][-FALLS - 1 :]
    if len(last) <= FALLS or not all(a > b for a, b in itertools.pairwise(last)):
        return None
    return f"the mean ROC AUC on real data fell {FALLS} times in a row: {', '.join(f'{v:.4f}' for v in last)}"
