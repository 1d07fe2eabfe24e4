"""What the logs of a run outside its files have in common: what they show, and when they are brought up to date.

They show what the files of the run hold, so that they agree with these after any interruption.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from tabicl_train.callbacks.held_out.selection import read_scores
from tabicl_train.callbacks.validation import Validation
from tabicl_train.config.monitoring import REAL, kind_of
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import first_line, tell
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.lock import LostLock
from tabicl_train.run_dir.loss_groups import GROUPS, weighted_means
from tabicl_train.run_dir.records import RowReader

VALIDATION = "validation/"  # the beginning of the names of scores; validation/step is their step

Values = dict[str, Any]


class RunLog(L.Callback):
    """On rank 0, logs the rows of a run's files once they are there. No error here stops a run or holds it up.

    name: with which its lines begin
    """

    name: str

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.failed = False

    def log_rows(self, is_finished: bool) -> None:
        """Log the rows that were written since the last call; is_finished: the steps of the run are all done."""
        raise NotImplementedError

    def close(self, exit_code: int = 0) -> None:
        """End the log, if it is open."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.is_global_zero:  # the step before is over, and its validation too
            self.log_new_rows(is_finished=False)

    def on_train_end(self, trainer: L.Trainer, module: Pretraining) -> None:
        if trainer.is_global_zero:
            has_ended = any(callback.has_ended for callback in trainer.callbacks if isinstance(callback, Validation))
            self.log_new_rows(is_finished=has_ended or trainer.global_step >= self.config.total_steps)

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
            if not self.failed:
                tell(f"{self.name:<9} nothing more is logged: {first_line(error)}")
            self.failed = True


class LoggedValues:
    """What is logged for each step, from the files of a run while they are being written."""

    def __init__(self, folder: Path) -> None:
        names = ("metrics", "validation", "batches", "scaling")
        self.metrics, self.validation, self.batches, self.scaling = (
            RowReader(folder / f"{name}.csv") for name in names
        )

    def next_step(self) -> int | None:
        """The next step with values; None if there is none yet."""
        steps = [reader.next_step() for reader in (self.metrics, self.validation)]
        return min((step for step in steps if step is not None), default=None)

    def take(self, step: int) -> tuple[Values, Values]:
        """The values of a step's training, and those of its validation; empty if it has none."""
        values = {key: value for row in self.metrics.take(step) for key, value in row.items() if key != "step"}
        batches, layers = self.batches.take(step), self.scaling.take(step)
        if values and batches:
            values |= {key: mean for by in GROUPS if batches[0][by] for key, mean in losses_by(by, batches).items()}
        values |= {f"multiplier/{row['layer']}": row["at_largest"] for row in layers} if values else {}
        return values, validation_values(self.validation.take(step))


def losses_by(what: str, rows: list[dict]) -> dict[str, float]:
    """Mean losses over the tables in these rows of batches.csv, by their number of rows or of classes."""
    group_of, name_of = GROUPS[what]
    group, loss, tables = (
        np.array(values) for values in zip(*((group_of(r[what]), r["loss"], r["tables"]) for r in rows), strict=True)
    )
    return {f"loss_by_{what}/{name_of(g).replace(',', '')}": m for g, m in weighted_means(group, loss, tables).items()}


def validation_values(rows: list[Values]) -> Values:
    """What is logged for the rows of a validation: each score, and the means as in the run's messages."""
    values: Values = {f"{VALIDATION}step": rows[0]["step"]} if rows else {}
    for row in rows:
        name = row["data"] if kind_of(row["data"]) == REAL else f"{row['data']}_{row['rows']}"
        scores = {key: value for key, value in row.items() if key not in ("step", "data", "rows")}
        values |= {f"{VALIDATION}{name}/{key}": value for key, value in scores.items()}
    for means in read_scores(rows).values():
        values |= {f"{VALIDATION}mean/{kind}": mean for kind, mean in means.items() if mean == mean}
    return values
