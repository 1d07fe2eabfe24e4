"""Real jobs of a sweep in forked processes: a new Python takes 5 CPU seconds to import everything."""

import os
import signal
from pathlib import Path

import forked
import pytest

from tabicl_train.sweep.executors import local


class ForkedProcess:
    """What the executor uses of subprocess.Popen."""

    def __init__(self, arguments: list[str], threads: int, log: str, folder: str) -> None:
        env = {"OMP_NUM_THREADS": str(threads)}
        self.process = forked.start(in_folder, folder, *arguments, stderr=log, env=env)
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def in_folder(folder: str, *arguments: str) -> None:
    os.chdir(folder)
    forked.train(*arguments)


def start_process(arguments, threads, folder, log, gpus=None):
    assert arguments[1] == "-c" and gpus is None
    return ForkedProcess(arguments[3:], threads, log, folder)


@pytest.fixture
def forked_jobs(monkeypatch):
    monkeypatch.setattr(local, "start_process", start_process)


def kill(run_dir: Path) -> None:
    """Kill the process that trains in a folder."""
    from tabicl_train.run_dir.status import read_status

    os.kill(read_status(run_dir)["process"], signal.SIGKILL)
