"""Who may write into a run directory: one process at a time.

The operating system holds the lock of the file `lock`, and releases it when its owner ends, however it ends.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from tabicl_train.console import info
from tabicl_train.errors import ConfigError

NAME = "lock"
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # a file system without locks
# Seconds to wait: for `is_in_use` of another process; after a restart, for the lock of a machine that has died.
TIMEOUT, RESTARTED = 1.0, 120.0


class RunLock:
    """The lock of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self.lock = FileLock(self.path, fallback_to_soft=False)

    def acquire(self) -> None:
        """Take the lock."""
        restarts = max(int(os.environ.get(f"{name}_RESTART_COUNT", 0)) for name in ("TORCHELASTIC", "SLURM"))
        try:
            self.lock.acquire(timeout=RESTARTED if restarts else TIMEOUT)
        except Timeout:
            owner = self.path.read_text().strip() or "by another process"
            raise ConfigError([f"{self.folder} is in use {owner}"]) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ConfigError([f"{self.path} cannot be locked: {error.strerror}"]) from None
            info(f"warning   {self.path} cannot be locked ({error.strerror}): a second start would not be refused")
        else:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self.path.write_text(f"by process {os.getpid()} on {socket.gethostname()} since {since}\n")

    def release(self) -> None:
        """Release the lock, if this process holds it; the file stays."""
        self.lock.release()


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the lock of a run directory; False where that cannot be seen."""
    if not (folder / NAME).exists():
        return False
    try:
        with FileLock(folder / NAME, timeout=0, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:  # a file system without locks, or a reader without write permission
        return False
