"""The processes of a run: who started them, and how they agree before and beside torch's process group.

They meet at a key-value store (torch's TCPStore), over which the process group is set up later: no process group yet,
so that workers can be forked without its threads. A thread of each process is the only one that talks to the store. It
also says there that its process is alive, and looks whether the others are.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes.signals import PARENT, Stop
from tabicl_train.run_dir.console import first_line, say
from tabicl_train.run_dir.liveness import is_running, machine, process_start
from tabicl_train.run_dir.lock import LostLock
from tabicl_train.workers import sendable

BEAT = 1.0  # seconds between two looks at the others
SILENT = 5.0  # seconds without a beat after which a process is suspected, once an exchange with it has failed
PATIENCE = 15.0  # seconds before the first line about a wait, as importing torch takes 5; then one every minute
GRACE = 20.0  # seconds that a process has to end by itself, once another one is gone
AGENT = -1  # in place of a rank, torchrun as the host of the store

Value = TypeVar("Value")


class Stopped(Exception):
    """A stop signal came before the processes had joined: nothing has begun."""


class ProcessLost(Exception):
    """A process of the run failed, is gone, or never came; one line that names it."""


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    launcher: torchrun, which stands for whatever sets RANK and WORLD_SIZE; srun; or plain
    local_rank, local_size: rank among, and number of, the processes of this machine
    address, port: where the first process hosts the store; port 0 is any free one
    agent: torchrun hosts the store there
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    agent: bool = False

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def problem(self, settings: TrainerConfig) -> str | None:
        """What contradicts the settings."""
        if self.size % self.local_size:
            return f"{self.launcher} started {self.size} processes, {self.local_size} here; each machine needs as many"
        pairs = {"devices": (settings.devices, self.local_size), "nodes": (settings.nodes, self.nodes)}
        for name, (configured, started) in pairs.items():
            if configured not in (None, started):
                return f"trainer.{name} is {configured}, but {self.launcher} gives {started}; leave it out"
        return None


def read_launch(settings: TrainerConfig, environ: Mapping[str, str]) -> Launch:
    """torchrun's variables win over SLURM's, which count in a step of srun with several tasks: the script of sbatch
    itself is one process, whatever the number of tasks."""
    address, port = environ.get("MASTER_ADDR"), int(environ.get("MASTER_PORT", 0))
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = int(environ["WORLD_SIZE"])
        local_size = int(environ.get("LOCAL_WORLD_SIZE") or max(1, size // (settings.nodes or 1)))
        rank, local_rank = int(environ["RANK"]), int(environ.get("LOCAL_RANK", 0))
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launch("torchrun", rank, size, local_rank, local_size, address or "127.0.0.1", port, agent)
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and tasks > 1:
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
        rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
        if address is None:
            address = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1")
        # Below the ports that the system gives away by itself; another one for another step.
        job = int(environ.get("SLURM_JOB_ID", 0)) * 7 + int(environ["SLURM_STEP_ID"])
        return Launch("srun", rank, tasks, local_rank, max(1, tasks // nodes), address, port or 15_000 + job % 15_000)
    devices, nodes = settings.devices or 1, settings.nodes or 1
    if nodes == 1:  # the variables below may be set for something else
        return Launch("plain", 0, devices, 0, devices, "127.0.0.1", 0)
    node = int(environ.get("NODE_RANK", 0))
    if not 0 <= node < nodes:
        raise ConfigError([f"NODE_RANK is {node}, and trainer.nodes is {nodes}; it must lie in 0..{nodes - 1}"])
    return Launch("plain", node * devices, devices * nodes, 0, devices, address or socket.gethostname(), port)


def first_host(hosts: str) -> str:
    """The first host of a list as SLURM writes it: gpu[03-05,09],login1."""
    prefix, bracket, rest = re.match(r"([^,\[]+)(\[?)(.*)", hosts).groups()
    return prefix + re.match(r"\w+", rest)[0] if bracket else prefix


@dataclass(frozen=True)
class Member:
    """A process of the run. machine: equal where process numbers mean the same process; started: see `liveness`"""

    host: str
    machine: str
    pid: int
    started: str | None

    @staticmethod
    def this() -> Member:
        return Member(socket.gethostname(), machine(), os.getpid(), process_start(os.getpid()))

    def lives(self) -> bool:
        return is_running(self.pid, self.started)


class Processes:
    """The processes of a run, seen from one of them.

    size, rank:             number of processes, and which this is; rank 0 is the first
    local_size, local_rank: the same of this machine
    nodes:                  machines
    store:                  torch's store that all of them reach
    """

    def __init__(self, launch: Launch, store: dist.Store, timeout: float, log: Path, line: socket.socket | None = None):
        self.launch, self.store, self.timeout = launch, store, timeout
        self.size, self.rank, self.nodes = launch.size, launch.rank, launch.nodes
        self.local_size, self.local_rank = launch.local_size, launch.local_rank
        self.log, self.line = log, line
        self.children: dict[int, subprocess.Popen] = {}  # by rank
        self.members: list[Member] = []  # by rank, once all are there
        self.calls = 0
        self.shared: Exception | None = None  # raised on all processes alike
        self.failure: tuple[int, str] | None = None  # the rank that failed first, and how
        self.store_host = AGENT if launch.agent else 0
        self.broken = False  # the store cannot be reached
        self.beats, self.contact = 0, time.monotonic()  # our beats, and the time of the last answer of the store
        self.seen: dict[int, tuple[bytes, float]] = {}  # by rank: its last beat, and when it was first seen
        self.left: set[int] = set()  # ranks that are done
        self.ending: float | None = None  # since when this process should end
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        if self.size > 1:
            self.thread = threading.Thread(target=self.talk, daemon=True)
            self.thread.start()

    def from_first(self, function: Callable[[], Value]) -> Value:
        """What `function` gives on the first process, on all of them. The others wait as long as the first one lives:
        a stop signal is noted, and a second one ends the wait.

        The result must be fit for pickle. An exception is raised on all processes; a ConfigError is printed by one.
        """
        if self.size == 1:
            return function()
        self.calls += 1
        key = f"first/{self.calls}"
        if self.rank == 0:
            try:
                value = function()
            except Exception as error:
                self.share(error)
                with contextlib.suppress(ProcessLost):
                    self.put(key, (None, sendable(error)))
                raise
            self.put(key, (value, None))
            return value
        value, error = self.take(key)
        if error is not None:
            self.share(error)
            raise error
        return value

    def share(self, error: Exception) -> None:
        self.shared = error
        if isinstance(error, ConfigError):
            error.everywhere = True

    def agree(self, problem: str | None) -> None:
        """Raises the same ConfigError on all processes, naming the ranks, if any of them has a problem."""
        call = self.calls
        if self.rank > 0:
            self.put(f"problem/{call}/{self.rank}", problem)

        def collect() -> None:
            others = [self.take(f"problem/{call}/{rank}") for rank in range(1, self.size)]
            by_problem: dict[str, list[int]] = {}
            for rank, text in enumerate([problem, *others]):
                by_problem.setdefault(text, []).append(rank)
            by_problem.pop(None, None)
            if by_problem:
                raise ConfigError([text if len(r) == self.size else text + listed(r) for text, r in by_problem.items()])

        self.from_first(collect)

    def put(self, key: str, value: Any) -> None:
        content = pickle.dumps(value)
        self.ask(lambda: self.store.set(key, content))

    def take(self, key: str) -> Any:
        """The value of a key, once it has one; raises ProcessLost when another process is gone."""
        self.until(lambda: self.ask(lambda: self.store.check([key])))
        return pickle.loads(self.ask(lambda: self.store.get(key)))

    def until(self, condition: Callable[[], bool]) -> None:
        pause = 0.005
        while not condition():
            if lost := self.lost(self.timeout):
                raise ProcessLost(lost)
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def ask(self, request: Callable[[], Value], seconds: float | None = None) -> Value:
        """The store's answer to a request; raises ProcessLost where there is none in so many seconds."""
        reply: Future = Future()
        self.requests.put((request, reply))
        try:
            return reply.result(self.timeout if seconds is None else seconds)
        except (TimeoutError, RuntimeError, OSError):
            raise ProcessLost(self.lost(0.0) or f"{self.name(self.store_host)} does not answer") from None

    def talk(self) -> None:
        """The thread's life. Once the store is gone it is left alone: torch prints a stack trace for every attempt."""
        due = time.monotonic()
        while True:
            request = reply = None
            with contextlib.suppress(queue.Empty):
                request, reply = self.requests.get(timeout=max(0.0, due - time.monotonic()))
                if request is None:
                    return
            if request is None:
                request, reply, due = self.beat, Future(), time.monotonic() + BEAT
            try:
                if self.broken or (self.line is not None and select.select([self.line], [], [], 0)[0]):
                    raise ConnectionError
                reply.set_result(request())
                self.contact = time.monotonic()
            except (RuntimeError, OSError) as error:
                self.broken = True
                reply.set_exception(error)
            self.end_if_stuck()

    def beat(self) -> None:
        """Say that this process is alive, and look whether the others are."""
        if self.failure is None and self.store.check(["failure"]):
            self.failure = tuple(json.loads(self.store.get("failure")))
        if not self.members:
            return
        self.beats += 1
        self.store.set(f"beat/{self.rank}", str(self.beats))
        others = [rank for rank in range(self.size) if rank != self.rank and rank not in self.left]
        now = time.monotonic()
        if now - self.contact > 5 * BEAT:  # this process was stopped for a while, perhaps all were
            self.seen.clear()
        watched = others if self.rank == 0 else [rank for rank in others if rank == 0]
        beats = self.store.multi_get([f"beat/{rank}" for rank in watched]) if watched else []
        for rank, beat in zip(watched, beats, strict=True):
            if beat != self.seen.get(rank, (None,))[0]:
                self.seen[rank] = beat, now
            elif self.has_left(rank):
                del self.seen[rank]
        for rank in others:
            member = self.members[rank]
            if member.machine == self.members[self.rank].machine and not member.lives() and not self.has_left(rank):
                self.claim(rank, ended(self.children[rank]) if rank in self.children else "is gone")

    def has_left(self, rank: int) -> bool:
        if self.store.check([f"left/{rank}"]):
            self.left.add(rank)
        return rank in self.left

    def claim(self, rank: int, how: str) -> None:
        """Make it known that a rank has failed, unless a failure is known already."""
        self.failure = tuple(json.loads(self.store.compare_set("failure", "", json.dumps([rank, how]))))

    def gone(self, patience: float) -> tuple[int, str] | None:
        """Another process that failed, is gone, or has not answered for `patience` seconds: its rank, and which of
        these."""
        if self.failure is not None:
            return None if self.failure[0] == self.rank else self.failure
        if not self.members:
            for rank, child in self.children.items():
                if child.poll() is not None:
                    return rank, ended(child)
        if self.broken:
            return self.store_host, "is gone"
        now = time.monotonic()
        silent = [(now - self.contact, self.store_host)]
        silent += [(now - since, rank) for rank, (_, since) in list(self.seen.items())]
        seconds, rank = max(silent)
        return (rank, f"has not answered for {seconds:.0f} s") if seconds > patience else None

    def lost(self, patience: float) -> str | None:
        """The same as a line."""
        gone = self.gone(patience)
        return f"{self.name(gone[0])} {gone[1]}; rank {self.rank} ends with it" if gone else None

    def end_if_stuck(self) -> None:
        """End a process that does not by itself, as in an exchange that waits for one that is gone."""
        lost = self.lost(self.timeout)
        if self.ending is None and lost is not None:
            self.ending = time.monotonic()
        if self.ending is not None and time.monotonic() - self.ending > GRACE:
            say(f"error: {lost or f'rank {self.rank} did not end by itself'}")
            end_now(1)

    def name(self, rank: int) -> str:
        if rank == AGENT:
            return f"torchrun at {self.launch.address}:{self.launch.port}"
        return f"rank {rank} on {self.members[rank].host}" if self.members else f"rank {rank}"

    def meet(self, stop: Stop) -> None:
        """Returns once all processes are there; raises Stopped, and ProcessLost after the time limit."""
        self.put(f"beat/{self.rank}", 0)
        self.put(f"member/{self.rank}", Member.this())
        wait = Wait(stop, self.timeout, f"{self.launch.address}:{self.launch.port}")

        def all_here() -> bool:
            keys = [f"member/{rank}" for rank in range(self.size)]
            if self.rank == 0 and self.ask(lambda: self.store.check(keys)):
                self.put("members", [pickle.loads(self.ask(lambda key=key: self.store.get(key))) for key in keys])
            if self.ask(lambda: self.store.check(["members"])):
                return True
            if wait.is_long():
                here = self.ask(lambda: [self.store.check([key]) for key in keys])
                missing = [rank for rank, came in enumerate(here) if not came]
                wait.tell(f"{len(missing)} of {self.size} processes", listed(missing), here.index(True) == self.rank)
            return False

        self.until(all_here)
        self.members = self.take("members")

    def leave(self) -> None:
        """The end of a run that this process sees through. The store's host waits for the others."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.put(f"left/{self.rank}", True)
        if self.rank == 0 and not self.launch.agent:
            self.until(lambda: self.ask(lambda: self.store.check([f"left/{rank}" for rank in range(self.size)])))

    def report(self, error: BaseException) -> BaseException:
        """What to raise in place of an error that ends this process: one line, for the whole trace is in a file."""
        self.ending = time.monotonic()
        if error is self.shared and isinstance(error, ConfigError):
            with contextlib.suppress(ProcessLost):
                self.leave()
            return error
        if error is self.shared and self.rank > 0:
            return ProcessLost(f"{self.name(0)} failed; rank {self.rank} ends with it")
        failed = self.gone(self.timeout) or (self.rank, "was stopped" if isinstance(error, Stopped) else "failed")
        if not isinstance(error, (ProcessLost, ConfigError, Stopped, LostLock)):
            where = self.keep(error)
            if gone := self.cause(error):
                failed, error = gone, ProcessLost(f"{self.name(gone[0])} {gone[1]}; rank {self.rank} ends with it")
            else:
                said = "; ".join([first_line(error), *getattr(error, "__notes__", [])])
                line = f"{self.name(self.rank)} failed: {type(error).__name__}: {said}; the whole trace is in {where}"
                error = ProcessLost(line)
        with contextlib.suppress(ProcessLost):
            self.ask(lambda: self.claim(*failed), SILENT)
        return error

    def keep(self, error: BaseException) -> Path | str:
        """Write the stack trace to this rank's file; returns where it is."""
        trace = "".join(traceback.format_exception(error))
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log, "a") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{trace}\n")
        except OSError:
            say(trace)
            return "the lines above"
        return self.log

    def cause(self, error: BaseException) -> tuple[int, str] | None:
        """The other process that an error is due to, as `gone` says it. An exchange of gradients fails before a process
        of another machine is known to be gone."""
        exchange = isinstance(error, RuntimeError) and re.search("gloo|nccl|store", str(error), re.IGNORECASE)
        deadline = time.monotonic() + (SILENT + 3 * BEAT if exchange else 0.0)
        while True:
            with contextlib.suppress(ProcessLost):
                self.ask(self.beat, SILENT)
            if gone := self.gone(SILENT if exchange else self.timeout):
                return gone
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)

    def close(self) -> None:
        if self.size > 1:
            self.requests.put((None, None))
            self.thread.join(1.0)  # it may be waiting for a host that does not answer
            if self.line is not None:
                self.line.close()
        for child in self.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
        for child in self.children.values():
            child.kill()
            child.wait()


