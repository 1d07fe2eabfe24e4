"""What an executor of jobs offers, and what they share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from tabicl_train.config.schema import with_workers
from tabicl_train.distributed.signals import PARENT
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

    def has(self, job: Job) -> bool:
        """Whether the job, started by an earlier call of the sweep, still runs here; `start` then takes it over."""

    def start(self, job: Job) -> Handle: ...

    def close(self) -> None: ...


def processes(job: Job) -> int:
    """Training processes of a job."""
    assert job.config is not None
    return job.config.trainer.devices or 1


def cores(job: Job, workers: int = 1) -> int:
    """Cores that a job keeps busy: those of its training processes and of their workers; `workers` as below."""
    assert job.config is not None
    return processes(job) * with_workers(job.config, workers)[0].cores


def start_process(arguments: list[str], threads: int, folder: str, log: str, gpus: list[str] | None = None):
    """Start tabicl-train in a session of its own; it is killed when this process is gone.

    threads: OMP_NUM_THREADS; folder: working directory; log: file that its output is added to
    gpus: those that it may use; None for those of this process
    """
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env |= {"OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with open(log, "ab") as file:
        return subprocess.Popen(
            arguments,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def process_of(job: Job, workers: int = 1) -> tuple[list[str], int, str, str]:
    """The first arguments of `start_process` for a job. It calls itself tabicl-train, so that the run records a command
    that can be typed.

    workers: of each training process, if stream.num_workers does not say: a job shares its machine with others
    """
    assert job.config is not None
    program = "import sys; sys.argv[0] = 'tabicl-train'; from tabicl_train.commands import train; train()"
    arguments = [sys.executable, "-c", program, *job.arguments, *with_workers(job.config, workers)[1]]
    return arguments, job.config.trainer.cpu_threads, os.getcwd(), str(log_file(job).absolute())


def log_file(job: Job) -> Path:
    return job.folder / LOG
