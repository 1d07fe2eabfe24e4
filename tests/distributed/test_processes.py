"""Processes that join, agree, and lose each other: here they are threads with a common store."""

import contextlib
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from meeting import free_port
from waiting import until

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes import watch
from tabicl_train.processes.failures import Stopped, report
from tabicl_train.processes.join import Lobby, Wait, join, meet
from tabicl_train.processes.launch import Launch
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.signals import Stop
from tabicl_train.processes.watch import Member, ProcessLost


@contextlib.contextmanager
def joined(tmp_path: Path, size: int = 3, timeout: float = 60.0):
    """Processes with a common store, as threads of this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [Launch("torchrun", rank, size, rank, size, "127.0.0.1", store.port) for rank in range(size)]
    members = [
        Processes(launch, dist.PrefixStore("run", store.clone()), timeout, tmp_path / f"rank-{launch.rank}.log")
        for launch in launches
    ]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda p: meet(p, Stop()), members))
        yield members, lambda act: [future(threads, act, p) for p in members]
        for p in members:
            p.close()


def future(threads: ThreadPoolExecutor, act: Callable, processes: Processes):
    return threads.submit(act, processes)


def test_all_get_the_result_of_the_first_or_its_error(tmp_path):
    calls = []

    def first(rank):
        calls.append(rank)
        return {"from": rank}

    def refuse():
        raise ConfigError(["a", "b"])

    with joined(tmp_path) as (_, on_all):
        assert [f.result() for f in on_all(lambda p: p.from_first(lambda: first(p.rank)))] == [{"from": 0}] * 3
        assert calls == [0]
        errors = [f.exception() for f in on_all(lambda p: p.from_first(refuse))]
        assert [e.problems for e in errors] == [["a", "b"]] * 3
        errors = [f.exception() for f in on_all(lambda p: p.from_first(lambda: 1 // 0))]
        assert [type(e) for e in errors] == [ZeroDivisionError] * 3


def test_a_problem_of_one_process_is_raised_on_all_and_names_its_rank(tmp_path):
    with joined(tmp_path) as (_, on_all):
        assert [f.result() for f in on_all(lambda p: p.agree(None))] == [None] * 3
        errors = [f.exception() for f in on_all(lambda p: p.agree(None if p.rank < 1 else "no disk"))]
        assert [str(e) for e in errors] == ["no disk (ranks 1, 2)"] * 3
        errors = [f.exception() for f in on_all(lambda p: p.agree("no disk" if p.rank < 2 else "no luck"))]
        assert [e.problems for e in errors] == [["no disk (ranks 0, 1)", "no luck (rank 2)"]] * 3
        errors = [f.exception() for f in on_all(lambda p: p.agree("no disk"))]
        assert [str(e) for e in errors] == ["no disk"] * 3


def test_others_wait_as_long_as_the_first_lives(tmp_path):
    with joined(tmp_path, size=2, timeout=2.0) as ((first, second), on_all):

        def long_work():
            started, beats = time.monotonic(), first.watch.beats
            until(lambda: time.monotonic() > started + 3.0 and first.watch.beats > beats + 1)
            return "done"

        assert [f.result() for f in on_all(lambda p: p.from_first(long_work))] == ["done"] * 2
        first.watch.requests.put((None, None))  # its thread ends, as with the process
        with pytest.raises(ProcessLost, match=r"rank 0 on .* has not answered for \d s; rank 1 ends with it"):
            second.take("never")


def test_a_process_that_has_left_is_not_missed(tmp_path):
    with joined(tmp_path, size=2) as ((first, second), _):
        second.leave()
        second.close()
        beats = first.watch.beats
        until(lambda: first.watch.beats > beats + 3)
        assert first.watch.find_lost(2.5 * watch.BEAT) is None


@pytest.mark.multi_process
def test_a_process_that_is_gone_is_named_on_the_others(tmp_path):
    with joined(tmp_path) as (members, on_all):
        with subprocess.Popen(["true"]) as gone:
            pass
        for processes in members:
            processes.watch.members[1] = replace(Member.this(), pid=gone.pid)
        waiting = [f.exception() for f in on_all(lambda p: p.take("never") if p.rank != 1 else None)]
        assert [str(e) for e in waiting] == [f"rank 1 on {socket.gethostname()} is gone; rank {n} ends with it"
                                             if n != 1 else "None" for n in range(3)]  # fmt: skip


@pytest.mark.multi_process
def test_a_process_that_cannot_end_by_itself_is_ended(tmp_path, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(watch, "GRACE", 0.1)
    monkeypatch.setattr(watch, "end_now", ended.append)
    with joined(tmp_path, size=2) as ((first, _), _), subprocess.Popen(["true"]) as gone:
        gone.wait()
        first.watch.members[1] = replace(Member.this(), pid=gone.pid)
        until(lambda: ended)  # while this thread waits for something else
    assert ended[0] == 1
    assert f"error: rank 1 on {socket.gethostname()} is gone; rank 0 ends with it\n" in capfd.readouterr().err


def test_an_error_is_one_line_for_all_and_a_trace_in_a_file(tmp_path):
    def fail():
        error = ZeroDivisionError("no such luck\nat all")
        error.add_note("while drawing table 3")
        raise error

    def act(processes):
        try:
            fail() if processes.rank == 1 else processes.take("never")
        except Exception as error:
            return str(report(processes, error))

    host = socket.gethostname()
    with joined(tmp_path) as (_, on_all):
        first, failed, last = (f.result() for f in on_all(act))
    assert failed == (
        f"rank 1 on {host} failed: ZeroDivisionError: no such luck; while drawing table 3; "
        f"the whole trace is in {tmp_path}/rank-1.log"
    )
    assert first == f"rank 1 on {host} failed; rank 0 ends with it"
    assert last == f"rank 1 on {host} failed; rank 2 ends with it"
    trace = (tmp_path / "rank-1.log").read_text()
    assert "in fail" in trace and "no such luck\nat all\nwhile drawing table 3" in trace
    assert [f.name for f in tmp_path.iterdir()] == ["rank-1.log"]


def test_an_error_of_the_exchange_is_put_down_to_the_process_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "SILENT", 0.5)
    with joined(tmp_path, size=2) as ((first, second), _):
        second.watch.requests.put((None, None))  # silent, as a process of another machine that was killed
        lost = report(first, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        assert str(lost).startswith("rank 1 on ") and "has not answered for" in str(lost)


def test_waiting_for_others_is_said_and_given_up(tmp_path, capsys):
    settings = TrainerConfig(nodes=2, timeout=1.0)
    with pytest.raises(ProcessLost) as lost, join(settings, Stop(), tmp_path):
        pass
    place = rf"{socket.gethostname()}:\d+"
    gave_up = rf"gave up after \d s: 1 of 2 processes \(rank 1\) did not come to {place}"
    assert re.fullmatch(gave_up, str(lost.value)), lost.value
    assert re.fullmatch(rf"waiting for 1 of 2 processes at {place}\n", capsys.readouterr().err)


def test_waiting_for_the_first_process_is_said_and_given_up(tmp_path, capsys, monkeypatch):
    port = free_port()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    gave_up = pytest.raises(ProcessLost, match=f"gave up .* did not come to 127.0.0.1:{port}")
    with gave_up, join(TrainerConfig(timeout=1.0), Stop(), tmp_path):
        pass
    assert capsys.readouterr().err == f"waiting for the first of 2 processes at 127.0.0.1:{port}\n"


def test_a_stop_signal_ends_the_wait(tmp_path, capsys):
    stop = Stop()
    noticing = threading.Timer(0.3, lambda: (until(lambda: stop.waiting), stop.notice(signal.SIGTERM, 0.0)))
    noticing.start()
    with pytest.raises(Stopped), join(TrainerConfig(nodes=2), stop, tmp_path):
        pass
    noticing.join()
    assert capsys.readouterr().err == "stop      SIGTERM: no longer waiting for the other processes\n"


def test_trainings_in_one_store_keep_apart_whatever_torchrun_counts(tmp_path):
    """The store of a lost training still holds its questions and its ranks."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def enter(rank: int, store: dist.Store) -> str:
        launch = Launch("torchrun", rank, 3, rank, 3, "127.0.0.1", host.port, agent=True)
        lobby = Lobby(launch, store, Wait(Stop(), 60.0, "here"))
        part = lobby.enter()
        if rank > 0:
            part.set(f"in/{rank}", "")
        while rank == 0 and not part.check(["in/1", "in/2"]):
            lobby.answer()
        return lobby.number

    for number in "12":
        with ThreadPoolExecutor(3) as threads:
            entered = [threads.submit(enter, rank, host.clone()) for rank in (2, 1, 0)]
            assert [future.result(60) for future in entered] == [number] * 3


def test_who_waits_for_the_first_process_stops_when_asked(tmp_path):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stop = Stop()
    stop.notice(signal.SIGTERM, 1.0)
    launch = Launch("torchrun", 1, 2, 1, 2, "127.0.0.1", host.port, agent=True)
    with pytest.raises(Stopped):
        Lobby(launch, host, Wait(stop, 60.0, "here")).enter()
