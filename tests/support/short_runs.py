"""Short runs in this process, with callbacks of the test beside those of training."""

import contextlib
import functools
import math
from pathlib import Path
from unittest import mock

import torch

from tabicl_train import training
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.module import Pretraining
from tabicl_train.precision import choose

SETTINGS = [
    "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=16",
    "checkpoint.every=4", "trainer.accelerator=cpu", "averages.ema=0.9",
]  # fmt: skip
STAGES = [  # three stages of six steps
    "experiment=smoke", "curriculum=tabicl_v2", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu",
    "checkpoint.every=2", "checkpoint.keep=100", *(
        f"curriculum.stages.stage{number}.{value}" for number in (1, 2, 3)
        for value in ("steps=6", "rows=[30,50]", "features=[2,4]", "tables=4", "group_size=4", "warmup=0")
    ),
]  # fmt: skip
REWIND = ("guard.after=3", "guard.loss=10", "guard.action=rewind", "checkpoint.keep=9")


def beside(*callbacks) -> contextlib.AbstractContextManager:
    """Within the context a command trains with these callbacks beside its own."""
    return mock.patch.object(training, "train", functools.partial(training.train, callbacks=callbacks))


def run(run_dir: Path, *overrides: str, callbacks: tuple = (), settings: list[str] = SETTINGS) -> str:
    """A run with these callbacks beside its own."""
    return training.train(compose([*settings, f"run_dir={run_dir}", *overrides]), callbacks)


def module_of(config: RunConfig) -> Pretraining:
    """The module that a run would train."""
    return Pretraining(config.model, config.curriculum, config.optimizer, choose(config.trainer), config.seed)


class Poison:
    """An infinite cell in the given steps; keeps weights and optimizer state of every step."""

    def __init__(self, steps: set[int]) -> None:
        self.steps, self.states = steps, []

    def before_step(self, state, item) -> None:
        if item.step in self.steps:
            item.packs[-1].X[0] = math.inf

    def after_step(self, state, item) -> None:
        values = [p.detach().clone() for p in state.network.parameters()]
        self.states.append(values + [v.clone() for s in state.optimizer.state.values() for v in s.values()])


class Ruin:
    """Weights far too large after a step, once, and a loss scale of 2."""

    def __init__(self, after: int) -> None:
        self.after = after

    def before_step(self, state, item) -> None:
        if item.step == self.after:
            state.module.loss_scale.scale.fill_(2)
            with torch.no_grad():
                for p in state.network.icl_predictor.decoder.parameters():
                    p.mul_(100)
