import errno
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tabicl_train.errors import ConfigError
from tabicl_train.run_dir import lock as run_lock
from tabicl_train.run_dir.lock import BEAT, STALE, LostLock, RunLock, owner_is_alive, this_process
from tabicl_train.run_dir.records import Records


def write_lock(folder: Path, age: float = 0.0, **values) -> None:
    """A lock of some other process, with its last heartbeat so many seconds ago."""
    path = folder / "lock"
    path.write_text(json.dumps(this_process() | values))
    os.utime(path, (time.time() - age, time.time() - age))


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def test_a_second_start_names_the_first(tmp_path):
    first = RunLock(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=rf"{tmp_path} is in use: process {os.getpid()} on \S+ has been training"):
        RunLock(tmp_path).acquire()
    assert owner_is_alive(tmp_path)
    first.release()
    assert not owner_is_alive(tmp_path) and os.listdir(tmp_path) == []
    RunLock(tmp_path).acquire()


@pytest.mark.multi_process
def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, capsys):
    write_lock(tmp_path, process=ended_process())
    assert not owner_is_alive(tmp_path)
    RunLock(tmp_path).acquire()
    assert "which is gone" in capsys.readouterr().err


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path):
    write_lock(tmp_path, started="1")
    RunLock(tmp_path).acquire()


@pytest.mark.multi_process
def test_a_process_that_has_ended_and_was_not_waited_for_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        write_lock(tmp_path, process=zombie.pid, started=this_process()["started"])
        assert not owner_is_alive(tmp_path)


def test_another_machine_counts_as_dead_when_its_heartbeat_is_old(tmp_path):
    other = {"machine": "other", "host": "other", "process": 7}
    write_lock(tmp_path, age=STALE - 30, **other)
    with pytest.raises(ConfigError, match=r"process 7 on other .* last heartbeat (89|9\d) s ago; .* 120 s"):
        RunLock(tmp_path).acquire()
    write_lock(tmp_path, age=STALE + 1, **other)
    RunLock(tmp_path).acquire()


def test_a_slurm_job_that_starts_again_takes_over_at_once(tmp_path, monkeypatch):
    write_lock(tmp_path, machine="other", job="11", restarts=0)
    for job, restarts in (("12", "1"), ("11", "0")):  # another job, and another step of the same one
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        with pytest.raises(ConfigError, match="is in use"):
            RunLock(tmp_path).acquire()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunLock(tmp_path).acquire()


def test_a_restart_of_the_same_run_of_torchrun_takes_over_at_once(tmp_path, monkeypatch):
    """The machine of its rank 0 may be lost. Another run, and one without a name, wait."""
    for owner, this in (("a", "b"), ("a", None), ("none", "none"), ("unknown", None)):
        write_lock(tmp_path, machine="other", elastic=None if owner == "none" else owner)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if this is not None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", this)
        with pytest.raises(ConfigError, match="is in use"):
            RunLock(tmp_path).acquire()
    write_lock(tmp_path, machine="other", elastic="a")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    RunLock(tmp_path).acquire()


