"""Stop signals, obeyed at the end of a step, and processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME = 1.0  # seconds in which a second signal counts as the first one: launchers repeat what their group gets
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


class Stop:
    """Whether the process was asked to stop, by a signal or a time limit."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.limit = math.inf  # seconds after which the process stops as if it had received a signal
        self.first: float | None = None  # when the first signal came
        self.cause = "trainer.max_hours"  # or the name of the signal

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.first is not None or time.monotonic() - self.started >= self.limit

    def handle(self, number: int, _: object = None) -> None:
        """Note the first signal, as a signal handler; a second one ends the process at once."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.cause = now, signal.Signals(number).name
            if int(os.environ.get("RANK", 0)) == 0:  # os.write, as print is not safe in a handler
                line = f"stop      {self.cause}: stopping after this step; signal again to kill\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode())
        elif now - self.first >= SAME:
            for worker in multiprocessing.active_children():
                with contextlib.suppress(OSError, AttributeError):
                    worker.kill()
            os._exit(128 + number)


_active: Stop | None = None


@contextlib.contextmanager
def watch_signals() -> Iterator[Stop]:
    """Let stop signals be noted within the context, instead of ending the process.

    To be used in the main thread. Nested contexts share the outermost one's Stop.
    """
    global _active
    if _active is not None:
        yield _active
        return
    stop = _active = Stop()
    handlers = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _active = None


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent is gone, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before that
            os.kill(os.getpid(), signal.SIGKILL)
