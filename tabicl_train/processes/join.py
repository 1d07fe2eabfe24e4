"""How the processes of a run find each other: the missing ones of this machine are started, and all of them meet."""

from __future__ import annotations

import contextlib
import os
import socket
import time
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
        log = folder / f"rank-{launch.rank}.log"
        processes = Processes(launch, own_part(store), settings.timeout, log, connection)
        try:
            if launch.launcher == "plain":
                processes.watch.children = start_children(launch)
            meet(processes, stop)
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


_joined = 0  # trainings that this process has joined; it may train several times with one store


def own_part(store: dist.Store) -> dist.Store:
    """A part of the store for this training alone."""
    global _joined
    _joined += 1
    return dist.PrefixStore(f"tabicl_train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_joined}", store)


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


def meet(processes: Processes, stop: Stop) -> None:
    """Wait until all processes have joined; raises Stopped, and ProcessLost after the time limit."""
    launch, size, rank = processes.launch, processes.size, processes.rank
    processes.put(f"beat/{rank}", 0)
    processes.put(f"member/{rank}", Member.this())
    wait = Wait(stop, processes.timeout, f"{launch.address}:{launch.port}")
    keys = [f"member/{number}" for number in range(size)]

    def all_have_joined() -> bool:
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
