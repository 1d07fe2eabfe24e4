"""Whether another process of this machine is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path

UNKNOWN = "unknown"


def machine() -> str:
    """Equal where two processes can see each other: one boot of one machine, and one space of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_start(process: int) -> str | None:
    """When a process began, which tells it from a later one of the same number; None if it is gone.

    One that has ended, and keeps its number until its parent has noticed, is gone.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # where there is no /proc, or others' processes are hidden
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it is there, and somebody else's
        return UNKNOWN
    return None if fields[0] in "ZX" else fields[19]


def is_running(process: int, started: str | None) -> bool:
    """Whether the process that began then is there; one whose beginning cannot be seen is taken for it."""
    return process_start(process) in (started, UNKNOWN) if started is not None else False
