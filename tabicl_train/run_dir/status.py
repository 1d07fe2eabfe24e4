"""status.json: what a run is doing, or how it ended.

status   running, finished, preempted or failed; `read_status` reports a running one whose process is gone as killed
step     optimiser steps done
time     of the last heartbeat, which comes every ten seconds during training
host, process
elastic  torchrun's name of the run, see `liveness.elastic_run`
cause    of a failed run: which process failed or is gone
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tabicl_train.run_dir.liveness import elastic_run
from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.records import Records

NAME = "status.json"


class RunStatus:
    """Writes status.json.

    step: returns the optimiser steps done
    writes: whether this process writes it
    """

    def __init__(self, records: Records, step: Callable[[], int], writes: bool = True) -> None:
        self.records, self.step, self.writes = records, step, writes
        self.status = ""
        self.cause: str | None = None
        self.writing = threading.Lock()

    def write(self, status: str, cause: str | None = None) -> None:
        self.status, self.cause = status, cause
        self.beat()

    def beat(self) -> None:
        """Renew step and time; may be called from another thread."""
        if not self.writes:
            return
        with self.writing:
            values = {
                "status": self.status,
                "step": self.step(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "host": socket.gethostname(),
                "process": os.getpid(),
                "elastic": elastic_run(),
                "cause": self.cause,
            }
            self.records.replace(NAME, json.dumps(values) + "\n")


def read_status(folder: Path) -> dict | None:
    """The content of status.json, None if there is none. The status of a run that was killed is `killed`.

    Its step is then that of the last heartbeat: up to ten seconds of training may have followed.
    """
    values = Records(folder).json(NAME)
    if values is not None and values.get("status") == "running" and not owner_is_alive(folder):
        values["status"] = "killed"
    return values
