"""Jobs submitted to SLURM by submitit."""

from __future__ import annotations

import math
import signal
from pathlib import Path

from tabicl_train.config.sweep import SweepConfig
from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError
from tabicl_train.processes.signals import SIGNALS
from tabicl_train.sweep.executors.executor import cores, process_of, start_process
from tabicl_train.sweep.plan import Job

JOB_ID = "slurm_job"  # file in a job's folder


class Slurm:
    """sweep.slurm holds submitit's parameters; cluster: local runs the jobs here, to try it without SLURM."""

    def __init__(self, sweep: SweepConfig, folder: Path) -> None:
        import submitit

        self.options = {str(key): value for key, value in sweep.slurm.items()}
        self.cluster = self.options.pop("cluster", "slurm")
        self.limit = sweep.jobs or math.inf
        self.running: set[str] = set()
        try:
            self.executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=self.cluster)
            self.executor.update_parameters(name=sweep.name, **self.options)
        except Exception as error:  # submitit raises RuntimeError, NameError, TypeError, ValueError and others
            raise ConfigError([f"sweep.slurm: {first_line(error)}"]) from None

    def has_room(self, job: Job) -> bool:
        return len(self.running) < self.limit

    def start(self, job: Job) -> SlurmJob:
        """Submit a job, or find the one that an earlier call of the sweep has submitted."""
        self.running.add(job.name)
        return SlurmJob(self, job.name, self.submitted_before(job) or self.submit(job))

    def submit(self, job: Job):
        if "cpus_per_task" not in self.options:
            self.executor.update_parameters(cpus_per_task=cores(job))
        submitted = self.executor.submit(run_process, *process_of(job))
        (job.folder / JOB_ID).write_text(submitted.job_id)
        return submitted

    def submitted_before(self, job: Job):
        import submitit

        if self.cluster != "slurm" or not (job.folder / JOB_ID).exists():
            return None
        submitted = submitit.SlurmJob(self.executor.folder, (job.folder / JOB_ID).read_text())
        return None if submitted.done(force_check=True) else submitted

    def close(self) -> None:
        pass


class SlurmJob:
    def __init__(self, executor: Slurm, name: str, submitted) -> None:
        self.executor, self.name, self.submitted = executor, name, submitted

    def poll(self) -> int | None:
        if not self.submitted.done():
            return None
        self.executor.running.discard(self.name)
        try:
            return self.submitted.result()
        except Exception:  # cancelled, out of time or memory, or its machine was lost
            return -signal.SIGKILL

    def stop(self) -> None:
        self.submitted.cancel(check=False)


def run_process(*process) -> int:
    """Runs a process on the machine that SLURM has chosen, and hands stop signals on to it. Returns its exit code."""
    running = start_process(*process)
    # SIGUSR2 is what submitit has SLURM send before the time limit; the sweep submits the job again.
    for number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(number, lambda *_: running.terminate())
    return running.wait()
