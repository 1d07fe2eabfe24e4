"""The files of a run in Weights and Biases as well. Nothing here can stop or hold up a run.

A run of wandb cannot be changed once it is written, and one that is killed has lost the last seconds of what it logged.
So what it holds is read back from its own files when a run is continued: rows that are there are not logged again, and
where they differ from the files of the run, a new one follows that holds the whole history.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import secrets
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import lightning as L
import numpy as np

from tabicl_train.callbacks.validation import read_scores
from tabicl_train.config.schema import SYNTHETIC, RunConfig
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.console import first_line, tell
from tabicl_train.run_dir.lock import LostLock
from tabicl_train.run_dir.loss_groups import GROUPS, weighted_means
from tabicl_train.run_dir.records import Records, open_or_empty

TRAINING = ("stage", "loss", "grad_norm", "lr", "skipped")  # of metrics.csv, what is the same when a step is done again
VALIDATION = "validation/"  # begins the names of scores; validation/step is their step
BLOCK, HEADER, WHOLE, BEGIN, END = 32768, 7, 1, 2, 4  # of LevelDB's log format: bytes, and kinds of pieces

Values = dict[str, Any]


class WandbLog(L.Callback):
    """Logs the rows of metrics.csv with the losses by rows and classes and the multipliers, and the scores of
    validation.csv, on the first rank, once they are in these files.

    wandb.json in the run's folder holds the id of the run of wandb, and of the one before that it replaces.
    """

    def __init__(self, config: RunConfig, records: Records) -> None:
        self.config, self.records = config, records
        self.state: dict | None = None  # the content of wandb.json
        self.run: Any = None
        self.failed = False

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.is_global_zero:  # the step before is over, with its validation
            self.follow(is_finished=False)

    def on_train_end(self, trainer: L.Trainer, module: Pretraining) -> None:
        if trainer.is_global_zero:
            self.follow(is_finished=trainer.global_step >= self.config.total_steps)

    def on_exception(self, trainer: L.Trainer, module: Pretraining, exception: BaseException) -> None:
        with self.harmless():
            self.close(exit_code=1)

    def teardown(self, trainer: L.Trainer, module: Pretraining, stage: str) -> None:
        with self.harmless():
            self.close()

    def complete(self) -> None:
        """Log what a kill has left out, of a run whose steps are all done."""
        self.follow(is_finished=True)
        with self.harmless():
            self.close()

    def follow(self, is_finished: bool) -> None:
        """Log what has come; is_finished: the steps of the run are all done."""
        with self.harmless():
            if not self.failed:
                self.log_new(is_finished)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        try:
            yield
        except LostLock:
            raise
        except Exception as error:  # a run is worth more than its log
            self.failed = True
            tell(f"wandb     nothing more is logged: {first_line(error)}")

    def log_new(self, is_finished: bool) -> None:
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
            if scores and step <= self.last:  # of a validation that was left to the next start, the row is there
                self.pending, scores = scores, {}
            if training or scores:
                self.send(self.pending | training | scores, step)
        if is_finished and (left := [*self.held_training, *self.held_scores]):
            self.replace_run(min(left))
            self.log_new(is_finished)
        elif is_finished and self.pending:
            self.send(self.pending, self.last + 1)

    def next_step(self) -> int | None:
        steps = [rows.step() for rows in (self.metrics, self.validation)]
        return min((step for step in steps if step is not None), default=None)

    def fits(self, step: int, training: Values, scores: Values) -> bool:
        """Whether the run of wandb holds the same of this step or, where it ends before, can take it."""
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
        """What a row of metrics.csv becomes; empty where the step has none."""
        values = {key: value for row in self.metrics.take(step) for key, value in row.items() if key != "step"}
        batches, layers = self.batches.take(step), self.scaling.take(step)
        if values and batches:
            values |= {key: mean for by in GROUPS for key, mean in losses_by(by, batches).items()}
        return values | ({f"multiplier/{row['layer']}": row["at_largest"] for row in layers} if values else {})

    def continue_run(self) -> None:
        """Take up the run of wandb that this run has, if any, and read what it holds."""
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
        """Have a new run of wandb hold the whole history, since the one so far cannot be changed."""
        if self.is_new:
            raise ValueError(f"the rows of metrics.csv or validation.csv are not in the order of their steps at {step}")
        old = self.state["id"]
        self.close()
        self.begin_run(new_state(old))
        tell(f"wandb     run {old} holds other values at step {step}: run {self.state['id']} takes its place")

    def begin_run(self, state: dict) -> None:
        self.state = state
        self.is_new = True
        self.last = -1  # step that the run of wandb holds
        self.pending: Values = {}  # scores that wait for the next row
        # What it holds already, in the order of steps; taken out as the rows of the files come to it.
        self.held_training: dict[int, Values] = {}
        self.held_scores: dict[int, Values] = {}
        names = ("metrics", "validation", "batches", "scaling")
        self.metrics, self.validation, self.batches, self.scaling = (
            Rows(self.records.folder / f"{name}.csv") for name in names
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


class Rows:
    """The rows of a CSV file by their step, as they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[str] | None = None
        self.header: list[str] | None = None
        self.next: Values | None = None

    def step(self) -> int | None:
        """Of the next row; None where there is none yet."""
        while self.next is None and (line := self.read_line()):
            (row,) = csv.reader([line])
            if self.header is None:
                self.header = row
            elif len(row) == len(self.header):
                self.next = {key: number(text) for key, text in zip(self.header, row, strict=True) if text != ""}
        return None if self.next is None else self.next["step"]

    def read_line(self) -> str:
        if self.file is None:
            if not self.path.exists():
                return ""
            self.file = open_or_empty(self.path)
        position = self.file.tell()
        line = self.file.readline()
        if not line.endswith("\n"):  # the end, or a line that a kill has torn
            self.file.seek(position)
            return ""
        return line

    def take(self, step: int) -> list[Values]:
        """The rows of a step, and none of those before it."""
        rows = []
        while (next_step := self.step()) is not None and next_step <= step:
            if next_step == step:
                rows.append(self.next)
            self.next = None
        return rows


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def same(a: Values, b: Values) -> bool:
    """Whether values are equal, nan to nan; numbers that JSON does not have are text in wandb's files."""

    def equal(x: Any, y: Any) -> bool:
        x, y = (number(v) if isinstance(v, str) else v for v in (x, y))
        return x == y or (x != x and y != y)

    return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())


