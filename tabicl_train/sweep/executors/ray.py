"""Jobs as actors of a Ray cluster."""

from __future__ import annotations

import math
import os
import signal

from tabicl_train.config.sweep import SweepConfig
from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError
from tabicl_train.sweep.executors.executor import cores, process_of, processes, start_process
from tabicl_train.sweep.plan import Job


class Ray:
    """On the cluster of the environment variable RAY_ADDRESS, else on one that it starts here."""

    def __init__(self, sweep: SweepConfig) -> None:
        import ray

        address = os.environ.get("RAY_ADDRESS", "local")
        here = {"include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address=address, log_to_driver=False, **here)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError([f"RAY_ADDRESS is {address!r}; Ray cannot be reached: {first_line(error)}"]) from None
        self.gpus = ray.cluster_resources().get("GPU", 0)
        self.cores = max(1, *(int(node["Resources"].get("CPU", 0)) for node in ray.nodes()))  # of the largest machine
        self.limit = sweep.jobs or math.inf
        self.running: set[str] = set()

    def has_room(self, job: Job) -> bool:
        return len(self.running) < self.limit

    def has(self, job: Job) -> bool:
        return False  # it has ended with that call

    def start(self, job: Job) -> RayJob:
        import ray

        assert job.config is not None
        gpus = processes(job) if self.gpus and job.config.trainer.accelerator != "cpu" else 0
        needed = min(cores(job), self.cores)  # an actor that asks for more would wait forever
        actor = ray.remote(Process).options(num_cpus=needed, num_gpus=gpus).remote()
        started = actor.start.remote(*process_of(job))
        self.running.add(job.name)
        return RayJob(self, job.name, actor, started)

    def close(self) -> None:
        import ray

        ray.shutdown()


class RayJob:
    """started: Ray's promise that the process runs"""

    def __init__(self, executor: Ray, name: str, actor, started) -> None:
        self.executor, self.name, self.actor, self.started = executor, name, actor, started
        self.answer = None  # to the last question for the exit code

    def poll(self) -> int | None:
        import ray

        if self.answer is None:
            self.answer = self.actor.poll.remote()
        if not ray.wait([self.answer], timeout=0)[0]:
            return None
        try:
            code = ray.get(self.answer)
        except ray.exceptions.RayError:  # the actor or its machine is lost
            code = -signal.SIGKILL
        self.answer = None
        if code is not None:
            self.executor.running.discard(self.name)
            ray.kill(self.actor)
        return code

    def stop(self) -> None:
        import ray

        if ray.wait([self.started], timeout=0)[0]:
            self.actor.stop.remote()
        else:  # it waits for cores
            ray.kill(self.actor)


class Process:
    """A process on the machine of a Ray actor; it ends with the actor."""

    def start(self, *process) -> None:
        self.process = start_process(*process)

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.terminate()
