"""Logs the files of a run to Weights and Biases as well. No error here stops a run or holds it up.

A run of wandb cannot be changed once it is written, and a killed one has lost the last seconds of what it logged. So
when a run is continued, what its run of wandb holds is read back from wandb's own files: rows that are there are not
logged again, and if they differ from the files of the run, another run of wandb with the whole history replaces it.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np

from tabicl_train.callbacks.validation import read_scores
from tabicl_train.callbacks.wandb_runs import read_back, start, wandb_files
from tabicl_train.config.schema import SYNTHETIC, RunConfig
from tabicl_train.console import first_line, tell
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.lock import LostLock
from tabicl_train.run_dir.loss_groups import GROUPS, weighted_means
from tabicl_train.run_dir.records import Records, RowReader, number

# Columns of metrics.csv that are the same when a step is done again.
TRAINING = ("stage", "loss", "grad_norm", "lr", "skipped")
VALIDATION = "validation/"  # the beginning of the names of scores; validation/step is their step

Values = dict[str, Any]


class WandbLog(L.Callback):
    """On rank 0, logs the rows of metrics.csv together with the losses by rows and classes and the multipliers, and the
    scores of validation.csv, once they are in these files.

    wandb.json in the run's folder holds the id of the run of wandb, and that of the one that it replaces, if any.
    """

    def __init__(self, config: RunConfig, records: Records) -> None:
        self.config, self.records = config, records
        self.state: dict | None = None  # the content of wandb.json
        self.run: Any = None
        self.failed = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.is_global_zero:  # the step before is over, and its validation too
            self.log_new_rows(is_finished=False)

    def on_train_end(self, trainer: L.Trainer, module: Pretraining) -> None:
        if trainer.is_global_zero:
            self.log_new_rows(is_finished=trainer.global_step >= self.config.total_steps)

    def on_exception(self, trainer: L.Trainer, module: Pretraining, exception: BaseException) -> None:
        with self.harmless():
            self.close(exit_code=1)

    def teardown(self, trainer: L.Trainer, module: Pretraining, stage: str) -> None:
        with self.harmless():
            self.close()

    def complete(self) -> None:
        """Log what a kill has left out of a run whose steps are all done."""
        self.log_new_rows(is_finished=True)
        with self.harmless():
            self.close()

    def log_new_rows(self, is_finished: bool) -> None:
        """Log the rows that were written since the last call; is_finished: the steps of the run are all done."""
        with self.harmless():
            if not self.failed:
                self.log_rows(is_finished)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        try:
            yield
        except LostLock:
            raise
        except Exception as error:  # a run is worth more than its log
            self.failed = True
            tell(f"wandb     nothing more is logged: {first_line(error)}")

    def log_rows(self, is_finished: bool) -> None:
        if self.state is None:
            self.continue_run()
        while (step := self.next_step()) is not None:
            training = self.training_values(step)
            scores = validation_values(self.validation.take(step))
            if not self.fits(step, training, scores):
                self.replace_run(step)
                continue
            training = {} if self.held_training.pop(step, None) else training
            scores = {} if self.held_scores.pop(step, None) else scores
            if scores and step <= self.last:  # the validation was left to the next start; the row of its step is logged
                self.pending, scores = scores, {}
            if training or scores:
                self.send(self.pending | training | scores, step)
        if is_finished and (left := [*self.held_training, *self.held_scores]):
            self.replace_run(min(left))
            self.log_rows(is_finished)
        elif is_finished and self.pending:
            self.send(self.pending, self.last + 1)

    def next_step(self) -> int | None:
        steps = [reader.next_step() for reader in (self.metrics, self.validation)]
        return min((step for step in steps if step is not None), default=None)

    def fits(self, step: int, training: Values, scores: Values) -> bool:
        """Whether the run of wandb holds the same values of this step or, if it ends before it, can take them."""
        if any(next(iter(held), step) < step for held in (self.held_training, self.held_scores)):
            return False
        if step in self.held_scores:
            if not same(scores, self.held_scores[step]):
                return False
        elif scores and step <= self.last and self.pending:  # more than one row of scores is missing
            return False
        if step in self.held_training:
            return same({key: training.get(key) for key in TRAINING}, self.held_training[step])
        return step > self.last or not training

    def training_values(self, step: int) -> Values:
        """What is logged for a row of metrics.csv; empty if the step has none."""
        values = {key: value for row in self.metrics.take(step) for key, value in row.items() if key != "step"}
        batches, layers = self.batches.take(step), self.scaling.take(step)
        if values and batches:
            values |= {key: mean for by in GROUPS for key, mean in losses_by(by, batches).items()}
        return values | ({f"multiplier/{row['layer']}": row["at_largest"] for row in layers} if values else {})

    def continue_run(self) -> None:
        """Continue the run of wandb that this run has, if any, and read what it holds."""
        state = self.records.json("wandb.json") or {}
        files = wandb_files(self.records.folder, state["id"]) if "id" in state else []
        self.begin_run(state if files else new_state(state.get("id")))
        end = math.inf
        if self.config.wandb.mode == "online":
            self.open()
            if not self.run.offline:
                end = self.run.step  # the server may have less than the files
        for row in (row for path in files for row in read_back(path) if row["_step"] < end):
            self.last, self.is_new = max(self.last, row["_step"]), False
            if "loss" in row:
                self.held_training[row["_step"]] = {key: row.get(key) for key in TRAINING}
            if scores := {key: value for key, value in row.items() if key.startswith(VALIDATION)}:
                self.held_scores[scores[f"{VALIDATION}step"]] = scores

    def replace_run(self, step: int) -> None:
        """Start another run of wandb for the whole history, since the current one cannot be changed."""
        if self.is_new:
            raise ValueError(f"the rows of metrics.csv or validation.csv are not in the order of their steps at {step}")
        old = self.state["id"]
        self.close()
        self.begin_run(new_state(old))
        tell(f"wandb     run {old} holds other values at step {step}: run {self.state['id']} takes its place")

    def begin_run(self, state: dict) -> None:
        self.state = state
        self.is_new = True
        self.last = -1  # the last step that the run of wandb holds
        self.pending: Values = {}  # scores that wait for the next row
        # What it holds already, in the order of steps; removed as the reading of the files gets there.
        self.held_training: dict[int, Values] = {}
        self.held_scores: dict[int, Values] = {}
        names = ("metrics", "validation", "batches", "scaling")
        self.metrics, self.validation, self.batches, self.scaling = (
            RowReader(self.records.folder / f"{name}.csv") for name in names
        )

    def send(self, values: Values, step: int) -> None:
        if self.run is None:
            self.open()
        self.run.log(values, step=step, commit=True)
        self.last, self.pending = step, {}

    def open(self) -> None:
        self.records.replace("wandb.json", json.dumps(self.state))
        self.run = start(self.config, self.records.folder, self.state)
        self.run.define_metric(f"{VALIDATION}*", step_metric=f"{VALIDATION}step")

    def close(self, exit_code: int = 0) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code)
            if run.offline:
                tell(f"wandb     to upload: wandb sync {run.settings.sync_dir}")


def same(a: Values, b: Values) -> bool:
    """Whether values are equal, nan equal to nan; numbers that JSON lacks are text in wandb's files."""

    def equal(x: Any, y: Any) -> bool:
        x, y = (number(v) if isinstance(v, str) else v for v in (x, y))
        return x == y or (x != x and y != y)

    return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())