class Wait:
    """A wait for other processes: it says so, ends with a stop signal, and gives up."""

    def __init__(self, stop: Stop, timeout: float, place: str) -> None:
        self.stop, self.timeout, self.place = stop, timeout, place
        self.started = time.monotonic()
        self.next = min(PATIENCE, timeout / 2)

    def is_long(self) -> bool:
        """Whether it is time to say so. Raises Stopped."""
        if self.stop.asked:
            raise Stopped
        return time.monotonic() - self.started >= min(self.next, self.timeout)

    def tell(self, whom: str, which: str = "", speaks: bool = True) -> None:
        seconds = time.monotonic() - self.started
        if seconds >= self.timeout:
            raise ProcessLost(f"gave up after {seconds:.0f} s: {whom}{which} did not come to {self.place}")
        self.next = seconds + 60.0
        if speaks:
            say(f"waiting for {whom} at {self.place}")


@contextlib.contextmanager
def join(settings: TrainerConfig, stop: Stop, folder: Path) -> Iterator[Processes]:
    """Find out who started this process, start the processes that are missing on this machine, and wait for all.

    Within it, an error of a process of several becomes one line, known to all of them; its stack trace goes to
    rank-N.log in `folder`. Raises Stopped, ProcessLost and ConfigError.
    """
    launch = read_launch(settings, os.environ)
    if launch.size == 1:
        processes = one_process()
        processes.agree(launch.problem(settings))
        yield processes
        return
    log = folder / f"rank-{launch.rank}.log"
    stop.waiting = "the other processes"
    try:
        launch, store, line = connect(launch, stop, settings.timeout)
        global _joined
        _joined += 1  # a process may train several times in one store
        store = dist.PrefixStore(f"tabicl_train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_joined}", store)
        processes = Processes(launch, store, settings.timeout, log, line)
        try:
            if launch.launcher == "plain":
                processes.children = start_children(launch)
            processes.meet(stop)
            stop.waiting = None
            processes.agree(launch.problem(settings))
            yield processes
            processes.leave()
        except BaseException as error:
            result = processes.report(error)
            if result is error:
                raise
            raise result from error
        finally:
            processes.close()
    finally:
        stop.waiting = None


