"""The lock of a run directory, so that one process at a time writes in it, and the status of the run.

The lock is one of the operating system on the file `lock`, which is released however its owner ends. status.json:

status   running, finished, preempted or failed; `read_status` returns killed for a running one whose process is gone
step     optimizer steps done
saved    optimizer steps of the newest checkpoint
time     time of the last change, at most ten seconds ago during training
host     name of the machine
process  number of the process
launch   name of the launch by the elastic agent; null for a single process
cause    why the run failed
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tabicl_train.console import info
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import naming
from tabicl_train.run.records import Records

LOCK = "lock"
STATUS = "status.json"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system without locks
TIMEOUT = 1.0  # seconds to wait for the lock, which `is_in_use` of another process may hold for a moment
RESTARTED = 120.0  # seconds to wait after a restart, when a dead machine may still hold the lock
EVERY = 10.0  # seconds between updates during training


class RunLock:
    """The lock of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK
        self.is_new = not os.path.exists(folder)
        self.lock = FileLock(self.path, fallback_to_soft=False)

    def acquire(self) -> None:
        """Take the lock, or warn if the file system has no locks; raises ConfigError if another process holds it."""
        restarts = [os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), os.environ.get("SLURM_RESTART_COUNT", 0)]
        was_restarted = any(int(count) > 0 for count in restarts)
        try:
            self.lock.acquire(timeout=RESTARTED if was_restarted else TIMEOUT)
        except Timeout:
            owner = self.path.read_text().strip() or "by another process"
            raise ConfigError([f"{self.folder} is in use {owner}"]) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ConfigError([f"{self.path} cannot be locked: {error.strerror}"]) from None
            info(f"warning   {self.path} cannot be locked ({error.strerror}); a second start would not be refused")
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with naming(self.path):
                self.path.write_text(f"by process {os.getpid()} on {socket.gethostname()} since {since}\n")

    def release(self) -> None:
        """Release the lock if this process holds it, and remove a new folder if nothing was written in it."""
        if self.is_new and self.lock.is_locked and os.listdir(self.folder) == [LOCK]:  # the run could not start
            self.path.unlink()
            self.folder.rmdir()
        self.lock.release()


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the lock of a run directory; False if that is unknown."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, timeout=0, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:  # a file system without locks, or a reader without write permission
        return False


class RunStatus:
    """Writes status.json, on rank 0 alone."""

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
            self.records.replace(STATUS, json.dumps(self.values) + "\n")

    def finish_earlier(self, step: int) -> None:
        """Write the status finished if it is not there yet."""
        if (self.records.json(STATUS) or {}).get("status") != "finished":
            self.write(status="finished", step=step, saved=step)

    def update(self, step: int) -> None:
        """Set the number of steps done, and write it every ten seconds."""
        self.values["step"] = step
        if time.monotonic() - self.written >= EVERY:
            self.write()


def written_status(folder: Path) -> dict | None:
    """Return the content of status.json; None if it is missing or is not the status of a run."""
    return Records(folder).checked_json(STATUS)


def read_status(folder: Path) -> dict | None:
    """Return the content of status.json like `written_status`, but with the status `killed` for a killed run.

    The step of a killed run is that of the last update, at most ten seconds before the kill.
    """
    values = written_status(folder)
    if values is not None and values["status"] == "running" and not is_in_use(folder):
        values["status"] = "killed"
    return values
