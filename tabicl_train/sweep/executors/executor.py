"""What an executor of jobs offers, and what they share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Protocol

from tabicl_train.sweep.plan import Job

LOG = "log.txt"

# A sweep may itself be started in a job of a cluster; the jobs of the sweep are no ranks of that.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"),
    *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"),
)


class Handle(Protocol):
    """A job that was started."""

    def poll(self) -> int | None:
        """The exit code of tabicl-train once it has ended, negative for a signal; None before that."""

    def stop(self) -> None:
        """Ask the job to save and end."""


class Executor(Protocol):
    def has_room(self, job: Job) -> bool:
        """Whether the job can be started now."""

    def start(self, job: Job) -> Handle: ...

    def close(self) -> None: ...


def processes(job: Job) -> int:
    """Training processes of a job."""
    assert job.config is not None
    return job.config.trainer.devices or 1


def cores(job: Job) -> int:
    """Cores that a job keeps busy: those of its training processes and of their workers."""
    assert job.config is not None
    return processes(job) * (job.config.trainer.cpu_threads + job.config.stream.num_workers)


def command(job: Job) -> list[str]:
    """The process of a job. It calls itself tabicl-train, so that the run records a command that can be typed."""
    program = "import sys; sys.argv[0] = 'tabicl-train'; from tabicl_train.commands import train; train()"
    return [sys.executable, "-c", program, *job.arguments]


def environment(job: Job) -> dict[str, str]:
    assert job.config is not None
    kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    return kept | {"OMP_NUM_THREADS": str(job.config.trainer.cpu_threads)}


def log_file(job: Job) -> Path:
    return job.folder / LOG