def validation_values(rows: list[Values]) -> Values:
    """What is logged for the rows of a validation: each score, and the means as in the run's messages."""
    values: Values = {f"{VALIDATION}step": rows[0]["step"]} if rows else {}
    for row in rows:
        name = f"{SYNTHETIC}_{row['rows']}" if row["data"] == SYNTHETIC else row["data"]
        scores = {key: value for key, value in row.items() if key not in ("step", "data", "rows")}
        values |= {f"{VALIDATION}{name}/{key}": value for key, value in scores.items()}
    for means in read_scores(rows).values():
        values |= {f"{VALIDATION}mean/{kind}": mean for kind, mean in means.items() if mean == mean}
    return values


def losses_by(what: str, rows: list[dict]) -> dict[str, float]:
    """Mean losses over the tables in these rows of batches.csv, by their number of rows or of classes."""
    group_of, name_of = GROUPS[what]
    group, loss, tables = (
        np.array(values) for values in zip(*((group_of(r[what]), r["loss"], r["tables"]) for r in rows), strict=True)
    )
    return {f"loss_by_{what}/{name_of(g).replace(',', '')}": m for g, m in weighted_means(group, loss, tables).items()}


def new_state(replaced: str | None) -> dict:
    return {"id": secrets.token_hex(8), "replaces": replaced}
