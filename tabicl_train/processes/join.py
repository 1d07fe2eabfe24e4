"""How the processes of a run find each other: the missing ones of this machine are started, and all of them meet."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import first_line, say
from tabicl_train.errors import ConfigError
from tabicl_train.processes.failures import Stopped, report
from tabicl_train.processes.launch import Launch, read_launch, start_children
from tabicl_train.processes.processes import Processes, listed
from tabicl_train.processes.signals import Stop
from tabicl_train.processes.watch import Member, ProcessLost

PATIENCE = 15.0  # seconds before the first line about a wait, as importing torch takes 5; then one every minute


@contextlib.contextmanager
def join(settings: TrainerConfig, stop: Stop, folder: Path) -> Iterator[Processes]:
    """Find out how this process was started, start the missing processes of this machine, and wait for all.

    With several processes, an error within the context becomes one line, known to all of them; its stack trace goes to
    rank-N.log in `folder`. Raises Stopped, ProcessLost and ConfigError.
    """
    launch = read_launch(settings, os.environ)
    if launch.size == 1:
        processes = one_process()
        processes.agree(launch.problem(settings))
        yield processes
        return
    stop.waiting = "the other processes"
    try:
        launch, store, connection = connect(launch, stop, settings.timeout)
        lobby = Lobby(launch, store, Wait(stop, settings.timeout, f"{launch.address}:{launch.port}"))
        log = folder / f"rank-{launch.rank}.log"
        processes = Processes(launch, lobby.enter(), settings.timeout, log, connection)
        try:
            if launch.launcher == "plain":
                processes.watch.children = start_children(launch)
            meet(processes, stop, lobby)
            stop.waiting = None
            processes.agree(launch.problem(settings))
            yield processes
            processes.leave()
        except BaseException as error:
            result = report(processes, error)
            if result is error:
                raise
            raise result from error
        finally:
            processes.close()
    finally:
        stop.waiting = None


def one_process() -> Processes:
    """A run of this process alone."""
    return Processes(Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0), dist.HashStore(), 0.0, Path(os.devnull))


def connect(launch: Launch, stop: Stop, timeout: float) -> tuple[Launch, dist.Store, socket.socket | None]:
    """Open the store, which rank 0 or torchrun hosts.

    Returns the launch with its real port, the store, and a second connection to its host, which ends when the host is
    gone. Raises ConfigError, Stopped and ProcessLost.
    """
    if launch.rank == 0 and not launch.agent:
        try:
            store = dist.TCPStore("127.0.0.1", launch.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise ConfigError([f"the processes cannot meet at port {launch.port}: {first_line(error)}"]) from None
        return replace(launch, port=store.port), store, None
    wait = Wait(stop, timeout, f"{launch.address}:{launch.port}")
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((launch.address, launch.port), 5.0)
            break
        if wait.is_long():
            wait.announce(f"the first of {launch.size} processes")
        time.sleep(0.1)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError:
        raise ProcessLost(f"what answers at {wait.place} is not the first process of a run") from None
    return launch, store, connection


def meet(processes: Processes, stop: Stop, lobby: Lobby | None = None) -> None:
    """Wait until all processes have joined; raises Stopped, and ProcessLost after the time limit.

    lobby: where rank 0 answers the others meanwhile
    """
    launch, size, rank = processes.launch, processes.size, processes.rank
    processes.put(f"beat/{rank}", 0)
    processes.put(f"member/{rank}", Member.this())
    wait = Wait(stop, processes.timeout, f"{launch.address}:{launch.port}")
    keys = [f"member/{number}" for number in range(size)]

    def all_have_joined() -> bool:
        if rank == 0 and lobby is not None:
            processes.watch.ask(lobby.answer)
        if rank == 0 and processes.has(*keys):
            processes.put("members", [processes.get(key) for key in keys])
        if processes.has("members"):
            return True
        if wait.is_long():
            joined = [processes.has(key) for key in keys]
            missing = [number for number, has_joined in enumerate(joined) if not has_joined]
            what = f"{len(missing)} of {size} processes"
            wait.announce(what, listed(missing), is_speaker=joined.index(True) == rank)
        return False

    processes.until(all_have_joined)
    processes.watch.members = processes.take("members")


class Lobby:
    """Where the processes of a training get their own part of a store that may have served other trainings.

    torchrun keeps its store when it starts the processes again, and no variable of it numbers these restarts: a machine
    that was replaced counts from 0, and a machine that has come or gone is not counted. So rank 0 numbers the
    trainings, and answers every process at a key that this process alone has made up.
    """

    def __init__(self, launch: Launch, store: dist.Store, wait: Wait) -> None:
        self.launch, self.store, self.wait = launch, dist.PrefixStore("tabicl_train", store), wait
        self.number = ""

    def enter(self) -> dist.Store:
        """The part of the store for this training alone; raises Stopped and ProcessLost."""
        try:
            self.number = str(self.store.add("trainings", 1)) if self.launch.rank == 0 else self.ask()
        except RuntimeError:
            raise ProcessLost(f"what answered at {self.wait.place} is gone") from None
        return dist.PrefixStore(self.number, self.store)

    def ask(self) -> str:
        key = f"answer/{uuid.uuid4().hex}"
        self.store.set(f"question/{self.launch.rank}", key)
        while not self.store.check([key]):
            if self.wait.is_long():
                first_waiting = self.launch.local_rank == 0 or self.launch.rank == 1
                self.wait.announce(f"the first of {self.launch.size} processes", is_speaker=first_waiting)
            time.sleep(0.05)
        return self.store.get(key).decode()

    def answer(self) -> None:
        """Answer all who have asked, on rank 0. Questions of earlier trainings are answered too: nobody reads that."""
        questions = [f"question/{rank}" for rank in range(1, self.launch.size)]
        for question in questions:
            if self.store.check([question]):
                self.store.set(self.store.get(question).decode(), self.number)


class Wait:
    """A wait for other processes: it prints a line now and then, ends with a stop signal, and has a time limit."""

    def __init__(self, stop: Stop, timeout: float, place: str) -> None:
        self.stop, self.timeout, self.place = stop, timeout, place
        self.started = time.monotonic()
        self.next_line = min(PATIENCE, timeout / 2)  # seconds after the start

    def is_long(self) -> bool:
        """Whether it is time for the next line. Raises Stopped."""
        if self.stop.asked:
            raise Stopped
        return time.monotonic() - self.started >= min(self.next_line, self.timeout)

    def announce(self, what: str, ranks: str = "", is_speaker: bool = True) -> None:
        """Print what is awaited, on one process; raises ProcessLost after the time limit."""
        seconds = time.monotonic() - self.started
        if seconds >= self.timeout:
            raise ProcessLost(f"gave up after {seconds:.0f} s: {what}{ranks} did not come to {self.place}")
        self.next_line = seconds + 60.0
        if is_speaker:
            say(f"waiting for {what} at {self.place}")
