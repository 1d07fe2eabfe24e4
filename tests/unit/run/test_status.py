"""Who may write into a run directory; the lock itself is the operating system's."""

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from command_line import command
from forked import start_process, train_command, wait_for_exit_code
from waiting import until

from priors.dummy import Dummy
from tabicl_train.errors import ConfigError
from tabicl_train.run import status as run_lock
from tabicl_train.run.status import RunLock, is_in_use
from tabicl_train.stream import workers

SETTINGS = ("experiment=smoke", "prior=dummy", "trainer.accelerator=cpu", "stream.num_workers=0")


@pytest.fixture
def held(tmp_path):
    """A run directory in use, and its lock; its file is dated in the future, as by a machine whose clock is wrong."""
    lock = RunLock(tmp_path)
    lock.acquire()
    os.utime(tmp_path / "lock", (time.time() + 1e6,) * 2)
    yield lock
    lock.release()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "TIMEOUT", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_second_start_names_the_first(held):
    with pytest.raises(ConfigError, match=rf"^{held.folder} is in use by process {os.getpid()} on \S+ since 2\S+ \S+$"):
        RunLock(held.folder).acquire()
    assert is_in_use(held.folder) and not is_in_use(held.folder / "other")
    held.release()
    assert not is_in_use(held.folder)
    RunLock(held.folder).acquire()


@pytest.mark.usefixtures("impatient")
def test_a_second_start_ends_with_2_and_one_line_and_changes_nothing(held):
    before = {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in held.folder.rglob("*") if f.is_file()}
    result = command("train", *SETTINGS, f"run_dir={held.folder}")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {held.folder} is in use by process ")
    assert result.stderr.count("\n") == 1
    assert before == {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in held.folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_waits_for_the_lock_of_a_machine_that_has_died(name, held, monkeypatch):
    monkeypatch.setenv(name, "1")
    waits, acquire = threading.Event(), run_lock.FileLock.acquire

    def wait(self, timeout):
        assert timeout == 120.0
        waits.set()
        return acquire(self, timeout=timeout)

    monkeypatch.setattr(run_lock.FileLock, "acquire", wait)
    later, got = RunLock(held.folder), []
    thread = threading.Thread(target=lambda: (later.acquire(), got.append(later.lock.is_locked)))
    thread.start()
    assert waits.wait(60) and thread.is_alive()
    held.release()
    thread.join(60)
    assert got == [True]


def train_with_a_lasting_worker(*settings: str) -> None:
    """The worker draws one table for ever, and outlives its process, as where there is no PR_SET_PDEATHSIG."""
    plan = Dummy.plan

    def stay(self, spec, address):
        if address[1] == 3:
            time.sleep(600)
        return plan(self, spec, address)

    Dummy.plan, workers.die_with_parent = stay, lambda parent: None
    train_command(*settings)


@pytest.mark.usefixtures("impatient")
def test_the_lock_of_a_killed_process_is_free_at_once_although_its_worker_lives(tmp_path):
    """Workers are forked before the lock is taken, and so have no descriptor of it."""
    run = tmp_path / "run"
    settings = [*SETTINGS[:-1], "stream.num_workers=1", "trainer.log_every=1", f"run_dir={run}"]
    process = start_process(train_with_a_lasting_worker, *settings)
    until(lambda: (run / "metrics.csv").exists() and (run / "metrics.csv").read_text().count("\n") == 4, seconds=300)
    assert is_in_use(run)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    try:
        os.kill(process.pid, signal.SIGKILL)
        assert wait_for_exit_code(process) == -signal.SIGKILL
        os.kill(int(worker), 0)  # it is there
        assert not is_in_use(run)
        RunLock(run).acquire()
    finally:
        os.kill(int(worker), signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(number, tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = RunLock(tmp_path)
    lock.acquire()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning   {tmp_path}/lock cannot be locked ({os.strerror(number)}); ")
    lock.release()
    assert not is_in_use(tmp_path)
