"""Stop signals, noticed at once and obeyed at the end of a step.

Python's own handlers run only when the main thread returns to the interpreter, which may not happen while it waits for
another process. The wake-up descriptor is written at the C level without that delay, and a thread reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from tabicl_train.console import say

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds in which a second signal counts as the first one: torchrun forwards what its whole process group gets.
SAME = 1.0
NOTICED = 3.0  # seconds in which torchrun notices a new machine: it looks once a second
PARENT = "TABICL_TRAIN_PARENT"  # environment variable: number of the process that started this one
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def end_now(code: int) -> None:
    """End this process and its workers immediately, whatever the main thread is doing."""
    for worker in multiprocessing.active_children():
        if worker.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(worker.pid, signal.SIGKILL)  # the kill() of loky's processes raises AttributeError
    os._exit(code)


class Stop:
    """Whether the process was asked to stop; a second signal ends it at once."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.limit = math.inf  # seconds after the start at which the process stops as if it had got a signal
        self.first: float | None = None  # when the first signal came
        self.number: int | None = None
        self.waiting: str | None = None  # what the process waits for before it trains; a signal ends this wait at once

    @property
    def asked(self) -> bool:
        return self.first is not None or time.monotonic() - self.started >= self.limit

    def notice(self, number: int, now: float) -> None:
        if self.first is None:
            self.first, self.number = now, number
            stopping = "stopping after this step; signal again to kill"
            reaction = f"no longer waiting for {self.waiting}" if self.waiting else stopping
            say(f"stop      {signal.Signals(number).name}: {reaction}")
        elif now - self.first >= SAME:
            end_now(128 + number)

    def listen(self, wakeups: int) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while data := os.read(wakeups, 1):
                if data[0] in SIGNALS:
                    self.notice(data[0], time.monotonic())


def wait_for_torchrun(stop: Stop) -> None:
    """Before a stopped process ends under torchrun on several machines: wait for torchrun's own signal, if none came.

    torchrun stops its processes when a machine has come, on each machine at another moment, up to a second apart.
    Processes that have ended with 0 by then, since those of the first machine told them to stop, would look finished,
    and their machine would leave the run.
    """
    deadline = time.monotonic() + NOTICED
    while int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1 and stop.first is None and time.monotonic() < deadline:
        time.sleep(0.05)


def die_with_launcher() -> None:
    """Have this process killed when the torchrun or the process of this program that started it is gone: a rank left
    alone would wait for the others, and keep its devices."""
    if PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(int(os.environ.get(PARENT, os.getppid())))


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent is gone; the parent's main thread must have started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before that
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=end_after, args=(parent,), daemon=True).start()


def end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


_active: Stop | None = None


@contextlib.contextmanager
def watch_signals() -> Iterator[Stop]:
    """Within the context stop signals do not end the process. Nested contexts share the outermost one's Stop.

    To be used in the main thread.
    """
    global _active
    if _active is not None:
        yield _active
        return
    stop = _active = Stop()
    wakeups, write_end = os.pipe()
    os.set_blocking(write_end, False)
    descriptor = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    thread = threading.Thread(target=stop.listen, args=(wakeups,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        os.close(write_end)
        thread.join(1.0)  # a worker may still hold the write end open
        _active = None
