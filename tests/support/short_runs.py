"""Short runs in this process, with callbacks of the test beside those of training."""

import math
from pathlib import Path
from unittest import mock

import lightning as L
import torch

from tabicl_train import train as training
from tabicl_train.config.compose import compose

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=16",
    "checkpoint.every=4", "trainer.accelerator=cpu", "averages.ema=0.9",
]  # fmt: skip
STAGES = [  # three stages of six steps
    "experiment=smoke", "curriculum=mini_v2", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu",
    "checkpoint.every=2", "checkpoint.keep=100", *(
        f"curriculum.stages.stage{number}.{value}" for number in (1, 2, 3)
        for value in ("steps=6", "rows=[30,50]", "features=[2,4]", "tables=4", "group_size=4", "warmup=0")
    ),
]  # fmt: skip
REWIND = ("guard.after=3", "guard.loss=10", "guard.action=rewind", "checkpoint.keep=9")


def run(run_dir: Path, *overrides: str, callbacks: tuple = (), settings: list[str] = SETTINGS) -> str:
    chosen = training.run_callbacks
    with mock.patch.object(training, "run_callbacks", lambda *a: [*callbacks, *chosen(*a)]):
        return training.train(compose([*settings, f"run_dir={run_dir}", *overrides]))


class Poison(L.Callback):
    """An infinite cell in the given steps; keeps weights and optimiser state of every step."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.states = steps, []

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        if item.step in self.steps:
            item.packs[-1].X[0] = math.inf

    def on_train_batch_end(self, trainer, module, *_) -> None:
        state = [p.detach().clone() for p in module.model.parameters()]
        self.states.append(state + [v.clone() for s in trainer.optimizers[0].state.values() for v in s.values()])


class Ruin(L.Callback):
    """Weights far too large after a step, once, and a loss scale of 2."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        if item.step == self.after:
            module.loss_scale.scale.fill_(2)
            with torch.no_grad():
                for p in module.model.icl_predictor.decoder.parameters():
                    p.mul_(100)
