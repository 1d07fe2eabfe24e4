"""Whether another process of a run is still running."""

from __future__ import annotations

import os
import socket
from pathlib import Path

UNKNOWN = "unknown"


def machine() -> str:
    """Equal for two processes that see each other: same machine, same boot, and same namespace of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def elastic_run() -> str | None:
    """torchrun's name of the run (--rdzv-id) that this process belongs to, equal before and after its restarts.

    None without torchrun, and for a run without a name, which torchrun calls "none".
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name


def process_start(process: int) -> str | None:
    """When a process began, which distinguishes it from a later one with the same number; None if it is gone.

    A zombie, which has ended and keeps its number until its parent has waited for it, counts as gone.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is no /proc, or processes of other users are hidden
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it runs, and belongs to another user
        return UNKNOWN
    return None if fields[0] in "ZX" else fields[19]


def is_running(process: int, started: str | None) -> bool:
    """Whether the process that began at that time is running. If its start cannot be seen, it counts as that one."""
    return process_start(process) in (started, UNKNOWN) if started is not None else False
