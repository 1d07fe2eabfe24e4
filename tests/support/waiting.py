"""Waits for other processes and threads."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "it happens", seconds: float = 60.0) -> None:
    """Wait for a condition; fails, naming what was awaited, after a time that only a broken program takes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s until {what}"
        time.sleep(0.02)
