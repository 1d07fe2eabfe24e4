"""Tables drawn by the actors of a Ray cluster, ahead of training.

An actor holds the stream and draws a step by its number. Ray restarts lost actors and repeats their calls. The training
process gives the next steps to idle actors, at most `stream.prefetch` for each actor, and takes the items in order.
Ray's errors become WorkerDied if a step kills every actor that draws it, or TablesUnavailable if the cluster is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import time
from typing import Any

import torch

from tabicl_train.config.schema import StreamConfig
from tabicl_train.console import first_line, info
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError, install, is_installed, picklable
from tabicl_train.signals import Stop
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import POLL, Content, Loader, TablesUnavailable, WorkerDied, packed, unpacked

PATIENCE = 300.0  # seconds to wait for one step, less than trainer.timeout: Ray waits forever for a free CPU
CONNECT = 5.0  # seconds in which the head of a cluster must answer
RETRIES = 3  # how often Ray repeats a call; without a limit, a step that needs too much memory would go on forever
ENVIRONMENT = {
    # Seconds after which Ray ends a process if the head is gone. A validation may take longer than the default, 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Ray listens on all network interfaces, and whoever sends it a request can run code. Since 2.52 it can require a token,
# which it keeps in the home folder; since 2.59 it does so by default.
NEW_CLUSTER = {"RAY_AUTH_MODE": "token"}


def ray_problems(stream: StreamConfig) -> list[str]:
    """List why Ray cannot draw the tables of a run with stream=ray."""
    if not is_installed("ray"):
        return [f"stream=ray needs Ray: {install('ray', 'ray')}"]
    if stream.address is None:
        return []
    try:
        connect_to(stream.address)
    except OSError as error:
        return [f"stream.address is {stream.address!r}; no Ray cluster answers there ({error})"]
    return []


def connect_to(head: str) -> None:
    """Raise OSError if the head of a Ray cluster does not answer at HOST:PORT."""
    host, _, port = head.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT).close()


class Drawer:
    """The actor.

    Parameters
    ----------
    sent : list
        The plug-ins of the training process, from `plugins.sent`.
    stream : bytes
        The stream, pickled separately since unpickling it needs the plug-ins.
    folder : str
        The working directory of the run, where the actor works if its machine has it.
    """

    def __init__(self, sent: list[tuple[plugins.Plugin, list[bytes] | None]], stream: bytes, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
        # As in workers: sums of several threads are rounded differently.
        torch.set_num_threads(1)
        plugins.receive(sent)
        self.stream: StepStream = pickle.loads(stream)

    def draw(self, step: int) -> Content:
        try:
            item = self.stream.draw(step)
        except (Exception, SystemExit) as error:
            raise picklable(error)  # noqa: B904 - it is the same error in most cases
        # Ray shares arrays without copying.
        return packed(item)


class RayLoader(Loader):
    """The items of a stream, in order, drawn by Ray actors.

    Nothing happens before `start`, which connects to the cluster or starts Ray on this machine. `close` ends the
    actors, and also Ray if `start` has started it.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        # Without workers, since `take` asks actors instead.
        super().__init__(stream, StreamConfig(num_workers=0), device)
        self.config = config
        self.drawers = config.workers
        self.ray: Any = None  # imported by `start`
        self.idle: list[Any] = []  # actors
        self.busy: dict[Any, Any] = {}  # actors, by the reference to what they will return
        self.references: dict[int, Any] = {}  # to the items of steps that were handed out and not yet taken, by step

    def start(self, first: int | None = None, stop: Stop | None = None) -> None:
        """Start drawing at step `first`, by default the first step of the stream."""
        # Variables that Ray reads when it is imported or started; those of the user win.
        super().start(first, stop)
        self.undrawn = self.stream.steps.start
        environment = dict(ENVIRONMENT)
        # Ray reads the mode of a new cluster when it is imported.
        if self.config.address is None and "ray" not in sys.modules:
            environment |= NEW_CLUSTER
        os.environ |= {name: value for name, value in environment.items() if name not in os.environ}
        sent = plugins.sent()
        import ray

        # Connect, or start Ray.
        try:
            connect_to_ray(self.config)
        except SystemExit:
            # Ray raises it on SIGTERM while it connects.
            if stop is not None:
                stop.handle(signal.SIGTERM)
                return
            raise
        except Exception as error:
            # Ray does not document the types.
            raise ConfigError([f"stream=ray: {first_line(error)}"]) from None

        # Start the actors, each on a CPU, spread over the machines.
        self.ray = ray
        self.head = ray.get_runtime_context().gcs_address
        kind = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES, scheduling_strategy="SPREAD")(Drawer)
        # Ray's pickle takes classes of the main script, too.
        stream = ray.cloudpickle.dumps(self.stream)
        for _ in range(self.drawers):
            actor: Any = kind.remote(sent, stream, os.getcwd())
            self.busy[actor.__ray_ready__.remote()] = actor

    def take(self, step: int) -> StepItem:
        """Wait for the item of a step; steps are taken in order.

        Raises
        ------
        WorkerDied
            If the step has killed the actors that drew it.
        TablesUnavailable
            If the cluster is gone, an actor cannot be started, or nothing has come for PATIENCE seconds.
        Exception
            Any error of the prior, and that of `check_stop` after a stop signal.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            # Keep the actors busy, and see whether the item is drawn.
            self.hand_out(step)
            finished = self.collect(0.0 if self.is_drawn(step) else POLL)
            if self.is_drawn(step):
                # If an item of another machine takes longer than `get` waits, signals and the head are checked first.
                with contextlib.suppress(self.ray.exceptions.GetTimeoutError):
                    item = unpacked(*self.get(step))
                    del self.references[step]
                    self.hand_out(step + 1)
                    return item
            # Otherwise find out whether waiting makes sense.
            self.check_stop()
            if not finished:
                self.check_head()
            if time.monotonic() > deadline:
                raise TablesUnavailable(f"no Ray actor drew step {step} in {PATIENCE:.0f} s; each needs a free CPU")

    def is_drawn(self, step: int) -> bool:
        return step in self.references and self.references[step] not in self.busy

    def hand_out(self, due: int) -> None:
        """Give steps to idle actors; step `due` is taken next."""
        end = min(due + self.config.prefetch * self.drawers, self.stream.steps.stop)
        while self.idle and self.undrawn < end:
            actor = self.idle.pop()
            reference = actor.draw.remote(self.undrawn)
            self.references[self.undrawn] = reference
            self.busy[reference] = actor
            self.undrawn += 1

    def collect(self, seconds: float) -> bool:
        """Wait up to `seconds` for actors to finish, mark finished ones as idle, and return whether there are any."""
        if not self.busy or not self.ray.wait(list(self.busy), timeout=seconds)[0]:
            return False
        for reference in self.ray.wait(list(self.busy), num_returns=len(self.busy), timeout=0)[0]:
            self.idle.append(self.busy.pop(reference))
        return True

    def get(self, step: int) -> Content:
        """Return the item of a step, still packed, or raise the error of its actor.

        Raises
        ------
        WorkerDied
            If the step has killed the actors that drew it.
        TablesUnavailable
            If the cluster is gone, or an actor cannot be started.
        GetTimeoutError
            If it has not arrived after POLL seconds; this is an error of Ray.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.get(self.references[step], timeout=POLL)
        except errors.GetTimeoutError:  # which is a RayError, too
            raise
        except errors.RayTaskError as error:
            # The actor lives, and has raised this.
            raise error.cause from error
        except errors.RayError as error:
            # One of three things has happened: the head is gone, the step has ended each actor that tried it, or no
            # actor can be started.
            self.check_head()
            if isinstance(error, (errors.ActorUnavailableError, errors.OutOfMemoryError)):
                where = f"step {step}, seed {self.stream.seed} (out of memory?)"
                raise WorkerDied(f"{RETRIES + 1} Ray actors ended, one after another, while drawing {where}") from error
            last = str(error).strip().splitlines()[-1]
            raise TablesUnavailable(f"a Ray actor cannot be started: {last}") from error

    def check_head(self) -> None:
        """Raise TablesUnavailable if the head of the cluster does not answer; Ray would wait for it forever."""
        try:
            connect_to(self.head)
        except OSError as error:
            raise TablesUnavailable(f"the head of the Ray cluster, {self.head}, is gone ({error})") from None

    def close(self) -> None:
        """End the actors, and Ray's own processes if `start` has started them."""
        if self.ray is not None:
            # Stop the thread that pins items: if it asked for another one, it would start Ray again.
            self.stop = Stop()
            self.stop.signaled_at = 0.0
            if hasattr(self.items, "close"):
                self.items.close()
            self.ray.shutdown()


def connect_to_ray(config: StreamConfig) -> None:
    """Join the cluster, or start Ray on this machine with a CPU for each actor, and warn if it needs no token."""
    import ray

    cluster_options: dict[str, Any] = {}
    if config.address is None:
        cluster_options = {"num_cpus": config.workers, "num_gpus": 0, "include_dashboard": False}
    # Ray replaces the handler of SIGTERM.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=config.address or "local",
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **cluster_options,
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    if config.address is None and not asks_for_token():
        info(
            "warning   Ray listens on all network interfaces of this machine without a token, so whoever reaches its "
            "ports can run code here; install Ray 2.52 or newer, and leave RAY_AUTH_MODE unset"
        )


def asks_for_token() -> bool:
    """Whether Ray, if started by this process, accepts only requests with the token of its user."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:  # before Ray 2.52
        return False
    return is_token_auth_enabled()
