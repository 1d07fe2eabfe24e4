"""Watches whether the processes of a run are alive.

Each process increments a counter in the store every second. Rank 0 watches all counters, and every other rank watches
that of rank 0. Processes on the same machine also look up each other's process numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tabicl_train.console import say
from tabicl_train.processes.launch import Launch, describe_exit
from tabicl_train.processes.signals import end_now
from tabicl_train.run_dir.liveness import is_running, machine, process_start

BEAT = 1.0  # seconds between two heartbeats
SILENT = 5.0  # seconds without a heartbeat after which a process is suspected, once an exchange with it has failed
GRACE = 20.0  # seconds that this process has to end on its own, once another one is lost
AGENT = -1  # stands for torchrun in place of a rank, where torchrun hosts the store

Value = TypeVar("Value")


class ProcessLost(Exception):
    """A process of the run failed, is gone, or never came; one line that names it."""


@dataclass(frozen=True)
class Member:
    """A process of the run.

    machine: equal where equal process numbers mean the same process
    started: when the process began, see `liveness.process_start`
    """

    host: str
    machine: str
    pid: int
    started: str | None

    @staticmethod
    def this() -> Member:
        return Member(socket.gethostname(), machine(), os.getpid(), process_start(os.getpid()))

    def is_alive(self) -> bool:
        return is_running(self.pid, self.started)


class Failure(NamedTuple):
    """A rank that failed or is gone, and what happened to it."""

    rank: int
    what: str


class Watch:
    """Talks to the store from a thread of its own, sends heartbeats, and looks for lost processes.

    connection: a connection to the host of the store that carries nothing; once it can be read, the host is gone
    """

    def __init__(
        self, launch: Launch, store: dist.Store, timeout: float, connection: socket.socket | None = None
    ) -> None:
        self.launch, self.store, self.timeout, self.connection = launch, store, timeout, connection
        self.rank, self.store_host = launch.rank, AGENT if launch.agent else 0
        self.children: dict[int, subprocess.Popen] = {}  # by rank
        self.members: list[Member] = []  # by rank, once all have joined
        self.failure: Failure | None = None  # the first one of the run
        self.store_is_lost = False
        self.beats, self.contact = 0, time.monotonic()  # heartbeats sent; time of the store's last answer
        self.seen: dict[int, tuple[bytes, float]] = {}  # by rank: its last heartbeat, and when it was first seen
        self.left: set[int] = set()  # ranks that have finished
        self.ending_since: float | None = None  # when this process began to end
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        if launch.size > 1:
            self.thread.start()

    def ask(self, request: Callable[[], Value], seconds: float | None = None) -> Value:
        """The store's answer to a request; raises ProcessLost without an answer in `seconds` (the run's timeout)."""
        answer: Future = Future()
        self.requests.put((request, answer))
        try:
            return answer.result(self.timeout if seconds is None else seconds)
        except (TimeoutError, RuntimeError, OSError):
            line = self.lost_line(0.0) or f"{self.name(self.store_host)} does not answer"
            raise ProcessLost(line) from None

    def run(self) -> None:
        """The thread. Once the store is lost it is left alone: torch prints a stack trace for every attempt."""
        due = time.monotonic()
        while True:
            request = answer = None
            with contextlib.suppress(queue.Empty):
                request, answer = self.requests.get(timeout=max(0.0, due - time.monotonic()))
                if request is None:
                    return
            if request is None:
                request, answer, due = self.beat, Future(), time.monotonic() + BEAT
            try:
                if self.store_is_lost or (self.connection and select.select([self.connection], [], [], 0)[0]):
                    raise ConnectionError
                answer.set_result(request())
                self.contact = time.monotonic()
            except (RuntimeError, OSError) as error:
                self.store_is_lost = True
                answer.set_exception(error)
            self.end_if_stuck()

    def close(self) -> None:
        """End the thread."""
        if self.launch.size > 1:
            self.requests.put((None, None))
            self.thread.join(1.0)  # it may be waiting for a host that does not answer
            if self.connection is not None:
                self.connection.close()

    def beat(self) -> None:
        """Send a heartbeat, and look whether the other processes are alive. Runs in the thread."""
        if self.failure is None and self.store.check(["failure"]):
            self.failure = Failure(*json.loads(self.store.get("failure")))
        if not self.members:
            return
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))
        remaining = [rank for rank in range(self.launch.size) if rank != self.rank and rank not in self.left]
        now = time.monotonic()
        if now - self.contact > 5 * BEAT:  # this process was suspended for a while, perhaps all were
            self.seen.clear()
        watched = remaining if self.rank == 0 else [rank for rank in remaining if rank == 0]
        beats = self.store.multi_get([f"beat/{rank}" for rank in watched]) if watched else []
        for rank, beat in zip(watched, beats, strict=True):
            if beat != self.seen.get(rank, (None,))[0]:
                self.seen[rank] = beat, now
            elif self.has_left(rank):
                del self.seen[rank]
        for rank in remaining:
            member = self.members[rank]
            same_machine = member.machine == self.members[self.rank].machine
            if same_machine and not member.is_alive() and not self.has_left(rank):
                child = self.children.get(rank)
                self.record(Failure(rank, "is gone" if child is None else describe_exit(child.wait())))

    def has_left(self, rank: int) -> bool:
        if self.store.check([f"left/{rank}"]):
            self.left.add(rank)
        return rank in self.left

    def record(self, failure: Failure) -> None:
        """Make a failure known to all processes, unless another one is known already. Runs in the thread."""
        self.failure = Failure(*json.loads(self.store.compare_set("failure", "", json.dumps(failure))))

    def announce(self, failure: Failure) -> None:
        """Have the thread record a failure, if the store still answers."""
        with contextlib.suppress(ProcessLost):
            self.ask(lambda: self.record(failure), SILENT)

    def find_lost(self, patience: float) -> Failure | None:
        """Another process that failed, is gone, or has not answered for `patience` seconds."""
        if self.failure is not None:
            return None if self.failure.rank == self.rank else self.failure
        if not self.members:
            for rank, child in self.children.items():
                if child.poll() is not None:
                    return Failure(rank, describe_exit(child.wait()))
        if self.store_is_lost:
            return Failure(self.store_host, "is gone")
        now = time.monotonic()
        silences = [(now - self.contact, self.store_host)]
        silences += [(now - since, rank) for rank, (_, since) in list(self.seen.items())]
        seconds, rank = max(silences)
        return Failure(rank, f"has not answered for {seconds:.0f} s") if seconds > patience else None

    def lost_line(self, patience: float) -> str | None:
        """The line with which this process ends if `find_lost` finds one."""
        lost = self.find_lost(patience)
        return None if lost is None else self.ends_with(lost)

    def ends_with(self, lost: Failure) -> str:
        return f"{self.name(lost.rank)} {lost.what}; rank {self.rank} ends with it"

    def find_cause(self, error: BaseException) -> Failure | None:
        """The other process that an error of this one is due to, if any.

        An exchange of gradients fails before a process of another machine is known to be gone, so this waits for the
        next heartbeats in that case.
        """
        exchange = isinstance(error, RuntimeError) and re.search("gloo|nccl|store", str(error), re.IGNORECASE)
        deadline = time.monotonic() + (SILENT + 3 * BEAT if exchange else 0.0)
        while True:
            with contextlib.suppress(ProcessLost):
                self.ask(self.beat, SILENT)
            if lost := self.find_lost(SILENT if exchange else self.timeout):
                return lost
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)

    def end_if_stuck(self) -> None:
        """End a process that does not end on its own, such as one in an exchange with a process that is gone."""
        lost = self.lost_line(self.timeout)
        if self.ending_since is None and lost is not None:
            self.ending_since = time.monotonic()
        if self.ending_since is not None and time.monotonic() - self.ending_since > GRACE:
            say(f"error: {lost or f'rank {self.rank} did not end on its own'}")
            end_now(1)

    def name(self, rank: int) -> str:
        if rank == AGENT:
            return f"torchrun at {self.launch.address}:{self.launch.port}"
        return f"rank {rank} on {self.members[rank].host}" if self.members else f"rank {rank}"
