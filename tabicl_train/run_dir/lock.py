"""Who may write into a run's folder: one process at a time.

The file `lock` names its owner. Its modification time is the owner's heartbeat, which the owner renews. The lock of a
process that is gone is taken over: at once where that can be seen (on this machine, or by an earlier start of the same
SLURM job or of the same run of torchrun), else when the heartbeat is old. An owner that was suspended so long that it
lost its lock finds another file in its place, and stops before it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tabicl_train.console import tell
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.liveness import elastic_run, is_running, machine, process_start

BEAT = 10.0  # seconds between two heartbeats
STALE = 120.0  # seconds after which the heartbeat of another machine is old: twelve missed ones, or a slow file server
NAME = "lock"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LostLock(Exception):
    """Another process has taken over the run's folder."""


class RunLock:
    """The lock of a run's folder: `acquire` it, `check` it before each write, and `release` it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.file: int | None = None  # the open lock file, kept open so that no other file can get its inode number
        self.on_beat: Callable[[], None] = lambda: None  # called with each heartbeat
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; raises a ConfigError that names the owner if another process holds it."""
        with exclusive(self.path.parent):
            if (owner := read_owner(self.path)) is not None:
                if is_alive(owner, self.path):
                    raise ConfigError([f"{self.path.parent} is in use: {describe(owner, self.path)}"])
                tell(f"lock      taken over from process {owner['process']} on {owner['host']}, which is gone")
            try:
                self.create()
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise ConfigError([f"{self.path} cannot be written: {error.strerror}"]) from None
                self.close()  # a full disk does not end a run
                tell(f"warning   {self.path} cannot be written ({error.strerror}): a second start would not be refused")
        self.thread = threading.Thread(target=self.renew, name="heartbeat", daemon=True)
        self.thread.start()

    def create(self) -> None:
        self.file, temporary = tempfile.mkstemp(prefix=f".{NAME}.", suffix=".tmp", dir=self.path.parent)
        try:
            os.fchmod(self.file, 0o644)  # mkstemp creates files that other users cannot read
            try:
                self.write_owner()
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
                tell(f"warning   {self.path} is empty ({error.strerror}): the lock holds, but names no process")
            os.replace(temporary, self.path)
        except OSError:
            os.unlink(temporary)
            raise

    def write_owner(self) -> None:
        assert self.file is not None
        os.pwrite(self.file, json.dumps(this_process()).encode(), 0)

    @property
    def held(self) -> bool:
        if self.file is None:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file))
        except OSError as error:  # ESTALE: a file server's word for a file that another machine has replaced
            return error.errno not in (errno.ENOENT, errno.ESTALE)

    def check(self) -> None:
        """Raises LostLock if this process is no longer the owner."""
        if not self.held:
            owner = read_owner(self.path)
            by = f"process {owner['process']} on {owner['host']}" if owner else "another process"
            raise LostLock(f"{self.path.parent} was taken over by {by}; this process stops without writing to it")

    def renew(self) -> None:
        """The thread that sends the heartbeat."""
        while not self.stopped.wait(BEAT) and self.held:
            with contextlib.suppress(OSError, LostLock):
                if self.file is not None:
                    os.utime(self.file)
                    if os.fstat(self.file).st_size == 0:  # the disk was full
                        self.write_owner()
            with contextlib.suppress(OSError, LostLock):
                self.on_beat()

    def release(self) -> None:
        self.stopped.set()
        if self.thread is not None:
            self.thread.join()
        if self.file is not None:
            with exclusive(self.path.parent):
                if self.held:
                    self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def owner_is_alive(folder: Path) -> bool:
    """Whether a process holds the lock of a run's folder, as far as this machine can see."""
    path = folder / NAME
    owner = read_owner(path)
    return owner is not None and is_alive(owner, path)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let processes of one machine look at the lock one after another, where the file system supports locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def this_process() -> dict:
    return {
        "process": os.getpid(),
        "started": process_start(os.getpid()),
        "host": socket.gethostname(),
        "machine": machine(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        "elastic": elastic_run(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def read_owner(path: Path) -> dict | None:
    """The owner of a lock, None if there is no lock. Values that the file lacks are "unknown"."""
    try:
        owner = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        owner = None
    unknown = dict.fromkeys(this_process(), "unknown")
    return unknown | owner if isinstance(owner, dict) else unknown


def is_alive(owner: dict, path: Path) -> bool:
    if owner["machine"] == machine() and isinstance(owner["process"], int):
        return is_running(owner["process"], owner["started"])
    this, restarts = this_process(), owner["restarts"]
    same_job = this["job"] is not None and owner["job"] == this["job"]
    if same_job and isinstance(restarts, int) and restarts < this["restarts"]:
        return False  # SLURM had ended it before it started the job again
    if this["elastic"] is not None and owner["elastic"] == this["elastic"]:
        return False  # torchrun has one rank 0 at a time: the owner was ended, or its machine is lost
    return heartbeat_age(path) < STALE


def describe(owner: dict, path: Path) -> str:
    line = f"process {owner['process']} on {owner['host']} has been training in it since {owner['since']}"
    if owner["machine"] == machine():
        return line
    return (
        f"{line}, last heartbeat {heartbeat_age(path):.0f} s ago; a run on another machine counts as dead after "
        f"{STALE:.0f} s"
    )


def heartbeat_age(path: Path) -> float:
    """Seconds by the clock of the file system, which is not that of this machine."""
    try:
        with tempfile.NamedTemporaryFile(prefix=f".{NAME}.", suffix=".tmp", dir=path.parent) as file:
            now = os.fstat(file.fileno()).st_mtime
    except OSError:  # a full disk, or a reader without write permission
        now = time.time()
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:  # released in the meantime
        return math.inf
