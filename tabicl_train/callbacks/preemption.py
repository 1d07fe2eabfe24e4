"""Ends a run on a signal or after a time limit without losing a step."""

from __future__ import annotations

from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.signals import Stop


class Preemption(L.Callback):
    """A stop signal to any rank, or the time limit, ends the run on all ranks after the step, with a checkpoint.

    The ranks agree over a CPU process group, so that no rank waits for its GPU.
    """

    def __init__(self, stop: Stop, settings: TrainerConfig) -> None:
        self.stop, self.settings = stop, settings
        self.asked = False  # whether any rank was asked to stop

    def on_fit_start(self, trainer: L.Trainer, module) -> None:
        if trainer.world_size > 1:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.settings.timeout))

    def on_train_start(self, trainer: L.Trainer, module) -> None:
        self.agree(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        self.agree(trainer)

    def agree(self, trainer: L.Trainer) -> None:
        asked = self.stop.asked
        if trainer.world_size > 1:
            any_asked = torch.tensor(int(asked))
            dist.all_reduce(any_asked, dist.ReduceOp.MAX, group=self.group)
            asked = bool(any_asked)
        self.asked = self.asked or asked
        trainer.should_stop = trainer.should_stop or self.asked
