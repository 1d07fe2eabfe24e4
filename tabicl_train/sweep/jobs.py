"""The runs of a sweep as jobs, and the places where they run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.run.status import is_in_use
from tabicl_train.sweep.plan import Plan
from tabicl_train.training.distributed.submit import GPU_WORKERS, PROGRAM, submit_job
from tabicl_train.training.precision import uses_cuda

LOOK = 10.0  # seconds between calls of squeue
OUTPUT = "_0_log.out"  # end of the name of the file with the output of a run, after its number, as in submitit


def slots(plan: Plan) -> list[str]:
    """Return a slot for each run that may run at the same time.

    Their number is sweep.jobs. Default: as many as there are GPUs, or without GPUs cores, for the largest run. With a
    larger number, runs share GPUs.

    Parameters
    ----------
    plan : Plan
        The sweep.

    Returns
    -------
    list of str
        The CUDA_VISIBLE_DEVICES of each slot; empty texts without GPUs, and on a cluster, which assigns them itself.
    """
    sweep = plan.sweep
    if sweep.submit.cluster != "local":
        return [""] * (sweep.jobs or plan.total * len(sweep.seeds))

    # Without GPUs, the cores that the largest run needs with one worker decide.
    largest = max(plan.configs, key=lambda config: config.trainer.devices or 1)
    devices = largest.trainer.devices or 1
    if not uses_cuda(largest.trainer):
        with_one_worker, _ = largest.with_workers(1)
        cores = devices * with_one_worker.cores
        return [""] * (sweep.jobs or max(1, num_cores() // cores))

    # Groups of GPUs, each for one run, which the slots take in turn.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    groups = []
    for first in range(0, len(gpus) - devices + 1, devices):
        groups.append(",".join(gpus[first : first + devices]))
    if not groups:
        groups = [",".join(gpus)]  # too few for a run, which reports that itself
    num_runs = sweep.jobs or len(groups)
    return [groups[number % len(groups)] for number in range(num_runs)]


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


class Job:
    """The job of a run in its directory, submitted by this process or by an earlier call of the sweep."""

    def __init__(self, run_dir: Path, cluster: str, submitted: Any = None) -> None:
        self.run_dir = run_dir
        self.cluster = cluster
        self.submitted = submitted  # what `submit_job` or LocalProcess returned; None for a job of an earlier call

    @property
    def number(self) -> str | None:
        """The number of the latest process of the run, or of its latest job in SLURM."""
        if self.submitted is not None:
            return self.submitted.job_id
        # submitit writes the pickle when it submits a job; the output of a local run exists once it has started.
        ending = "_submitted.pkl" if self.cluster == "slurm" else OUTPUT
        files = sorted((self.run_dir / "jobs").glob(f"*{ending}"), key=lambda path: path.stat().st_mtime)
        if not files:
            return None
        return files[-1].name.removesuffix(ending)

    def has_ended(self) -> bool:
        """Whether the job, and on this machine its run, has ended."""
        if self.cluster == "slurm":
            return self.number not in queue.numbers()
        process_has_ended = self.submitted is None or self.submitted.done()
        return process_has_ended and not is_in_use(self.run_dir)

    def stop(self) -> None:
        """Send the stop signal, after which the run saves and ends."""
        if self.number is not None and not self.has_ended():
            with contextlib.suppress(OSError):
                if self.cluster == "slurm":
                    subprocess.run(["scancel", self.number], check=False)
                else:
                    os.kill(int(self.number), signal.SIGTERM)

    def error(self) -> str:
        """Return the first error in its output, or an empty text."""
        try:
            text = Path(self.run_dir, "jobs", f"{self.number}{OUTPUT}").read_text(errors="replace")
        except OSError:
            return ""
        for line in text.splitlines():
            if line.strip().startswith("error: "):
                return line.strip().removeprefix("error: ")
        return ""


class LocalProcess:
    """`tabicl-train ARGUMENTS` on this machine, in a session of its own: it outlives the sweep, and gets no ctrl-C.

    Parameters
    ----------
    arguments : list of str
        The arguments of tabicl-train.
    folder : Path
        The folder of the file with its output.
    **variables
        Environment variables of the process, in addition to those of this one.
    """

    def __init__(self, arguments: list[str], folder: Path, **variables: str) -> None:
        # The run replaces the shell and keeps its process number, which is in the name of the output file. A later call
        # of the sweep finds the number there, even if this one is killed right after the start.
        script = f'exec "$@" > "$0/$${OUTPUT}" 2>&1'
        try:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", script, str(folder), sys.executable, *PROGRAM, *arguments],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError([f"the run cannot be started: {error}"]) from None
        self.job_id = str(self.process.pid)

    def done(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None


def running_job(run_dir: Path, cluster: str) -> Job | None:
    """Return the job of a run that an earlier call of the sweep started and that is still running, or None."""
    job = Job(run_dir, cluster)
    if job.has_ended():
        return None
    return job


def submit_run(plan: Plan, arguments: list[str], run_dir: Path, gpus: str, at_once: int) -> Job:
    """Submit a run.

    Parameters
    ----------
    plan : Plan
        The sweep.
    arguments : list of str
        Command line of the run.
    run_dir : Path
        Run directory.
    gpus : str
        Its slot, see `slots`.
    at_once : int
        Number of slots, which share the cores of this machine.

    Returns
    -------
    Job

    Raises
    ------
    ConfigError
        If the run cannot be submitted.
    """
    options = plan.sweep.submit
    config = plan.configs[0]
    is_local = options.cluster == "local"
    if is_local:
        ranks = at_once * (config.trainer.devices or 1)
        workers = max(1, num_cores() // ranks - 1)
    else:
        workers = GPU_WORKERS if options.gpus else 1
    config, worker_arguments = config.with_workers(workers)

    plugins.refuse_changed()  # otherwise every later run would be recorded as failed
    arguments = [*arguments, *worker_arguments, *plugins.arguments()]
    folder = run_dir / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    if is_local:
        submitted = LocalProcess(arguments, folder, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=gpus)
    else:
        submitted = submit_job(arguments, options, folder, config.cores, OMP_NUM_THREADS="1")
        queue.looked = -math.inf  # the last answer of squeue does not list this job
    return Job(run_dir, options.cluster, submitted)


@dataclasses.dataclass
class Queue:
    """The jobs of this user in SLURM, looked up every ten seconds."""

    # submitit itself asks sacct. Without SLURM's accounting, and for old jobs, sacct knows nothing, and submitit
    # considers the jobs pending.
    listed: set[str] = dataclasses.field(default_factory=set)
    looked: float = -math.inf

    def numbers(self) -> set[str]:
        if time.monotonic() - self.looked >= LOOK:
            command = ["squeue", "--me", "--noheader", "--format=%i"]
            with contextlib.suppress(OSError, subprocess.SubprocessError):  # the last answer stays
                listing = subprocess.run(command, capture_output=True, text=True, check=True)
                self.listed = set(listing.stdout.split())
                self.looked = time.monotonic()
        return self.listed


queue = Queue()
