"""Interrupted runs, whose logs beside their own files are compared with these."""

import contextlib
import os
import signal
from pathlib import Path
from unittest import mock

import lightning as L
import pytest

from tabicl_train import train as training
from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.config.compose import compose

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=12", "checkpoint.every=4",
    "trainer.accelerator=cpu",
]  # fmt: skip
VALIDATED = ["validation.every=4", "validation.rows=[40,60]", "validation.tables=2", "validation.features=[2,4]",
             "validation.real_rows=0", "validation.best=synthetic"]  # fmt: skip


class StopAt(L.Callback):
    """Before a step: an error, or a signal."""

    def __init__(self, step: int | None, signal: int | None = None) -> None:
        self.step, self.signal = step, signal

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        if item.step == self.step:
            if self.signal is None:
                raise RuntimeError("stopped")
            os.kill(os.getpid(), self.signal)


def train(run_dir: Path, *overrides: str, stop_at: int | None = None, number: int | None = None) -> None:
    """In this process; before a step an error ends it, or a signal."""
    chosen = training.run_callbacks
    with (
        mock.patch.object(training, "run_callbacks", lambda *a: [*chosen(*a), StopAt(stop_at, number)]),
        pytest.raises(RuntimeError, match="stopped") if stop_at and number is None else contextlib.nullcontext(),
    ):
        training.train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides]))


def train_and_die(*settings: str) -> None:
    at = Metrics.on_train_batch_end

    def kill(self, trainer, *rest):
        at(self, trainer, *rest)
        if trainer.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    Metrics.on_train_batch_end = kill
    training.train(compose(settings))