_joined = 0


def one_process() -> Processes:
    """A run of this process alone."""
    return Processes(Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0), dist.HashStore(), 0.0, Path(os.devnull))


def connect(launch: Launch, stop: Stop, timeout: float) -> tuple[Launch, dist.Store, socket.socket | None]:
    """The store, which the first process or torchrun hosts; the launch with its port; and a second connection to its
    host, whose end tells that the host is gone."""
    if launch.rank == 0 and not launch.agent:
        try:
            store = dist.TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise ConfigError([f"the processes cannot meet at port {launch.port}: {first_line(error)}"]) from None
        return replace(launch, port=store.port), store, None
    wait = Wait(stop, timeout, f"{launch.address}:{launch.port}")
    while True:
        with contextlib.suppress(OSError):
            line = socket.create_connection((launch.address, launch.port), 5.0)
            break
        if wait.is_long():
            wait.tell(f"the first of {launch.size} processes")
        time.sleep(0.1)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError:
        raise ProcessLost(f"what answers at {wait.place} is not the first process of a run") from None
    return launch, store, line


def start_children(launch: Launch) -> dict[int, subprocess.Popen]:
    """The other processes of this machine, by rank: the same command, with torchrun's variables."""
    shared = {
        "WORLD_SIZE": launch.size,
        "LOCAL_WORLD_SIZE": launch.local_size,
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": launch.port,
        PARENT: os.getpid(),
    }
    children = {}
    for local_rank in range(1, launch.local_size):
        rank = launch.rank + local_rank
        variables = {**shared, "RANK": rank, "LOCAL_RANK": local_rank}
        children[rank] = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdin=subprocess.DEVNULL,
        )
    return children


def ended(child: subprocess.Popen) -> str:
    code = child.wait()
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_now(code: int) -> None:
    """End this process and its workers on the spot, whatever the main thread is doing."""
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(code)


def listed(ranks: list[int]) -> str:
    return f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
