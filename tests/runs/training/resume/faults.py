"""Training in which things go wrong on chosen ranks.

Besides the settings of tabicl-train, it takes
    oom=RANK,STEP,TABLES    on that rank, from that step on, packs of TABLES or more run out of memory in the middle
                            of the backward pass
    nan=RANK,STEP           an infinite cell in a table of that rank in that step
    signal=RANK,STEP,N      the rank sends itself this signal before that step
Every table that a rank trains on is a line of RUN_DIR.tables: step, and a digest of its values. At the end every rank
writes a digest of its weights to RUN_DIR/weights.RANK.
"""

import hashlib
import math
import os
from pathlib import Path
from unittest import mock

import torch

from tabicl_train.config.compose import compose
from tabicl_train.training import loop, module

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


class Faults:
    def __init__(self, run_dir: Path, faults: dict[str, list[int]]) -> None:
        self.run_dir, self.faults, self.step = run_dir, faults, -1
        self.rank = int(os.environ.get("RANK", 0))

    def arguments_here(self, fault: str) -> list[int] | None:
        rank, *rest = self.faults.get(fault, [None])
        return rest if rank == self.rank else None

    def before_step(self, state, item) -> None:
        self.step = item.step
        with open(f"{self.run_dir}.tables", "a") as file:
            for pack in item.packs:
                for X, y, _ in pack.tables():
                    digest = hashlib.sha256(X.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
                    file.write(f"{item.step} {digest}\n")
        if self.arguments_here("nan") == [item.step]:
            item.packs[-1].X[0] = math.inf
        if (arguments := self.arguments_here("signal")) and arguments[0] == item.step:
            os.kill(os.getpid(), arguments[1])

    def query_losses(self, model, pack, *settings):
        loss = QUERY_LOSSES(model, pack, *settings)
        if (arguments := self.arguments_here("oom")) and self.step >= arguments[0] and len(pack) >= arguments[1]:
            return loss + 0 * Fails.apply(model.row_interactor.cls_tokens).sum()
        return loss

    def end(self, state, reason) -> None:
        values = b"".join(p.detach().numpy().tobytes() for p in state.network.parameters())
        (self.run_dir / f"weights.{self.rank}").write_text(hashlib.sha256(values).hexdigest())


QUERY_LOSSES = module.query_losses


def train_with_faults(*overrides: str) -> str:
    pairs = [text.partition("=") for text in overrides]
    injected = {key: [int(v) for v in value.split(",")] for key, _, value in pairs if key in FAULTS}
    config = compose([*SETTINGS, *(text for text in overrides if text.partition("=")[0] not in FAULTS)])
    faults = Faults(Path(config.run_dir), injected)
    with mock.patch.object(module, "query_losses", faults.query_losses):
        return loop.train(config, [faults])
