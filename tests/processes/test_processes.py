"""Processes that join, agree, and lose each other: in threads over one store, and as real ones that train nothing."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes import processes as module
from tabicl_train.processes.processes import (
    Launch,
    Member,
    Processes,
    ProcessLost,
    Stopped,
    first_host,
    join,
    read_launch,
)
from tabicl_train.processes.signals import Stop
from tabicl_train.run_dir.liveness import process_start

pytestmark = pytest.mark.multi_process

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
SRUN = SBATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[03-04],login",
                 "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0)),
        ({"devices": 2}, {}, Launch("plain", 0, 2, 0, 2, "127.0.0.1", 0)),
        ({"devices": 2, "nodes": 2}, {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
         Launch("plain", 2, 4, 0, 2, "a", 9)),
        ({}, TORCHRUN, Launch("torchrun", 3, 4, 1, 2, "a", 1234, agent=True)),
        ({}, TORCHRUN | SRUN, Launch("torchrun", 3, 4, 1, 2, "a", 1234, agent=True)),
        ({"devices": 2}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
         Launch("torchrun", 1, 2, 1, 2, "127.0.0.1", 0)),
        ({}, SRUN, Launch("srun", 2, 4, 0, 2, "gpu03", 15_000 + 17 * 7 + 2)),
        ({"devices": 2}, SBATCH | {"SLURM_NTASKS": "1"}, Launch("plain", 0, 2, 0, 2, "127.0.0.1", 0)),
        ({}, SBATCH, Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0)),
    ],
)  # fmt: skip
def test_who_started_this_process(settings, environ, expected):
    assert read_launch(TrainerConfig(**settings), environ) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 4}, "trainer.devices is 4, but torchrun gives 2"),
        ({"nodes": 1}, "trainer.nodes is 1, but torchrun gives 2"),
        ({"devices": 2, "nodes": 2}, None),
        ({}, None),
    ],
)
def test_settings_that_differ_from_the_launcher_are_refused(settings, message):
    settings = TrainerConfig(**settings)
    problem = read_launch(settings, TORCHRUN).problem(settings)
    assert problem is None if message is None else problem.startswith(message)
    assert "machine" in read_launch(settings, TORCHRUN | {"WORLD_SIZE": "5"}).problem(settings)


@pytest.mark.parametrize(
    ("hosts", "first"), [("a", "a"), ("gpu-1,b", "gpu-1"), ("n[007-9,11],m", "n007"), ("x[4],y", "x4")]
)
def test_the_first_of_the_hosts_of_slurm(hosts, first):
    assert first_host(hosts) == first


@contextlib.contextmanager
def joined(tmp_path: Path, size: int = 3, timeout: float = 60.0):
    """Processes of one store, all of them in this one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launches = [Launch("torchrun", rank, size, rank, size, "127.0.0.1", store.port) for rank in range(size)]
    members = [
        Processes(launch, dist.PrefixStore("run", store.clone()), timeout, tmp_path / f"rank-{launch.rank}.log")
        for launch in launches
    ]
    with ThreadPoolExecutor(size) as threads:
        list(threads.map(lambda p: p.meet(Stop()), members))
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
            started, beats = time.monotonic(), first.beats
            until(lambda: time.monotonic() > started + 3.0 and first.beats > beats + 1)
            return "done"

        assert [f.result() for f in on_all(lambda p: p.from_first(long_work))] == ["done"] * 2
        first.requests.put((None, None))  # its thread ends, as with the process
        with pytest.raises(ProcessLost, match=r"rank 0 on .* has not answered for \d s; rank 1 ends with it"):
            second.take("never")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_has_left_is_not_missed(tmp_path):
    with joined(tmp_path, size=2) as ((first, second), _):
        second.leave()
        second.close()
        beats = first.beats
        until(lambda: first.beats > beats + 3)
        assert first.gone(2.5 * module.BEAT) is None


def test_a_process_that_is_gone_is_named_on_the_others(tmp_path):
    with joined(tmp_path) as (members, on_all):
        with subprocess.Popen(["true"]) as gone:
            pass
        for processes in members:
            processes.members[1] = replace(Member.this(), pid=gone.pid)
        waiting = [f.exception() for f in on_all(lambda p: p.take("never") if p.rank != 1 else None)]
        assert [str(e) for e in waiting] == [f"rank 1 on {socket.gethostname()} is gone; rank {n} ends with it"
                                             if n != 1 else "None" for n in range(3)]  # fmt: skip


