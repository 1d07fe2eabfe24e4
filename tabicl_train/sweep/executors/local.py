"""Jobs as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import Counter

import torch

from tabicl_train.precision import uses_cuda
from tabicl_train.sweep.executors.executor import cores, process_of, processes, start_process
from tabicl_train.sweep.plan import Job


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


class Pool:
    """The GPUs and cores that jobs share.

    limit: jobs at once; None for as many as have GPUs, or cores on a CPU, of their own. With a limit, jobs share GPUs
    where there are fewer, and may be more than the cores.
    """

    def __init__(self, gpus: list[str], num_cores: int, limit: int | None) -> None:
        self.use = Counter(dict.fromkeys(gpus, 0))
        self.num_cores, self.limit = num_cores, limit
        self.taken: dict[str, tuple[list[str], int]] = {}  # GPUs and cores, by job

    def has_room(self, gpus: int, num_cores: int) -> bool:
        if self.limit is not None:
            return len(self.taken) < self.limit
        if gpus:
            # A job that needs more GPUs than there are fails by itself; it would wait forever here.
            return sum(use == 0 for use in self.use.values()) >= min(gpus, len(self.use))
        return not self.taken or sum(n for _, n in self.taken.values()) + num_cores <= self.num_cores

    def take(self, name: str, gpus: int, num_cores: int) -> list[str]:
        """The GPUs for a job, those with the fewest jobs."""
        chosen = sorted(self.use, key=lambda gpu: self.use[gpu])[:gpus]
        self.use.update(chosen)
        self.taken[name] = (chosen, num_cores)
        return chosen

    def give_back(self, name: str) -> None:
        gpus, _ = self.taken.pop(name, ([], 0))
        self.use.subtract(gpus)


class Local:
    """Starts jobs as processes, each in a session of its own, and killed when this process is gone."""

    def __init__(self, limit: int | None) -> None:
        self.gpus = visible_gpus()
        self.pool = Pool(self.gpus, len(os.sched_getaffinity(0)), limit)

    def needs(self, job: Job) -> tuple[int, int]:
        """GPUs and cores."""
        assert job.config is not None
        return processes(job) if uses_cuda(job.config.trainer) else 0, cores(job, self.workers(job))

    def workers(self, job: Job) -> int:
        """Workers of each training process of a job, unless it says: all cores are shared by the processes at once, and
        one is left to each of them. On a CPU it is one, so that as many jobs as possible run."""
        assert job.config is not None
        if self.pool.limit is not None:
            at_once = self.pool.limit * processes(job)
        else:
            at_once = len(self.gpus) if uses_cuda(job.config.trainer) else self.pool.num_cores
        return max(1, self.pool.num_cores // max(1, at_once) - 1)

    def problem(self, job: Job) -> str | None:
        """Why a job can never run here."""
        gpus, _ = self.needs(job)
        if gpus > len(self.gpus):
            return f"trainer.devices is {gpus}, but this machine has {len(self.gpus)} of them"
        return None

    def has_room(self, job: Job) -> bool:
        return self.pool.has_room(*self.needs(job))

    def has(self, job: Job) -> bool:
        return False  # it has ended with that call

    def start(self, job: Job) -> LocalJob:
        gpus = self.pool.take(job.name, *self.needs(job))
        try:
            process = start_process(*process_of(job, self.workers(job)), gpus or None)
        except OSError:
            self.pool.give_back(job.name)
            raise
        return LocalJob(self.pool, job.name, process)

    def close(self) -> None:
        pass


class LocalJob:
    def __init__(self, pool: Pool, name: str, process: subprocess.Popen) -> None:
        self.pool, self.name, self.process = pool, name, process

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None:
            self.pool.give_back(self.name)
            with contextlib.suppress(OSError):  # what the job may have left behind, such as other ranks and workers
                os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)
