"""status.json: what a run is doing, or how it ended.

status   running, finished, preempted or failed; `read_status` reports a running one whose process is gone as killed
step     optimizer steps done
saved    those of the newest checkpoint
time     of the last change; during training it is at most ten seconds old
host, process
launch   the elastic agent's name of the launch; null for a single process
cause    of a failed run
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tabicl_train.run_dir.lock import is_in_use
from tabicl_train.run_dir.records import Records

NAME = "status.json"
EVERY = 10.0  # seconds between updates during training


class RunStatus:
    """Writes status.json, on rank 0 alone; a callback of the training loop."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.values: dict[str, Any] = {
            "status": "running",
            "step": 0,
            "saved": 0,
            "time": "",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
            "cause": None,
        }
        self.written = 0.0
        self.writing = threading.Lock()  # checkpoints are saved in a thread

    def write(self, **values: Any) -> None:
        """Change values and write the file."""
        with self.writing:
            self.values |= values | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            self.written = time.monotonic()
            self.records.replace(NAME, json.dumps(self.values) + "\n")

    def finish_earlier(self, step: int) -> None:
        """Note that the run has finished, if a kill has prevented that before."""
        if (self.records.json(NAME) or {}).get("status") != "finished":
            self.write(status="finished", step=step, saved=step)

    def on_train_batch_end(self, step: int, **_) -> None:
        self.values["step"] = step
        if time.monotonic() - self.written >= EVERY:
            self.write()


def read_status(folder: Path) -> dict | None:
    """The content of status.json, None if there is none. The status of a run that was killed is `killed`.

    Its step is then that of the last update: up to ten seconds of training may have followed.
    """
    values = Records(folder).json(NAME)
    if values is not None and values.get("status") == "running" and not is_in_use(folder):
        values["status"] = "killed"
    return values
