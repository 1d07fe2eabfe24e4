"""Stop signals, noticed at once and acted on at the end of a step.

Python's own handlers wait until the main thread returns to the interpreter, which it does not while it waits for
another process; the C level's wake-up descriptor does not wait, and a thread reads it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds in which a second signal counts as the first one: torchrun passes on what a whole process group gets anyway.
SAME = 1.0


class Stop:
    """Whether the process was told to stop; a second signal ends it on the spot."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first: float | None = None  # when the first signal came
        self.number: int | None = None

    @property
    def asked(self) -> bool:
        return self.first is not None

    def notice(self, number: int, now: float) -> None:
        if self.first is None:
            self.first, self.number = now, number
            print(f"stop      {signal.Signals(number).name}: after this step; once more stops at once", file=sys.stderr)
        elif now - self.first >= SAME:
            for worker in multiprocessing.active_children():
                worker.kill()
            os._exit(128 + number)

    def listen(self, wakeups: int) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while data := os.read(wakeups, 1):
                if data[0] in SIGNALS:
                    self.notice(data[0], time.monotonic())


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
