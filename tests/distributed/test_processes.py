"""Processes that join and lose each other, started by every launcher; they train nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from meeting import free_port
from waiting import until

from tabicl_train.processes import watch
from tabicl_train.run_dir.liveness import process_start

pytestmark = pytest.mark.multi_process

SCRIPT = """
import os, sys, time
from pathlib import Path
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.join import join
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
    """Two processes that have joined, and their pids. They wait for each other; with an argument, they sleep."""
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
        until(lambda: not any(map(lives, numbers)), seconds=watch.GRACE / 2)  # by then they would end by themselves


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
        stderr = process.stderr.read()
    assert process.returncode == 1
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL; rank 0 ends with it\n$", stderr)


REFUSED = """
from pathlib import Path
from tabicl_train.commands import config_errors
from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.join import join
from tabicl_train.processes.signals import Stop

with config_errors(), join(TrainerConfig(devices=3), Stop(), Path("none")):
    pass
"""


def test_an_error_of_all_processes_is_printed_by_one():
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
    errors = [task.communicate(timeout=120)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2], errors
    assert errors == ["error: trainer.devices is 3, but srun gives 2; leave it out\n", ""]
