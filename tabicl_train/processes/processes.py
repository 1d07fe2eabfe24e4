"""How the processes of a run agree, before and beside torch's process group.

They meet at a key-value store (torch's TCPStore), over which the process group is set up later. Until then there is no
process group, so that workers can be forked without its threads.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from tabicl_train.errors import ConfigError, picklable
from tabicl_train.processes.launch import Launch
from tabicl_train.processes.watch import Failure, ProcessLost, Watch

Value = TypeVar("Value")


class Processes:
    """The processes of a run, as one of them sees them.

    size, rank:             number of processes, and the rank of this one
    local_size, local_rank: the same on this machine
    nodes:                  number of machines
    store:                  torch's store, which all processes reach
    log:                    file for the stack trace of an error of this process
    """

    def __init__(
        self, launch: Launch, store: dist.Store, timeout: float, log: Path, connection: socket.socket | None = None
    ) -> None:
        self.launch, self.store, self.timeout, self.log = launch, store, timeout, log
        self.size, self.rank, self.nodes = launch.size, launch.rank, launch.nodes
        self.local_size, self.local_rank = launch.local_size, launch.local_rank
        self.watch = Watch(launch, store, timeout, connection)
        self.calls = 0  # of from_first
        self.common_error: Exception | None = None  # raised on all processes alike

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Call `function` on rank 0, and return its result on all processes.

        The others wait as long as rank 0 is alive: they note a stop signal, and a second one ends the wait. The result
        must be picklable. An exception is raised on all processes; a ConfigError is printed by one of them.
        """
        if self.size == 1:
            return function()
        self.calls += 1
        key = f"first/{self.calls}"
        if self.rank == 0:
            try:
                value = function()
            except Exception as error:
                self.mark_common(error)
                with contextlib.suppress(ProcessLost):
                    self.put(key, (None, picklable(error)))
                raise
            self.put(key, (value, None))
            return value
        value, error = self.take(key)
        if error is not None:
            self.mark_common(error)
            raise error
        return value

    def mark_common(self, error: Exception) -> None:
        self.common_error = error
        if isinstance(error, ConfigError):
            error.everywhere = self.size > 1

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, in the order of their ranks, on all processes; they must be picklable."""
        call = self.calls
        if self.rank > 0:
            self.put(f"gathered/{call}/{self.rank}", value)
        return self.from_first(lambda: [value, *(self.take(f"gathered/{call}/{rank}") for rank in range(1, self.size))])

    def agree(self, problem: str | None) -> None:
        """If any process has a problem, raise the same ConfigError on all of them, naming the ranks concerned."""
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(self.gather(problem)):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        if ranks:
            error = ConfigError([text if len(r) == self.size else text + listed(r) for text, r in ranks.items()])
            self.mark_common(error)
            raise error

    def put(self, key: str, value: Any) -> None:
        """Store a value under a key, for all processes."""
        content = pickle.dumps(value)
        self.watch.ask(lambda: self.store.set(key, content))

    def has(self, *keys: str) -> bool:
        """Whether all these keys have a value."""
        return self.watch.ask(lambda: self.store.check(list(keys)))

    def get(self, key: str) -> Any:
        """The value of a key that has one."""
        return pickle.loads(self.watch.ask(lambda: self.store.get(key)))

    def take(self, key: str) -> Any:
        """Wait until a key has a value, and return it; raises ProcessLost when another process is lost."""
        self.until(lambda: self.has(key))
        return self.get(key)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raises ProcessLost when another process is lost."""
        pause = 0.005
        while not condition():
            if lost := self.watch.lost_line(self.timeout):
                raise ProcessLost(lost)
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def cause(self, error: BaseException) -> str:
        """What has ended the training with this error, in one line: another process that is gone, or this one."""
        lost = None
        if self.size > 1 and error is not self.common_error:
            lost = self.watch.find_lost(self.timeout) or self.watch.find_cause(error)
        rank, what = lost or Failure(self.rank, "failed")
        return f"{self.watch.name(rank)} {what}"

    def leave(self) -> None:
        """Finish on this process, without an error. The host of the store waits for the others."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.put(f"left/{self.rank}", True)
        if self.rank == 0 and not self.launch.agent:
            self.until(lambda: self.has(*(f"left/{rank}" for rank in range(self.size))))

    def close(self) -> None:
        self.watch.close()
        for child in self.watch.children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
        for child in self.watch.children.values():
            child.kill()
            child.wait()


def listed(ranks: list[int]) -> str:
    return f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
