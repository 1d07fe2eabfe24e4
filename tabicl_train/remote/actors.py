"""The Ray actors that draw the tables of one training process."""

from __future__ import annotations

import contextlib
import heapq
import os
import pickle
import socket
import sys
import sysconfig
import time
import traceback
from collections import Counter
from typing import Any

import torch

from tabicl_train.config.schema import CONNECT, address_of
from tabicl_train.console import counted, first_line
from tabicl_train.errors import picklable
from tabicl_train.remote.machine import Machine, differences, other_kinds, this_machine
from tabicl_train.stream import StepStream
from tabicl_train.workers import Content, WorkerDied, packed

DEATHS = 4  # of actors that drew the same step, after which the run ends: another one would die too
LOST = 60.0  # seconds without any actor, after which the cluster counts as lost: Ray's own limit for a lost head
FIRST = 120.0  # seconds to wait for the first actor: starting takes one 10 s on a free core
OTHERS = 30.0  # seconds to wait for the others when it has started
RESTART = 2.0  # seconds between attempts to replace lost actors

Answer = tuple[Content | None, list, Exception | None, str]  # an item, or an error and its stack trace


class ClusterLost(Exception):
    """No more tables come from the cluster."""


class Drawer:
    """The actor: draws steps of a stream.

    sent: the pickled stream, folder: the working directory of the run, where the machine has it
    """

    def __init__(self, sent: bytes, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        torch.set_num_threads(1)
        self.sent = sent

    def introduce(self) -> tuple[Machine, str | None]:
        """The machine, and why it cannot load the prior if it cannot."""
        try:
            self.stream: StepStream = pickle.loads(self.sent)
        except Exception as error:  # the import of a package may fail in any way
            return this_machine(None), f"{type(error).__name__}: {first_line(error)}"
        return this_machine(self.stream.prior), None

    def draw(self, step: int) -> Answer:
        try:
            return *packed(self.stream.draw(step)), None, ""
        except Exception as error:
            return None, [], picklable(error), traceback.format_exc()


class Actors:
    """The actors of a training process, and what they are doing. Lost ones are replaced.

    starting: actors by their first reply; idle: actors and their hosts; busy: these and a step, by reply
    lost_steps: to be drawn again, a heap; news: what the user should know
    """

    def __init__(self, ray: Any, stream: StepStream, number: int) -> None:
        self.ray, self.stream, self.number = ray, stream, number
        # Ray's processes know nothing of a checkout, and of other folders that the training process imports from.
        installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
        folders = [path for path in map(os.path.abspath, sys.path) if not path.startswith(installed)]
        variables = {"PYTHONPATH": os.pathsep.join([*folders, "${PYTHONPATH}"]), "OMP_NUM_THREADS": "1"}
        self.kind = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", runtime_env={"env_vars": variables})(Drawer)
        self.sent = ray.cloudpickle.dumps(stream)
        self.head = address_of(ray.get_runtime_context().gcs_address)
        self.here = this_machine(stream.prior)
        self.starting: dict[Any, Any] = {}
        self.idle: list[tuple[Any, str]] = []
        self.busy: dict[Any, tuple[Any, str, int]] = {}
        self.lost_steps: list[int] = []
        self.deaths: Counter[int] = Counter()
        self.news: list[str] = []
        self.unused: set[str] = set()  # why actors are not used; each reason is told once
        self.alive_at = self.added_at = time.monotonic()
        self.add(number)

    def add(self, count: int) -> None:
        for _ in range(count):
            actor = self.kind.remote(self.sent, os.getcwd())
            self.starting[actor.introduce.remote()] = actor
        self.added_at = time.monotonic()

    def start(self) -> tuple[list[str], list[str]]:
        """Wait for the actors. Returns what keeps them from drawing, and lines for the user."""
        machines: list[Machine] = []
        problems: list[str] = []
        deadline = time.monotonic() + FIRST
        while self.starting and time.monotonic() < deadline:
            for reply in self.ray.wait(list(self.starting), timeout=1.0)[0]:
                machine, problem = self.introduction(reply)
                problems += [problem] if problem else []
                if machine is not None:
                    machines.append(machine)
                    deadline = min(deadline, time.monotonic() + OTHERS)
        problems = differences(machines, self.here) or list(dict.fromkeys(problems))
        if not machines and not problems:
            cpus = self.ray.cluster_resources().get("CPU", 0)
            problems.append(f"no actor has started in {FIRST:.0f} s; each needs a free CPU of the cluster's {cpus:.0f}")
        hosts = Counter(machine.name for machine in machines)
        listed = ", ".join(f"{count} on {name}" for name, count in sorted(hosts.items()))
        lines = [f"stream    {counted(len(machines), 'Ray actor')}: {listed}"]
        if self.starting:
            lines.append(
                f"warning   {len(self.starting)} of {self.number} actors have not started yet; each needs a free CPU"
            )
        if warning := other_kinds(machines, self.here):
            lines.append(f"warning   {warning}")
        return problems, lines

    def introduction(self, reply: Any) -> tuple[Machine | None, str | None]:
        """The machine of an actor that has started, which is idle from now on if there is no problem."""
        actor = self.starting.pop(reply)
        try:
            machine, problem = self.ray.get(reply)
        except self.ray.exceptions.RayError as error:
            self.kill(actor)
            return None, f"an actor cannot start: {last_line(error)}"
        if problem is not None:
            problem = f"{machine.name} cannot load the prior ({problem}); its package must be installed there"
        elif differing := differences([machine], self.here):
            problem = "; ".join(differing)
        if problem is None:
            self.idle.append((actor, machine.name))
        else:
            self.kill(actor)
        return machine, problem

    def draw(self, step: int) -> None:
        actor, host = self.idle.pop()
        self.busy[actor.draw.remote(step)] = actor, host, step

    def collect(self, seconds: float) -> list[tuple[int, str, Answer]]:
        """What has been drawn, after waiting for something to happen: step, host, and item or error."""
        replies = [*self.starting, *self.busy]
        if not replies or not self.ray.wait(replies, timeout=seconds)[0]:
            return []
        results = []
        for reply in self.ray.wait(replies, num_returns=len(replies), timeout=0)[0]:
            if reply in self.starting:
                _, problem = self.introduction(reply)
                if problem is not None and problem not in self.unused:
                    self.unused.add(problem)
                    self.news.append(f"an actor is not used: {problem}")
                continue
            actor, host, step = self.busy.pop(reply)
            try:
                results.append((step, host, self.ray.get(reply)))
            except self.ray.exceptions.RayError as error:
                self.kill(actor)
                results += [(step, host, answer) for answer in self.lose(step, host, error)]
            else:
                self.idle.append((actor, host))
        return results

    def lose(self, step: int, host: str, error: Exception) -> list[Answer]:
        """Have the step of a lost actor drawn again, unless its tables seem to be what ends the actors."""
        self.deaths[step] += 1
        if self.deaths[step] < DEATHS:
            heapq.heappush(self.lost_steps, step)
            self.news.append(f"a Ray actor on {host} was lost; another one draws step {step} again")
            return []
        where = f"step {step}, seed {self.stream.seed}"
        died = WorkerDied(f"{DEATHS} actors ended, one after the other, while drawing {where} (out of memory?)")
        return [(None, [], died, str(error))]

    def take_news(self) -> str:
        """What happened since the last call."""
        news, self.news = self.news, []
        return "; ".join(dict.fromkeys(news))

    def kill(self, actor: Any) -> None:
        with contextlib.suppress(Exception):
            self.ray.kill(actor)

    def keep_up(self) -> None:
        """Replace lost actors; raises ClusterLost if there has been none for too long."""
        now = time.monotonic()
        missing = self.number - len(self.starting) - len(self.idle) - len(self.busy)
        if self.idle or self.busy:
            self.alive_at = now
        elif now - self.alive_at > LOST:
            raise ClusterLost(f"no Ray actor has started for {LOST:.0f} s")
        if now - self.added_at < RESTART or (self.alive_at == now and not missing):
            return
        self.added_at = now
        if self.head_answers():
            self.add(missing)
        elif self.alive_at < now:
            raise ClusterLost("the head of the Ray cluster is gone, and all actors are")

    def head_answers(self) -> bool:
        try:
            with socket.create_connection(self.head, timeout=CONNECT):
                return True
        except OSError:
            return False


def last_line(error: Exception) -> str:
    """The last line of an error of Ray, which ends with the remote one's."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
