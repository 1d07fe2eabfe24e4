"""Whether another process of this machine is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path


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
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it is there, and somebody else's
        return "unknown"
    return None if fields[0] in "ZX" else fields[19]
