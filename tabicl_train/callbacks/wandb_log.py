"""Logs the files of a run to Weights and Biases as well.

A run of wandb cannot be changed once it is written, and a killed one has lost the last seconds of what it logged. So
when a run is continued, what its run of wandb holds is read back from wandb's own files: rows that are there are not
logged again, and if they differ from the files of the run, another run of wandb with the whole history replaces it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from typing import Any

from tabicl_train.callbacks.run_log import VALIDATION, LoggedValues, RunLog, Values
from tabicl_train.callbacks.wandb_runs import read_back, start, wandb_files
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import tell
from tabicl_train.run_dir.records import Records, number

# Columns of metrics.csv that are the same when a step is done again.
TRAINING = ("stage", "loss", "grad_norm", "lr", "skipped")


class WandbLog(RunLog):
    """On rank 0, logs what `LoggedValues` reads to a run of wandb.

    wandb.json in the run's folder holds the id of the run of wandb, and that of the one that it replaces, if any.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, records: Records) -> None:
        super().__init__(config)
        self.records = records
        self.state: dict | None = None  # the content of wandb.json
        self.run: Any = None

    def log_rows(self, is_finished: bool) -> None:
        if self.state is None:
            self.continue_run()
        while (step := self.values.next_step()) is not None:
            training, scores = self.values.take(step)
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
        self.values = LoggedValues(self.records.folder)

    def send(self, values: Values, step: int) -> None:
        if self.run is None:
            self.open()
        self.run.log(values, step=step, commit=True)
        self.last, self.pending = step, {}

    def open(self) -> None:
        self.records.replace("wandb.json", json.dumps(self.state))
        config, folder = dataclasses.asdict(self.config), self.records.folder
        self.run = start(config, folder, self.state, self.config.wandb.timeout)
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


def new_state(replaced: str | None) -> dict:
    return {"id": secrets.token_hex(8), "replaces": replaced}