def validation_values(rows: list[Values]) -> Values:
    """What the rows of a validation become: each score, and the means as in the run's messages."""
    values: Values = {f"{VALIDATION}step": rows[0]["step"]} if rows else {}
    for row in rows:
        name = f"{SYNTHETIC}_{row['rows']}" if row["data"] == SYNTHETIC else row["data"]
        scores = {key: value for key, value in row.items() if key not in ("step", "data", "rows")}
        values |= {f"{VALIDATION}{name}/{key}": value for key, value in scores.items()}
    for means in read_scores(rows).values():
        values |= {f"{VALIDATION}mean/{kind}": mean for kind, mean in means.items() if mean == mean}
    return values


def losses_by(what: str, rows: list[dict]) -> dict[str, float]:
    """Mean losses over the tables of rows of batches.csv, by their rows or classes."""
    group_of, name_of = GROUPS[what]
    group, loss, tables = (
        np.array(values) for values in zip(*((group_of(r[what]), r["loss"], r["tables"]) for r in rows), strict=True)
    )
    return {f"loss_by_{what}/{name_of(g).replace(',', '')}": m for g, m in weighted_means(group, loss, tables).items()}


def new_state(replaced: str | None) -> dict:
    return {"id": secrets.token_hex(8), "replaces": replaced}


def wandb_files(folder: Path, run_id: str) -> list[Path]:
    """What the run of wandb has logged, a file for each time that it was continued, oldest first."""
    files = folder.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb")  # -1 at the end: a second start within a second
    return sorted(files, key=lambda path: path.parent.name.partition("run-")[2])


def read_back(path: Path) -> Iterator[Values]:
    """The rows of the history in a .wandb file: a log of protobufs in LevelDB's format (blocks of 32 KB with pieces of
    crc, length, kind), up to the first that is not whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record = (b"" if kind in (WHOLE, BEGIN) else record) + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if at > len(data):
            return
        if kind in (WHOLE, END):
            content = Record.FromString(record)
            if content.HasField("history"):
                items = content.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def start(config: RunConfig, run_dir: Path, state: dict) -> Any:
    """A run of wandb, offline where online cannot be had."""
    import wandb

    replaces = state.get("replaces")
    timeout, mode = config.wandb.timeout, config.wandb.mode
    if mode == "online" and (obstacle := why_offline(timeout)):
        tell(f"wandb     the run is logged offline: {obstacle}")
        mode = "offline"
    return wandb.init(
        project=config.wandb.project,
        id=state["id"],
        name=config.name,
        notes=f"takes the place of run {replaces}" if replaces else None,
        dir=run_dir,
        mode=mode,
        resume="allow",
        config=dataclasses.asdict(config) | ({"replaces": replaces} if replaces else {}),
        settings=wandb.Settings(silent=True, console="off", init_timeout=timeout, finish_timeout=timeout),
    )


def why_offline(timeout: float) -> str | None:
    """What keeps a run from being logged online. wandb itself would ask for an account, or try for minutes."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        return "no account is logged in (wandb login)"
    server = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(server, timeout=timeout)
    except urllib.error.HTTPError:
        return None  # it answers
    except OSError as error:
        return f"{server} cannot be reached ({first_line(error)})"
    return None
