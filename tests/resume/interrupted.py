"""Training that stops itself in the middle of a step, and records every table that it trains on.

Besides the settings of tabicl-train, it takes
    signal=N    sent to itself by the last rank before the third pack of step 5
Tables go to FOLDER/RUN_NAME.tables, one line for each: step, and a digest of its values.
"""

import hashlib
import os
import sys
from pathlib import Path
from unittest import mock

import lightning as L

from tabicl_train import module
from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.processes.watch import ProcessLost

SETTINGS = ("experiment=smoke", "curriculum.stages.smoke.steps=8", "curriculum.stages.smoke.pack_tokens=500")
AT = (5, 2)  # step and pack (from 0), before which the signal is sent


class Tables(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        with open(self.path, "a") as file:
            for pack in item.packs:
                for X, y, _ in pack.tables():
                    digest = hashlib.sha256(X.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
                    file.write(f"{item.step} {digest}\n")


class StopItself(L.Callback):
    """Sends the signal between two packs of a step, on the last rank."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer, pretraining, item, _) -> None:
        self.left = AT[1] if item.step == AT[0] and trainer.global_rank == trainer.world_size - 1 else None
        assert self.left is None or len(item.packs) > AT[1]

    def query_losses(self, *arguments):
        if self.left is not None:
            if self.left == 0:
                os.kill(os.getpid(), self.number)
            self.left -= 1
        return QUERY_LOSSES(*arguments)


QUERY_LOSSES = module.query_losses


RUN_CALLBACKS = training.run_callbacks


def train(folder: Path, overrides: list[str]) -> str:
    """Run it in this process; returns the run's status."""
    stop = StopItself(next((int(o.split("=")[1]) for o in overrides if o.startswith("signal=")), 0))
    config = compose([*SETTINGS, *(o for o in overrides if not o.startswith("signal="))])
    watching = [Tables(folder / f"{Path(config.run_dir).name}.tables"), stop]

    def callbacks(*arguments):
        return [*watching, *RUN_CALLBACKS(*arguments)]

    with (
        mock.patch.object(module, "query_losses", stop.query_losses),
        mock.patch.object(training, "run_callbacks", callbacks),
    ):
        return training.train(config)


def train_all(folder: Path, *runs: list[str]) -> None:
    """One run after another; a rank whose peer is lost ends with an error."""
    for overrides in runs:
        try:
            train(folder, overrides)
        except ProcessLost as error:
            sys.exit(f"error: {error}")