def test_a_process_that_cannot_end_by_itself_is_ended(tmp_path, monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(module, "GRACE", 0.1)
    monkeypatch.setattr(module, "end_now", ended.append)
    with joined(tmp_path, size=2) as ((first, _), _), subprocess.Popen(["true"]) as gone:
        gone.wait()
        first.members[1] = replace(Member.this(), pid=gone.pid)
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
            return str(processes.report(error))

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
    monkeypatch.setattr(module, "SILENT", 0.5)
    with joined(tmp_path, size=2) as ((first, second), _):
        second.requests.put((None, None))  # silent, as a process of another machine that was killed
        lost = first.report(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        assert str(lost).startswith("rank 1 on ") and "has not answered for" in str(lost)


def test_waiting_for_others_is_said_and_given_up(tmp_path, capsys):
    settings = TrainerConfig(nodes=2, timeout=1.0)
    with pytest.raises(ProcessLost) as lost, join(settings, Stop(), tmp_path):
        pass
    place = rf"{socket.gethostname()}:\d+"
    gave_up = rf"gave up after \d s: 1 of 2 processes \(rank 1\) did not come to {place}"
    assert re.fullmatch(gave_up, str(lost.value)), lost.value
    assert re.fullmatch(rf"waiting for 1 of 2 processes at {place}\n", capsys.readouterr().err)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


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


SCRIPT = """
import os, sys, time
from pathlib import Path
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.processes import join
from tabicl_train.processes.signals import die_with_launcher, watch_signals

die_with_launcher()
folder = Path(sys.argv[1])
with watch_signals() as stop, join(TrainerConfig(devices=2), stop, folder) as processes:
    (folder / str(processes.rank)).write_text(str(os.getpid()))
    time.sleep(600) if sys.argv[2:] else processes.take("never")
"""
LAUNCHERS = {
    "plain": [],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def started(launcher: str, folder: Path, *arguments: str) -> tuple[subprocess.Popen, list[int]]:
    """Two processes that have joined and wait for ever, and their numbers; with an argument, for nobody."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *LAUNCHERS[launcher], str(script), str(folder), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    numbers = [folder / "0", folder / "1"]
    until(lambda: process.poll() is not None or all(f.exists() and f.read_text() for f in numbers))
    assert process.poll() is None, process.stderr.read()
    return process, [int(f.read_text()) for f in numbers]


def lives(pid: int) -> bool:
    return process_start(pid) is not None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_process_outlives_its_launcher(launcher, tmp_path):
    process, numbers = started(launcher, tmp_path, "stuck")
    with process:
        process.kill()
        until(lambda: not any(map(lives, numbers)), module.GRACE / 2)  # by then they would end by themselves


WORKER = """
import time
from priors.dummy import Dummy
from tabicl_train.config.schema import StreamConfig, build_prior
from tabicl_train.config.compose import compose
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader

Dummy.plan = lambda *_: time.sleep(600)
config = compose(["experiment=smoke", "prior=dummy"])
with Loader(StepStream(build_prior(config), config.curriculum, config.model, 0, range(8)), StreamConfig()) as loader:
    print(loader.workers[0].process.pid, flush=True)
    next(loader)
"""


def test_a_worker_dies_with_its_process_in_the_middle_of_a_table():
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        assert lives(worker)
        process.kill()
    until(lambda: not lives(worker))


def test_a_plain_process_ends_when_its_child_is_killed_and_says_so(tmp_path):
    process, (_, child) = started("plain", tmp_path)
    with process:
        os.kill(child, signal.SIGKILL)
        told = process.stderr.read()
    assert process.returncode == 1
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL; rank 0 ends with it\n$", told)


REFUSED = """
from pathlib import Path
from tabicl_train.commands import config_errors
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.processes import join
from tabicl_train.processes.signals import Stop

with config_errors(), join(TrainerConfig(devices=3), Stop(), Path("none")):
    pass
"""


def test_what_is_wrong_with_all_processes_is_printed_by_one():
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    place = {"MASTER_PORT": str(free_port())}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", REFUSED],
            env=os.environ | step | place | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    told = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], told
    assert told == ["error: trainer.devices is 3, but srun gives 2; leave it out\n", ""]


# In place of python: prints a configuration, or stands for torchrun, which ends with an error after a signal.
PYTHON = """#!/usr/bin/env bash
status() {  # dated later than the start, which may lie in the same tick of the clock
    echo "{\\"status\\": \\"$1\\"}" > "a run/status.json"; touch -d "1 hour" "a run/status.json"
}
echo "$*" >> calls
case "$*" in
*--cfg*) echo "run_dir: a run" ;;
*fail*) exit 1 ;;
*signal*)
    trap '[ "${*: -1}" = early-signal ] || status preempted; exit 1' TERM
    touch ready
    while true; do sleep 0.1; done ;;
*) for last; do true; done; status "$last" ;;
esac
"""


@pytest.mark.parametrize(
    ("argument", "code"),
    [("finished", 0), ("preempted", 75), ("fail", 1), ("signal", 75), ("early-signal", 75), ("one", 0)],
)
def test_the_launch_script_ends_as_the_run_did(argument, code, tmp_path):
    (tmp_path / "local.sh").write_text((Path(__file__).parents[2] / "launch/local.sh").read_text())
    (tmp_path / "setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")"\nPATH=$PWD:$PATH\n')
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/status.json").write_text('{"status": "preempted"}')  # of the time before
    os.utime(tmp_path / "a run/status.json", (0, 0))
    devices = [] if argument == "one" else ["2"]
    with subprocess.Popen(["bash", tmp_path / "local.sh", *devices, argument]) as process:
        if "signal" in argument:
            until((tmp_path / "ready").exists)
            process.terminate()
    assert process.returncode == code
    started = (tmp_path / "calls").read_text().splitlines()[-1]
    ranks = "-m torch.distributed.run --standalone --nproc-per-node 2 " if devices else ""
    assert started == f"{ranks}-m tabicl_train {argument}"
