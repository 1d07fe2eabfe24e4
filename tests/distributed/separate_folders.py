"""Runs of two processes, each in a folder of its own, as on two machines without a shared disk.

Digests of the weights at the start and the end of each training go to FOLDER/RUN_NAME.start|end.RANK.
"""

import hashlib
import os
import signal
from pathlib import Path
from unittest import mock

import torch

from tabicl_train import train as training
from tabicl_train.callbacks import guard
from tabicl_train.config.compose import compose

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=8", "checkpoint.every=2",
    "trainer.accelerator=cpu", "trainer.devices=2", "averages.ema=0.9", "model.dropout=0.1",
]  # fmt: skip
BUILD_CALLBACKS = training.build_callbacks


class Trouble:
    def __init__(self, folder: Path, rank: int, name: str, step: int) -> None:
        self.folder, self.rank, self.name, self.step = folder, rank, name, step

    def on_train_batch_start(self, item, module, **_) -> None:
        if item.step == self.step and self.name == "stop" and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if item.step == self.step and self.name == "ruin":
            with torch.no_grad():
                for p in module.model.icl_predictor.decoder.parameters():
                    p.mul_(100)

    def on_train_start(self, module, **_) -> None:
        self.write_digest(module, "start")

    def on_train_end(self, module, **_) -> None:
        self.write_digest(module, "end")

    def write_digest(self, module, when: str) -> None:
        values = b"".join(p.detach().numpy().tobytes() for p in module.model.parameters())
        (self.folder / f"{module.config.run_dir}.{when}.{self.rank}").write_text(hashlib.sha256(values).hexdigest())


def train(folder: Path, expected: str, trouble: tuple[str, int], run_dir: str, *overrides: str) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folder / f"machine-{rank}")
    guard.HORIZON, guard.MEMORY = 2, 0.5
    callbacks = lambda *a: [Trouble(folder, rank, *trouble), *BUILD_CALLBACKS(*a)]  # noqa: E731
    with mock.patch.object(training, "build_callbacks", callbacks):
        assert training.train(compose([*SETTINGS, f"run_dir={run_dir}", *overrides])) == expected
