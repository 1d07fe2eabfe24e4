"""A training command that stops itself in the middle of a step, and notes every table that it trains on.

    python interrupted.py FOLDER "override override ..." ["override ..." ...]

trains once for each further argument, in turn. Beside the settings of tabicl-train one may say
    signal=N    sent to itself by the last rank before the third micro-batch of step 5
Tables go to FOLDER/RUN_NAME.tables, a line a table: step, and a digest of its values.
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

SETTINGS = ("experiment=smoke", "curriculum.stages.smoke.steps=8", "curriculum.stages.smoke.micro_batch_rows=100")
AT = (5, 2)  # step and micro-batch (from 0), before which the signal is sent


class Tables(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        with open(self.path, "a") as file:
            for batch in item.batches:
                for X, y in zip(batch.X, batch.y, strict=True):
                    digest = hashlib.sha256(X.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
                    file.write(f"{item.step} {digest}\n")


class StopItself(L.Callback):
    """Sends the signal between two micro-batches of a step, on the last rank."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_start(self, trainer, pretraining, item, _) -> None:
        self.left = AT[1] if item.step == AT[0] and trainer.global_rank == trainer.world_size - 1 else None
        assert self.left is None or len(item.batches) > AT[1]

    def query_losses(self, *arguments):
        if self.left is not None:
            if self.left == 0:
                os.kill(os.getpid(), self.number)
            self.left -= 1
        return QUERY_LOSSES(*arguments)


QUERY_LOSSES = module.query_losses


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


RUN_CALLBACKS = training.run_callbacks

if __name__ == "__main__":
    for settings in sys.argv[2:]:
        train(Path(sys.argv[1]), settings.split())
