"""Jobs submitted to SLURM by submitit."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from pathlib import Path

from tabicl_train.config.sweep import SweepConfig
from tabicl_train.console import first_line
from tabicl_train.distributed.signals import SIGNALS
from tabicl_train.errors import ConfigError
from tabicl_train.sweep.executors.executor import cores, process_of, start_process
from tabicl_train.sweep.plan import Job

JOB_ID = "slurm_job"  # file in a job's folder
LOOK = 10.0  # seconds between calls of squeue


class Slurm:
    """sweep.slurm holds submitit's parameters; cluster: local runs the jobs here, to try it without SLURM."""

    def __init__(self, sweep: SweepConfig, folder: Path) -> None:
        import submitit

        self.options = {str(key): value for key, value in sweep.slurm.items()}
        self.cluster = self.options.pop("cluster", "slurm")
        self.limit = sweep.jobs or math.inf
        self.running: set[str] = set()
        self.queued: set[str] | None = None  # numbers of the jobs that SLURM has; None if it did not answer
        self.looked = -math.inf
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=self.cluster)
            self.executor.update_parameters(name=sweep.name, **self.options)
        except Exception as error:  # submitit raises RuntimeError, NameError, TypeError, ValueError and others
            raise ConfigError([f"sweep.slurm: {first_line(error)}"]) from None

    def has_room(self, job: Job) -> bool:
        return len(self.running) < self.limit

    def has(self, job: Job) -> bool:
        return self.submitted_before(job) is not None

    def start(self, job: Job) -> SlurmJob:
        """Submit a job, or find the one that an earlier call of the sweep has submitted."""
        self.running.add(job.name)
        return SlurmJob(self, job.name, self.submitted_before(job) or self.submit(job))

    def submit(self, job: Job):
        if "cpus_per_task" not in self.options:
            self.executor.update_parameters(cpus_per_task=cores(job))
        submitted = self.executor.submit(run_process, *process_of(job))
        self.looked = -math.inf  # the jobs known so far lack this one
        (job.folder / JOB_ID).write_text(submitted.job_id)
        return submitted

    def submitted_before(self, job: Job):
        import submitit

        if self.cluster != "slurm" or not (job.folder / JOB_ID).exists():
            return None
        submitted = submitit.SlurmJob(self.executor.folder, (job.folder / JOB_ID).read_text())
        return None if self.has_ended(submitted) else submitted

    def has_ended(self, submitted) -> bool:
        """Whether a job has a result, or SLURM no longer has it. submitit alone asks sacct, which does not answer
        without SLURM's accounting, or about jobs of long ago; it would take them for jobs that still wait."""
        if submitted.done():
            return True
        if self.cluster != "slurm":
            return False
        if time.monotonic() - self.looked >= LOOK:
            self.queued, self.looked = queued_jobs(), time.monotonic()
        return self.queued is not None and submitted.job_id not in self.queued

    def close(self) -> None:
        pass


class SlurmJob:
    def __init__(self, executor: Slurm, name: str, submitted) -> None:
        self.executor, self.name, self.submitted = executor, name, submitted

    def poll(self) -> int | None:
        if not self.executor.has_ended(self.submitted):
            return None
        self.executor.running.discard(self.name)
        if not self.submitted.done():  # submitit would wait for the result
            return -signal.SIGKILL
        try:
            return self.submitted.result()
        except Exception:  # cancelled, out of time or memory, or its machine was lost
            return -signal.SIGKILL

    def stop(self) -> None:
        self.submitted.cancel(check=False)


def queued_jobs() -> set[str] | None:
    """The numbers of this user's jobs that wait, run or are ending; None if SLURM does not answer."""
    command = ["squeue", "--me", "--noheader", "--format=%i"]
    try:
        return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    except (OSError, subprocess.SubprocessError):
        return None


def run_process(*process) -> int:
    """Runs a process on the machine that SLURM has chosen, and hands stop signals on to it. Returns its exit code."""
    running = start_process(*process)
    # SIGUSR2 is what submitit has SLURM send before the time limit; the sweep submits the job again.
    for number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(number, lambda *_: running.terminate())
    return running.wait()