@pytest.mark.parametrize("lacks", ["restarts", "process", "host", "machine", "job", "since"])
def test_a_lock_of_this_slurm_job_that_lacks_a_value_holds_until_it_is_old(lacks, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    owner = this_process() | ({} if lacks == "process" else {"machine": "other"})
    (tmp_path / "lock").write_text(json.dumps({key: value for key, value in owner.items() if key != lacks}))
    with pytest.raises(ConfigError, match="is in use: process"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "lock", (0, 0))
    RunLock(tmp_path).acquire()


def test_two_steps_of_one_slurm_job_do_not_take_over_from_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    RunLock(tmp_path).acquire()
    with pytest.raises(ConfigError, match="is in use"):
        RunLock(tmp_path).acquire()


def test_a_process_that_has_lost_its_lock_does_not_write(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    records = Records(tmp_path, lock.check)
    records.append_rows("metrics.csv", {"step": 1})
    write_lock(tmp_path, host="other", process=7)
    os.replace(tmp_path / "lock", tmp_path / "moved")  # as another machine does it: a new file in its place
    (tmp_path / "lock").write_bytes((tmp_path / "moved").read_bytes())
    with pytest.raises(LostLock, match="was taken over by process 7 on other"):
        records.append_rows("metrics.csv", {"step": 2})
    lock.release()
    assert (tmp_path / "lock").exists() and len(records.rows("metrics.csv")) == 1
    (tmp_path / "lock").unlink()
    with pytest.raises(LostLock, match="another process"):
        RunLock.check(_lost(tmp_path))


def _lost(folder: Path) -> RunLock:
    lock = RunLock(folder)
    lock.acquire()
    lock.path.unlink()
    return lock


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"process": 7}'])
def test_a_lock_that_cannot_be_read_holds_until_it_is_old(content, tmp_path):
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ConfigError, match="is in use: process"):
        RunLock(tmp_path).acquire()
    os.utime(tmp_path / "lock", (0, 0))
    RunLock(tmp_path).acquire()


def test_the_heartbeat_renews_the_lock_and_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.001)
    lock, beaten = RunLock(tmp_path), threading.Event()
    lock.acquire()
    os.utime(tmp_path / "lock", (0, 0))
    lock.on_beat = beaten.set
    assert beaten.wait(60) and run_lock.heartbeat_age(tmp_path / "lock") < BEAT
    lock.release()


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_without_space_for_its_content_a_lock_is_empty_and_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "BEAT", 0.001)
    lock, beaten = RunLock(tmp_path), threading.Event()
    lock.on_beat = beaten.set
    with monkeypatch.context() as full_disk:
        full_disk.setattr(run_lock.os, "pwrite", refuse)
        lock.acquire()
        assert "lock is empty (No space left on device)" in capsys.readouterr().err
        assert beaten.wait(60)  # the heartbeat goes on
        assert (tmp_path / "lock").read_bytes() == b""
        lock.check()
        assert owner_is_alive(tmp_path)
        with pytest.raises(ConfigError, match="is in use: process unknown"):
            RunLock(tmp_path).acquire()
    deadline = time.monotonic() + 60
    while not (tmp_path / "lock").read_bytes():  # named once there is space
        assert time.monotonic() < deadline
    assert run_lock.read_owner(tmp_path / "lock")["process"] == os.getpid()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_disk_without_space_for_a_lock_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock.tempfile, "mkstemp", refuse)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert "lock cannot be written (No space left on device)" in capsys.readouterr().err
    lock.check()
    lock.release()
    assert os.listdir(tmp_path) == []


def take(folder: Path, start, winners) -> None:
    start.wait()
    lock = RunLock(folder)
    try:
        lock.acquire()
    except ConfigError:
        return
    winners.put(os.getpid())
    start.wait()  # until all have tried


@pytest.mark.multi_process
def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path):
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        write_lock(tmp_path, process=ended_process())
        start, winners = context.Barrier(2), context.Queue()
        several = [context.Process(target=take, args=(tmp_path, start, winners)) for _ in range(2)]
        for process in several:
            process.start()
        winner = winners.get(timeout=60)
        loser = next(p for p in several if p.pid != winner)
        loser.join(60)
        assert winners.empty()
        for process in several:
            process.kill()
            process.join()


@pytest.mark.parametrize(("number", "held"), [(errno.ESTALE, False), (errno.ENOENT, False), (errno.EIO, True)])
def test_what_a_file_server_answers(number, held, tmp_path, monkeypatch):
    lock = RunLock(tmp_path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(run_lock.os, "fstat", lambda _: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        assert lock.held == held
    lock.release()


def test_a_lock_that_is_released_meanwhile_is_no_obstacle(tmp_path):
    assert run_lock.heartbeat_age(tmp_path / "lock") == math.inf
