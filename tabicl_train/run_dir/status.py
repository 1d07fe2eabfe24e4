"""status.json: what a run is doing, or how it ended.

status   running, finished, preempted or failed; read back, also killed: it says running, and the process is gone
step     optimiser steps done
time     of the last heartbeat, every ten seconds while the run is trained
host, process
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.records import Records

NAME = "status.json"


class RunStatus:
    """Writes status.json.

    step: gives the optimiser steps done
    writes: whether this process is the one that does
    """

    def __init__(self, records: Records, step: Callable[[], int], writes: bool = True) -> None:
        self.records, self.step, self.writes = records, step, writes
        self.status = ""
        self.writing = threading.Lock()

    def write(self, status: str) -> None:
        self.status = status
        self.beat()

    def beat(self) -> None:
        """Renew step and time; from another thread, too."""
        if not self.writes:
            return
        with self.writing:
            values = {
                "status": self.status,
                "step": self.step(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "host": socket.gethostname(),
                "process": os.getpid(),
            }
            self.records.replace(NAME, json.dumps(values) + "\n")


def read_status(folder: Path) -> dict | None:
    """The content of status.json, in which the status of a run that was killed is `killed`; None where there is none.

    Its step is that of the last heartbeat then: up to ten seconds of training may have followed.
    """
    values = Records(folder).json(NAME)
    if values is not None and values.get("status") == "running" and not owner_is_alive(folder):
        values["status"] = "killed"
    return values
