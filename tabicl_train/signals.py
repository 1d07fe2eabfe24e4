"""Stop signals, which take effect at the end of a step, and processes that end together with their parent."""

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

from tabicl_train.console import info, is_first

# A terminal sends SIGHUP when it is closed. Batch systems announce a time limit by SIGTERM, SIGUSR1 or SIGUSR2 (SLURM,
# LSF, Grid Engine) or SIGXCPU (for CPU time).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SAME = 1.0  # seconds in which a repeated signal is ignored: launchers forward signals that the whole group receives
PR_SET_PDEATHSIG = 1  # from Linux, prctl(2)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop this process: all SIGNALS except those that it was started to ignore (nohup)."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Stop:
    """Whether the process was asked to stop, by a signal or a time limit."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.limit = math.inf  # seconds after which the process stops as if it had received a signal
        self.signaled_at: float | None = None  # time.monotonic() at the first signal
        self.cause = "trainer.max_hours"  # or the name of the signal

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self.signaled_at is not None or time.monotonic() - self.started >= self.limit

    def handle(self, number: int, _: object = None) -> None:
        """Handle a signal: record the first one; a second one ends the process and its workers immediately."""
        now = time.monotonic()
        if self.signaled_at is None:
            self.signaled_at = now
            self.cause = signal.Signals(number).name
            if is_first():  # os.write, since print is not safe in a signal handler
                line = f"stop      {self.cause}: stopping after this step; signal again to kill\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode())
        # A second signal: the workers ignore it, so they are killed here.
        elif now - self.signaled_at >= SAME:
            for worker in multiprocessing.active_children():
                with contextlib.suppress(OSError, AttributeError):
                    worker.kill()
            os._exit(128 + number)


_active: Stop | None = None


@contextlib.contextmanager
def watch_signals() -> Iterator[Stop]:
    """Record stop signals in the main thread instead of ending the process; nested contexts share one Stop."""
    global _active
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread only
        info("warning   this is not the main thread: stop signals are not watched, and do not end the run")
        yield Stop()
        return
    if _active is not None:
        yield _active
        return
    stop = _active = Stop()
    handlers = {number: signal.signal(number, stop.handle) for number in stop_signals()}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _active = None


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent had already ended
            os.kill(os.getpid(), signal.SIGKILL)
