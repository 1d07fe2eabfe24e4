"""Training in which things go wrong on chosen ranks.

Besides the settings of tabicl-train, it takes
    oom=RANK,STEP,TABLES    on that rank, from that step on, packs of TABLES or more run out of memory in the middle
                            of the backward pass
    nan=RANK,STEP           an infinite cell in a table of that rank in that step
    signal=RANK,STEP,N      the rank sends itself this signal before that step; STEP may be -1, before training begins,
                            or -2, in the middle of its first save
At the end every rank writes a digest of its weights to RUN_DIR/weights.RANK, and the first one adds a line to statuses.
"""

import hashlib
import math
import os
import sys
from pathlib import Path
from unittest import mock

import lightning as L
import torch

from tabicl_train import module
from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.processes.watch import ProcessLost

SETTINGS = ("experiment=smoke", "curriculum.stages.smoke.steps=8", "prior=dummy", "checkpoint.every=2")
FAULTS = ("oom", "nan", "signal")


class Fails(torch.autograd.Function):
    """Runs out of memory in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("injected")


class Faults(L.Callback):
    def __init__(self, run_dir: Path, faults: dict[str, list[int]]) -> None:
        self.run_dir, self.faults, self.step = run_dir, faults, -1

    def arguments_here(self, fault: str) -> list[int] | None:
        rank, *rest = self.faults.get(fault, [None])
        return rest if rank == int(os.environ.get("RANK", 0)) else None

    def setup(self, trainer, pretraining, stage) -> None:
        self.signal_at(-1)

    def on_save_checkpoint(self, trainer, pretraining, checkpoint) -> None:
        self.signal_at(-2)

    def signal_at(self, step: int) -> None:
        if (arguments := self.arguments_here("signal")) and arguments[0] == step:
            del self.faults["signal"]
            os.kill(os.getpid(), arguments[1])

    def on_train_batch_start(self, trainer, pretraining, item, _) -> None:
        self.step = item.step
        if self.arguments_here("nan") == [item.step]:
            item.packs[-1].X[0] = math.inf
        self.signal_at(item.step)

    def query_losses(self, model, pack, *settings):
        loss = QUERY_LOSSES(model, pack, *settings)
        if (arguments := self.arguments_here("oom")) and self.step >= arguments[0] and len(pack) >= arguments[1]:
            return loss + 0 * Fails.apply(model.row_interactor.cls_tokens).sum()
        return loss

    def on_train_end(self, trainer, pretraining) -> None:
        values = b"".join(p.detach().numpy().tobytes() for p in pretraining.model.parameters())
        (self.run_dir / f"weights.{trainer.global_rank}").write_text(hashlib.sha256(values).hexdigest())


QUERY_LOSSES = module.query_losses
RUN_CALLBACKS = training.run_callbacks


def train(overrides: list[str]) -> str:
    pairs = [text.partition("=") for text in overrides]
    injected = {key: [int(v) for v in value.split(",")] for key, _, value in pairs if key in FAULTS}
    config = compose([*SETTINGS, *(text for text in overrides if text.partition("=")[0] not in FAULTS)])
    faults = Faults(Path(config.run_dir), injected)
    with (
        mock.patch.object(module, "query_losses", faults.query_losses),
        mock.patch.object(training, "run_callbacks", lambda *a: [faults, *RUN_CALLBACKS(*a)]),
    ):
        status = training.train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        with open(faults.run_dir / "statuses", "a") as file:
            file.write((faults.run_dir / "status.json").read_text())
    return status


def train_all(*runs: str) -> None:
    """One run after another, each given as "override override ..."; a rank whose peer is lost ends with an error."""
    for overrides in runs:
        try:
            train(overrides.split())
        except ProcessLost as error:
            sys.exit(f"error: {error}")
