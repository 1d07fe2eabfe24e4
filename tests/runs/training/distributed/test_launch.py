"""How a process was started, and what `trainer.devices=2` makes of the ends of its ranks.

The ranks here are small programs in place of tabicl-train: with an import of torch each, a test would take 20 s.
"""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from command_line import command
from forked import start_process, wait_for_exit_code
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from waiting import until

from tabicl_train.training.checks import devices_problems
from tabicl_train.training.distributed import processes
from tabicl_train.training.distributed.launch import describe_cause, launch_ranks
from tabicl_train.training.distributed.processes import Launch, read_launch, srun_problems, torchrun_problems

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SBATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN = SBATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(0, 1, 0, 1)),
        (TORCHRUN, Launch(3, 4, 1, 2)),
        (SRUN | TORCHRUN, Launch(3, 4, 1, 2)),  # srun torchrun
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, Launch(0, 1, 0, 1)),
        (SBATCH, Launch(0, 1, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0, 1)),  # a single replica of Kubernetes
        ({"WORLD_SIZE": "4"}, Launch(0, 1, 0, 1)),  # exported for a later torchrun
    ],
)
def test_the_place_of_this_process_comes_from_torchrun(environ, expected):
    assert read_launch(environ) == expected and srun_problems(environ) == torchrun_problems(environ) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 without LOCAL_RANK and LOCAL_WORLD_SIZE, which"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK=0 without LOCAL_WORLD_SIZE, which"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2, which torchrun does not set"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 LOCAL_WORLD_SIZE=2, which"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3, which"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE=four LOCAL_RANK=1"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK= without RANK and WORLD_SIZE and LOCAL_WORLD_SIZE, which"),
    ],
)
def test_variables_that_are_not_those_of_torchrun_are_refused_in_a_line(environ, words, monkeypatch, tmp_path):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = command("train", "experiment=smoke", f"run_dir={tmp_path}/run")
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the environment has ") and words in line
    assert "; unset them, or start one torchrun on each machine: " in line


def test_other_devices_than_those_of_torchrun_are_refused():
    place = read_launch(TORCHRUN)
    assert devices_problems(None, place) == devices_problems(2, place) == []
    assert devices_problems(4, place) == ["trainer.devices is 4, but torchrun has started 2 ranks here; leave it out"]


def test_several_devices_in_a_process_of_python_need_a_command():
    assert devices_problems(None, Launch()) == devices_problems(1, Launch()) == []
    (problem,) = devices_problems(2, Launch())
    assert "but this process is a single rank; start the command tabicl-train trainer.devices=2" in problem


def test_several_tasks_of_srun_are_refused_with_the_torchrun_command(tmp_path, monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    result = command("train", "experiment=smoke", f"run_dir={tmp_path}/run")
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: srun has started 4 tasks of this command; start one torchrun on each machine: ")
    assert "torchrun --nnodes=N --nproc-per-node=DEVICES --rdzv-backend=c10d" in line


def failure(code: int, timestamp: int, message: str | None = None) -> ProcessFailure:
    """As the agent reports it: the error that a rank has recorded, or a hint where it has recorded none."""
    result = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="<N/A>")
    result.timestamp = timestamp
    result.message = {"message": message} if message is not None else "To enable traceback see: https://pytorch.org"
    return result


CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:34695"
TIMEOUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        # the error of the rank that is left carries an earlier time than the killed one
        ({0: failure(1, 100, CLOSED), 1: failure(-9, 101)}, "rank 1 was killed by SIGKILL"),
        ({0: failure(-15, 100, CLOSED), 1: failure(3, 101)}, "rank 1 ended with exit code 3"),
        ({0: failure(1, 100, CLOSED), 1: failure(1, 101, "ValueError: no such luck")},
         "rank 1 failed: ValueError: no such luck"),
        ({0: failure(-15, 100), 1: failure(1, 100, "OSError: [Errno 28] No space left\nmore")},
         "rank 1 failed: OSError: [Errno 28] No space left"),
        # the agent kills a suspended rank 30 s after the first one has ended
        ({0: failure(1, 100, TIMEOUT), 1: failure(-9, 130)},
         f"rank 0 failed: another rank did not answer within trainer.timeout; {TIMEOUT}"),
        # of a rank that calls os._exit(0), the agent says nothing
        ({0: failure(1, 100, CLOSED)}, "rank 1 ended with exit code 0 before the end of the run"),
        ({1: failure(-15, 100, CLOSED)}, "rank 0 ended with exit code 0 before the end of the run"),
        ({1: failure(1, 100, "ValueError: no such luck")}, "rank 1 failed: ValueError: no such luck"),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_named(failures, expected, tmp_path):
    assert describe_cause(failures, tmp_path, 2) == expected
    rank = expected.split()[1]
    (tmp_path / f"rank-{rank}.log").touch()
    trace = f"; its stack trace is in {tmp_path}/rank-{rank}.log" if "failed: " in expected else ""
    assert describe_cause(failures, tmp_path, 2) == expected + trace


