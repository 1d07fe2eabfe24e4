"""Stop signals, noticed at once and acted on at the end of a step.

Python's own handlers wait until the main thread returns to the interpreter, which it does not while it waits for
another process; the C level's wake-up descriptor does not wait, and a thread reads it.
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

from tabicl_train.run_dir.console import say

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds in which a second signal counts as the first one: torchrun passes on what a whole process group gets anyway.
SAME = 1.0
PARENT = "TABICL_TRAIN_PARENT"  # the environment's name for the number of the process that started this one
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


class Stop:
    """Whether the process was told to stop; a second signal ends it on the spot."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.limit = math.inf  # seconds after the start, at which the process is to stop as if it had got a signal
        self.first: float | None = None  # when the first signal came
        self.number: int | None = None
        self.waiting: str | None = None  # what the process waits for before it trains; a signal ends that at once

    @property
    def asked(self) -> bool:
        return self.first is not None or time.monotonic() - self.started >= self.limit

    def notice(self, number: int, now: float) -> None:
        if self.first is None:
            self.first, self.number = now, number
            later = "stopping after this step; signal again to kill"
            then = f"no longer waiting for {self.waiting}" if self.waiting else later
            say(f"stop      {signal.Signals(number).name}: {then}")
        elif now - self.first >= SAME:
            for worker in multiprocessing.active_children():
                worker.kill()
            os._exit(128 + number)

    def listen(self, wakeups: int) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while data := os.read(wakeups, 1):
                if data[0] in SIGNALS:
                    self.notice(data[0], time.monotonic())


def die_with_launcher() -> None:
    """End this process with torchrun, or with the process of this program, that started it: a rank on its own would
    wait for the others, and keep its devices."""
    if PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(int(os.environ.get(PARENT, os.getppid())))


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent is gone, whose main thread must be the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before that
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
    """Within it stop signals do not end the process; nested uses are the outermost one. Only in the main thread."""
    global _active
    if _active is not None:
        yield _active
        return
    stop = _active = Stop()
    wakeups, written = os.pipe()
    os.set_blocking(written, False)
    descriptor = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    thread = threading.Thread(target=stop.listen, args=(wakeups,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        os.close(written)
        thread.join(1.0)  # the other end of the pipe may still be open in a worker
        _active = None
