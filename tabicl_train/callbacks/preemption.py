"""Ends a run on a signal or after a time limit without losing a step."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import tell
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

    def on_fit_end(self, trainer: L.Trainer, module) -> None:
        job = os.environ.get("SLURM_JOB_ID")
        if self.asked and self.settings.requeue and trainer.is_global_zero and job:
            tell(f"stop      SLURM job {job} {requeue(job)}")


def requeue(job: str) -> str:
    """Ask SLURM to start the job of this process again; returns what became of it.

    SLURM would also start a job again that a user has cancelled: it is ending by then, and no longer running.
    """
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    state = re.search(r"JobState=(\w+)", shown.stdout)
    if state and state[1] != "RUNNING":
        return f"is not requeued: it is {state[1]}"
    result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    return "is requeued" if result.returncode == 0 else f"is not requeued: {result.stderr.strip()}"