RANK = """import json, os, signal, sys, time
from pathlib import Path
assert sys.argv[1:4] == ["-m", "tabicl_train", "experiment=smoke"]
assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "300"
run, mode, rank = Path({run!r}), {mode!r}, os.environ["RANK"]
def write(status):
    if rank == "0" and mode != "stopped before it began":
        values = {{"status": status, "step": 0, "cause": "OSError: no space"}}
        values["launch"] = os.environ["TORCHELASTIC_RUN_ID"]
        (run / "status.json").write_text(json.dumps(values))
def stop(*_):
    write("failed" if mode == "failed after a signal" else "preempted")
    os._exit(int(mode == "failed after a signal"))
signal.signal(signal.SIGUSR1, stop)
(run / rank).touch()
if mode == "refused":
    sys.exit(2)
if mode == "lost" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "exited":
    write("running")
    os._exit(0)
if mode in ("finished", "preempted"):
    write(mode)
else:
    time.sleep(600)
"""


def launch_two(run: Path) -> None:
    sys.executable = str(run / "python")
    sys.argv = ["tabicl-train", "experiment=smoke"]
    sys.exit(launch_ranks(2, run))


@pytest.mark.parametrize(
    ("mode", "signaled", "code", "stderr"),
    [
        pytest.param("finished", False, 0, "", marks=pytest.mark.slow),
        ("preempted", False, 75, ""),  # a time limit, or a signal to a rank alone
        pytest.param("signaled", True, 75, "", marks=pytest.mark.slow),
        pytest.param("stopped before it began", True, 75, "", marks=pytest.mark.slow),
        ("failed after a signal", True, 1, "error: OSError: no space\n"),
        ("refused", False, 2, ""),
        pytest.param("lost", False, 1, "error: rank 1 was killed by SIGKILL\n", marks=pytest.mark.slow),
        ("exited", False, 1, "error: all ranks ended with exit code 0 before the end of the run\n"),
    ],
)
def test_the_exit_code_of_a_launch_is_that_of_the_run(mode, signaled, code, stderr, tmp_path):
    (tmp_path / "rank.py").write_text(RANK.format(run=str(tmp_path), mode=mode))
    program = shlex.join([sys.executable, "-S", str(tmp_path / "rank.py")])  # a first line takes no path with a space
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "status.json").write_text('{"status": "finished", "launch": "an earlier one"}')
    launched = start_process(launch_two, tmp_path, stderr=tmp_path / "stderr")
    if signaled:
        until(lambda: all((tmp_path / rank).exists() for rank in "01"))
        os.kill(launched.pid, signal.SIGUSR1)
    assert wait_for_exit_code(launched) == code, (tmp_path / "stderr").read_text()
    assert (tmp_path / "stderr").read_text() == stderr
    assert processes.PREEMPTED == 75


INTERRUPTED = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getppid(), signal.SIGINT)
from tabicl_train.cli import train
train()
"""


def test_ctrl_c_while_the_ranks_start_prints_nothing(tmp_path):
    (tmp_path / "rank.py").write_text(INTERRUPTED)
    program = shlex.join([sys.executable, str(tmp_path / "rank.py"), "experiment=smoke"])
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {program}\n")
    (tmp_path / "python").chmod(0o755)
    launched = start_process(launch_two, tmp_path, stderr=tmp_path / "stderr")
    assert wait_for_exit_code(launched) == 75
    assert (tmp_path / "stderr").read_text() == ""
