"""Training that stops itself in the middle of a step, and records every table that it trains on.

Besides the settings of tabicl-train, it takes
    signal=N    sent to itself by the last rank before the third pack of step 5
Tables go to FOLDER/RUN_NAME.tables, one line for each: step, and a digest of its values.
"""

import hashlib
import os
from pathlib import Path
from unittest import mock

from tabicl_train import commands, module
from tabicl_train import train as training
from tabicl_train.config.compose import compose

SETTINGS = ("experiment=smoke", "curriculum.stages.smoke.steps=8", "curriculum.stages.smoke.pack_tokens=500")
AT = (5, 2)  # step and pack (from 0), before which the signal is sent


class Tables:
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, item, **_) -> None:
        with open(self.path, "a") as file:
            for pack in item.packs:
                for X, y, _ in pack.tables():
                    digest = hashlib.sha256(X.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
                    file.write(f"{item.step} {digest}\n")


class StopItself:
    """Sends the signal between two packs of a step, on the last rank."""

    def __init__(self, number: int) -> None:
        self.number = number
        is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        self.step = AT[0] if number and is_last else None

    def on_train_batch_start(self, item, **_) -> None:
        self.left = AT[1] if item.step == self.step else None
        assert self.left is None or len(item.packs) > AT[1]

    def query_losses(self, *arguments):
        if self.left is not None:
            if self.left == 0:
                os.kill(os.getpid(), self.number)
            self.left -= 1
        return QUERY_LOSSES(*arguments)


QUERY_LOSSES = module.query_losses
BUILD_CALLBACKS = training.build_callbacks


def train(folder: Path, overrides: list[str]) -> str:
    """Run it in this process; returns the run's status."""
    stop = StopItself(next((int(o.split("=")[1]) for o in overrides if o.startswith("signal=")), 0))
    config = compose([*SETTINGS, *(o for o in overrides if not o.startswith("signal="))])
    watching = [Tables(folder / f"{Path(config.run_dir).name}.tables"), stop]

    def callbacks(*arguments):
        return [*watching, *BUILD_CALLBACKS(*arguments)]

    with (
        mock.patch.object(module, "query_losses", stop.query_losses),
        mock.patch.object(training, "build_callbacks", callbacks),
    ):
        return training.train(config)


def train_rank(folder: Path, *overrides: str) -> None:
    """As one rank, which ends as tabicl-train does when another one is lost."""
    with commands.run_errors(None):
        train(folder, list(overrides))
