"""How good the network is while it is trained: on synthetic tables that no step has, and on real data.

validation.csv has a row a validation and set of tables:

step            optimiser steps done
data            "synthetic", or the name of a real table
rows            of a table
loss, accuracy  of the query rows: mean cross entropy, share predicted right; of synthetic tables the means
roc_auc         one versus rest, of real tables
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

from tabicl_train.atomic import save_atomically
from tabicl_train.averages import Averages
from tabicl_train.checkpoint import to_host
from tabicl_train.config import SYNTHETIC, CurriculumConfig, RunConfig, StageConfig, build_prior
from tabicl_train.messages import first_line, tell
from tabicl_train.model import TabICL
from tabicl_train.module import Pretraining
from tabicl_train.predict import predict_logits
from tabicl_train.records import Records
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import Loader

COLUMNS = ("step", "data", "rows", "loss", "accuracy", "roc_auc")
FROZEN = -1  # in place of a run's seed, which is at least 0: tables that no step has, the same ones in every run
FALLS = 3  # in a row of the mean ROC AUC on real data, after which there is a warning

Row = tuple[str, int, float, float, float | None]  # COLUMNS without the step


class Validation(L.Callback):
    """On the first rank, after all that the other ranks wait for: they wait when they need its gradients.

    It computes on a copy of the network and leaves all random states as they are, so a run with it is the same to the
    bit as one without. checkpoints/best.ckpt holds the weights and averages that were best so far.
    """

    def __init__(self, config: RunConfig, records: Records) -> None:
        self.config, self.settings = config, config.validation
        self.records, self.best = records, records.folder / "checkpoints" / "best.ckpt"
        self.here = False

    @contextlib.contextmanager
    def drawing(self, first_rank: bool) -> Iterator[None]:
        """Has a worker draw the synthetic tables meanwhile; they are needed at the first validation."""
        self.here = first_rank and self.settings.every > 0
        if not self.here:
            yield
            return
        stream, told = frozen_stream(self.config), self.config.stream
        workers = dataclasses.replace(told, num_workers=min(1, told.num_workers), prefetch=max(1, len(stream.steps)))
        with Loader(stream, workers) as self.loader:
            yield

    @cached_property
    def items(self) -> list[StepItem]:
        return list(self.loader)

    @cached_property
    def tasks(self) -> list:
        from tabicl_train.suites import load_suite  # scikit-learn and pandas, a second or two

        return list(load_suite("sklearn", None, self.settings.real_rows)) if self.settings.real_rows else []

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        if self.here:
            self.records.rewind("validation.csv", trainer.global_step, COLUMNS)
            self.validate_if_due(trainer, module)  # the run may have ended between the save and the validation

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, *_) -> None:
        if self.here:
            self.validate_if_due(trainer, module)

    def validate_if_due(self, trainer: L.Trainer, module: Pretraining) -> None:
        step, total = trainer.global_step, self.config.total_steps
        if step == 0 or (step % self.settings.every != 0 and step != total):
            return
        if trainer.should_stop and step != total:
            return  # a run that was told to stop has little time; the next one begins with the validation
        if step not in read_scores(self.records.rows("validation.csv")):
            self.validate(trainer, module)

    def validate(self, trainer: L.Trainer, module: Pretraining) -> None:
        started, step = time.perf_counter(), trainer.global_step
        network = copy.deepcopy(module.model).eval()
        rows = [self.score_synthetic(network, module, item) for item in self.items]
        rows += [self.score_real(network, module, task) for task in self.tasks]
        self.records.append_rows("validation.csv", *(dict(zip(COLUMNS, (step, *row), strict=True)) for row in rows))
        scores = read_scores(self.records.rows("validation.csv"))
        if step not in scores:
            return  # no space left
        told = [f"loss {scores[step]['synthetic']:.4f}"] if self.items else []
        told += [f"ROC AUC on real data {scores[step]['real']:.4f}"] if self.tasks else []
        tell(f"validation step {step}: {', '.join(told)} ({time.perf_counter() - started:.1f} s)")
        if is_best(scores, self.settings.best):
            self.keep(trainer, module)
        if (fall := falling(scores)) is not None:
            tell(f"warning   step {step}: {fall}")
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step - 1, "reason": fall}
            self.records.append_line("incidents.jsonl", line)

    def score_synthetic(self, network: TabICL, module: Pretraining, item: StepItem) -> Row:
        losses, accuracies, tables = [], [], []
        for batch in (b.to(module.device) for b in item.batches):
            n = batch.train_size
            with module.precision.autocast(module.device.type):
                logits = predict_logits(network, batch.X, batch.y[:, :n], network.config.max_classes).float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch.y[:, n:].flatten()).item())
            accuracies.append((logits.argmax(-1) == batch.y[:, n:]).float().mean().item())
            tables.append(batch.X.shape[0])
        loss, accuracy = (statistics.fmean(values, tables) for values in (losses, accuracies))
        return SYNTHETIC, batch.X.shape[1], loss, accuracy, None

    def score_real(self, network: TabICL, module: Pretraining, task) -> Row:
        from tabicl_train.classifier import TabICLClassifier
        from tabicl_train.evaluate import score_task

        classifier = TabICLClassifier(network, n_estimators=1, device=str(module.device))
        try:
            (scores,) = score_task(task, {"": lambda: classifier}, splits=1)
        except (ValueError, torch.OutOfMemoryError) as error:  # such as probabilities that are not numbers
            tell(f"warning   {task.name} could not be scored: {first_line(error)}")
            scores = dict.fromkeys(("log_loss", "accuracy", "roc_auc"), math.nan)
        return task.name, len(task.y), scores["log_loss"], scores["accuracy"], scores["roc_auc"]

    def keep(self, trainer: L.Trainer, module: Pretraining) -> None:
        averages = next(callback for callback in trainer.callbacks if isinstance(callback, Averages))
        content = {
            "state_dict": module.state_dict(),
            "global_step": trainer.global_step,
            "config": dataclasses.asdict(self.config),
            "callbacks": {averages.state_key: averages.state_dict()},
        }
        try:
            save_atomically(to_host(content), self.best)
        except OSError as error:
            tell(f"warning   {self.best.name} could not be written ({first_line(error)})")


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


def is_best(scores: dict[int, dict[str, float]], kind: str) -> bool:
    """Whether the last score is better than all before it: a lower loss, a higher ROC AUC."""
    sign = -1 if kind == "synthetic" else 1
    *before, last = (sign * score[kind] for score in scores.values())
    return math.isfinite(last) and all(last > other for other in before if math.isfinite(other))


def falling(scores: dict[int, dict[str, float]]) -> str | None:
    """What to say when the ROC AUC on real data fell in each of the last validations."""
    last = [score["real"] for score in scores.values()][-FALLS - 1 :]
    if len(last) <= FALLS or not all(a > b for a, b in itertools.pairwise(last)):
        return None
    return f"the mean ROC AUC on real data fell {FALLS} times in a row: {', '.join(f'{v:.4f}' for v in last)}"
