"""Processes end with each other: ranks with their launcher, workers with their process, two ranks with one of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import start_process, train_command, wait_for_exit_code
from waiting import until

from tabicl_train.run.checkpoint import saved, step_of
from tabicl_train.run.status import is_in_use, read_status

SETTINGS = (
    "experiment=smoke", "prior=dummy", "curriculum.stages.smoke.steps=1000000", "checkpoint.every=4",
    "trainer.accelerator=cpu", "trainer.devices=2", "stream.num_workers=1",
)  # fmt: skip


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


LOOPBACK = ("7F", "00000000000000000000000001000000")  # ends of the addresses 127.*, also in IPv6, and ::1


def reachable_ports(pid: int) -> list[str]:
    """The addresses, as in /proc/net/tcp, at which a process and its descendants listen for other machines."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = []
    for protocol in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            _, address, _, state, *_ = fields = line.split()
            is_local = address.partition(":")[0].endswith(LOOPBACK)
            if state == "0A" and not is_local and f"socket:[{fields[9]}]" in sockets:
                found.append(f"{protocol} {address}")
    for child in children(pid):
        found += reachable_ports(child)
    return found


def saved_step(run_dir: Path) -> int:
    return max(map(step_of, saved(run_dir / "checkpoints")), default=0)


class Launch:
    """tabicl-train with trainer.devices=2, in the middle of its training."""

    def __init__(self, run_dir: Path, stderr: Path, *settings: str) -> None:
        stderr.unlink(missing_ok=True)
        first = saved_step(run_dir)
        self.process = start_process(train_command, *SETTINGS, f"run_dir={run_dir}", *settings, stderr=stderr)
        until(lambda: not self.process.is_alive() or saved_step(run_dir) > first, seconds=300)
        assert self.process.is_alive(), stderr.read_text()
        self.ranks = children(self.process.pid)
        self.ranks.sort(key=lambda pid: b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        self.workers = [worker for rank in self.ranks for worker in children(rank)]
        assert len(self.ranks) == 2 and len(self.workers) == 2

    def left(self) -> list[int]:
        return [pid for pid in [*self.ranks, *self.workers] if lives(pid)]


def test_no_other_machine_reaches_a_launch_and_a_killed_rank_ends_it_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # as a cluster may set it
    launch = Launch(tmp_path / "run", tmp_path / "stderr")
    assert not reachable_ports(launch.process.pid)
    os.kill(launch.ranks[1], signal.SIGKILL)
    assert wait_for_exit_code(launch.process) == 1
    until(lambda: not launch.left(), "the worker of the killed rank ends")
    assert not is_in_use(tmp_path / "run")
    error = (tmp_path / "stderr").read_text()
    assert error.splitlines()[-1] == "error: rank 1 was killed by SIGKILL"
    assert "Traceback" not in error


@pytest.mark.slow
def test_ranks_end_with_their_launcher_and_the_same_command_continues(tmp_path):
    run_dir, stderr = tmp_path / "run", tmp_path / "stderr"
    launch = Launch(run_dir, stderr)
    os.kill(launch.process.pid, signal.SIGKILL)
    # The main thread of a killed rank may be gone before the others, and with them its files and its lock.
    until(lambda: not launch.left() and not is_in_use(run_dir), "the ranks end with their launcher")
    assert read_status(run_dir)["status"] == "killed"

    launch = Launch(run_dir, stderr)
    assert "resumed at step " in stderr.read_text()
    os.kill(launch.process.pid, signal.SIGINT)
    assert wait_for_exit_code(launch.process) == os.EX_TEMPFAIL
    assert not launch.left()
    done = read_status(run_dir)["step"]
    path = run_dir / f"checkpoints/step-{done:08d}.ckpt"
    *_, stopping, last = stderr.read_text().splitlines()
    assert stopping == "stop      SIGINT: stopping after this step; signal again to kill"
    assert last.startswith(f"preempted at step {done} (SIGINT): saved to {path}; the same command continues: tabicl-tr")
    assert path.exists()


def draw_for_ever(number: str) -> None:
    import time

    from priors.dummy import Dummy
    from tabicl_train.config.compose import compose
    from tabicl_train.config.schema import StreamConfig, configured_prior
    from tabicl_train.stream.steps import StepStream
    from tabicl_train.stream.workers import Loader

    Dummy.plan = lambda *_: time.sleep(600)
    config = compose(["experiment=smoke", "prior=dummy"])
    stream = StepStream(configured_prior(config.prior), config.curriculum, config.model, 0, range(8))
    with Loader(stream, StreamConfig(num_workers=1)) as loader:
        loader.start()
        Path(number).write_text(str(next(iter(loader.workers)).pid))
        loader.next()


def test_a_worker_dies_with_its_process_in_the_middle_of_a_table(tmp_path):
    process = start_process(draw_for_ever, str(tmp_path / "worker"))
    until(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
    worker = int((tmp_path / "worker").read_text())
    assert lives(worker)
    process.kill()
    until(lambda: not lives(worker))


SIGNALED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.{name})

sys.meta_path.insert(0, Finder())
from tabicl_train.cli import train
train()
"""


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_stop_signal_during_imports_leaves_no_trace(name):
    result = subprocess.run(
        [sys.executable, "-c", SIGNALED.format(name=name), "experiment=smoke"], capture_output=True, text=True
    )
    assert result.returncode == -getattr(signal, name) and result.stderr == ""
