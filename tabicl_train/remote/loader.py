"""Tables drawn by the actors of a Ray cluster, ahead of training.

Beside the training process runs another one, the relay. It gives each idle actor the next step (seed and number are all
that it needs), under the same bounds as for workers, and passes the items on in order, as a worker does. A step whose
actor is lost is given to another one, and a new actor is started.

Ray ends a process that has lost the head of its cluster for a minute. That is why the training process, which never
imports Ray, is not that process: it notices that the relay is gone, and wakes workers that it has forked at the start.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from tabicl_train.config.schema import StreamConfig
from tabicl_train.console import counted, first_line, tell
from tabicl_train.processes.failures import Stopped
from tabicl_train.processes.launch import describe_exit
from tabicl_train.processes.signals import SIGNALS, Stop
from tabicl_train.remote.actors import Actors, ClusterLost
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.workers import CONTEXT, Ahead, Loader, WorkerDied, accept, answer_of, memory_file, send

POLL = 0.05  # seconds between looks at what the training process has taken
MEMORY = 2**27  # least bytes of an object store; Ray's own limit is 75 MiB
END = 20.0  # seconds in which the relay must end; on a free core it takes two
# What Ray would say, ask or start. The variables are read when it is imported.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayLoader(Loader):
    """The items of a stream, in order, drawn by Ray actors, and by local workers when the cluster is lost.

    As for `Loader`, the constructor must run in the main thread. Raises the error of a prior, and WorkerDied for a step
    that several actors have not survived.
    """

    def __init__(
        self, stream: StepStream, config: StreamConfig, device: torch.device | None = None, local_ranks: int = 1
    ) -> None:
        """local_ranks: training processes on this machine, among which the local workers divide its cores"""
        super().__init__(stream, config.local(local_ranks), device, stand_by=True)
        self.actors = config.workers
        self.active, self.ready, self.closing = True, False, False  # whether the relay draws, has started, is ended
        # Sockets lie below this folder, and their paths may have 107 characters. Ray's default folder would make this
        # instance the one that other programs find.
        self.folder = None if config.address else tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self.output = memory_file()
        self.connection, relay_end = CONTEXT.Pipe()
        inherited = [self.connection, *(worker.connection for worker in self.workers)]
        args = (stream, config, relay_end, inherited, os.getpid(), self.output, self.folder)
        self.relay = CONTEXT.Process(target=relay, args=args, daemon=True)
        self.relay.start()
        relay_end.close()

    @property
    def drawers(self) -> int:
        return self.actors if self.active else len(self.workers)

    def problem(self, stop: Stop) -> str | None:
        stop.waiting = "the Ray cluster"
        try:
            while self.relay.is_alive() and not self.connection.poll(0.1):
                if stop.asked:
                    raise Stopped
            problems, lines = self.connection.recv()
            self.ready = True
        except (EOFError, OSError):
            return f"stream=ray cannot start: {self.end_of_relay()}"
        finally:
            stop.waiting = None
        if not problems:
            for line in lines:
                tell(line)
        return "; ".join(f"stream=ray: {problem}" for problem in problems) or None

    def take(self, step: int) -> StepItem:
        if not self.active:
            return super().take(step)
        answer = answer_of(self.relay, self.connection)
        if answer is None and self.closing:
            raise WorkerDied("the relay has been ended")
        if answer is None or isinstance(answer[1], ClusterLost):
            self.fall_back(step, str(answer[1]) if answer else self.end_of_relay())
            return super().take(step)
        if answer[1] is None and answer[2]:
            tell(f"stream    {answer[2]}")
        return accept(answer, step, [self.connection])

    def fall_back(self, step: int, reason: str) -> None:
        """Have the workers that stand by draw the steps from this one on."""
        self.active = False
        self.stream = replace(self.stream, steps=range(step, self.stream.steps.stop))
        for worker in self.workers:
            with contextlib.suppress(OSError):  # a dead worker is noticed when its step is due
                worker.connection.send(step)
        tell(f"warning   {reason}; {counted(len(self.workers), 'worker')} of this machine draw from step {step} on")

    def end_of_relay(self) -> str:
        """How the relay ended, in words, and the last that Ray said."""
        self.relay.join()
        assert self.relay.exitcode is not None  # as it has ended
        self.output.seek(0)
        said = self.output.read().decode(errors="replace").strip().splitlines()
        return f"the process that talks to Ray {describe_exit(self.relay.exitcode)}" + (
            f" ({said[-1]})" if said else ""
        )

    def close(self) -> None:
        """End the relay, which ends its actors, and Ray's own processes where it has started them."""
        super().close()
        self.closing = True
        if self.ready:
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self.relay.join(END)
        self.relay.kill()
        assert self.relay.pid is not None  # as it has been started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.relay.pid, signal.SIGKILL)  # Ray's own processes, if it has not ended them
        self.relay.join()
        self.connection.close()
        self.output.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def relay(
    stream: StepStream,
    config: StreamConfig,
    connection: Connection,
    inherited: list[Connection],
    parent: int,
    output: IO[bytes],
    folder: str | None,
) -> None:
    """What the relay does: it sends (problems, lines for the user), then items in order, until it receives None, or
    until the training process is gone.

    inherited: connections of other processes, copied by the fork
    output: gets what Ray prints; folder: for the files of an instance of its own
    """
    threading.Thread(target=end_after, args=(parent, END), daemon=True).start()
    os.setsid()  # Ray's processes stay in its group: a signal to the group of the run must not end them
    signal.set_wakeup_fd(-1)
    ignore_stop_signals()
    for other in inherited:
        other.close()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    torch.set_num_threads(1)
    os.environ |= QUIET
    import ray

    try:
        connect(ray, config, folder)
    except Exception as error:  # of any kind: Ray documents none
        where = "Ray does not start on this machine" if config.address is None else f"stream.address={config.address}"
        connection.send(([f"{where}: {first_line(error)}"], []))
        return
    ignore_stop_signals()  # again: Ray has a handler of its own
    with contextlib.suppress(EOFError, ConnectionError):  # the training process is gone
        try:
            actors = Actors(ray, stream, config.workers)
            problems, lines = actors.start()
            connection.send((problems, lines))
            if not problems:
                pass_on(actors, stream, config, connection)
        except ClusterLost as lost:
            connection.send((None, lost, ""))
    ray.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def end_after(parent: int, seconds: float) -> None:
    """End this process some time after its parent, if it has not ended Ray and itself by then."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_stop_signals() -> None:
    """The training process decides when the relay ends. Unlike SIG_IGN, a handler is not handed down to what it starts,
    which Ray ends by SIGTERM."""
    for stop in SIGNALS:
        signal.signal(stop, lambda *_: None)


def connect(ray: Any, config: StreamConfig, folder: str | None) -> None:
    """Join the cluster, or start an instance on this machine that has a CPU for each actor."""
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if config.address is not None:
        ray.init(address=config.address, **quiet)
        return
    memory = None if math.isinf(config.prefetch_gib) else max(MEMORY, int(config.prefetch_gib * 2**30))
    ray.init(
        address="local",
        num_cpus=config.workers,
        num_gpus=0,
        object_store_memory=memory,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        # Ray puts this path into a shell command as it is.
        runtime_env={"py_executable": shlex.quote(sys.executable)} if " " in sys.executable else None,
        **quiet,
    )


def pass_on(actors: Actors, stream: StepStream, config: StreamConfig, connection: Connection) -> None:
    """Have the steps drawn, within the bounds, and send them in order; until the training process has had enough."""
    ahead = Ahead(stream, config)
    due = unsent = undrawn = stream.steps.start
    ready: dict[int, tuple[str, Any]] = {}
    while True:
        while connection.poll(0 if actors.busy or actors.starting else POLL):
            if (due := connection.recv()) is None:
                return
        actors.keep_up()
        while actors.idle and actors.lost_steps:
            actors.draw(heapq.heappop(actors.lost_steps))
        while actors.idle and undrawn < stream.steps.stop and ahead.allows(undrawn, due):
            actors.draw(undrawn)
            undrawn += 1
        for step, host, answer in actors.collect(POLL):
            ready[step] = host, answer
        while unsent in ready and unsent < due + config.prefetch:  # the rest waits in Ray's object store
            host, (content, arrays, error, trace) = ready.pop(unsent)
            if error is None:
                send(connection, content, arrays, actors.take_news())
            else:
                connection.send((None, error, f"in a Ray actor on {host}:\n{trace}"))
            unsent += 1
