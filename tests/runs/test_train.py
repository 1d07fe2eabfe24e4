import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks, start_process, train_command, wait_for_exit_code
from training_runs import assert_same_end, last_checkpoint, read_metrics, train_by_command, train_short_run

from priors.dummy import Dummy
from tabicl_train.config.compose import compose
from tabicl_train.run.checkpoint import saved
from tabicl_train.run.records import Records
from tabicl_train.stream.steps import StepStream
from tabicl_train.training import loop, rank_process, run_folder
from tabicl_train.training.callbacks.callback import Reason
from tabicl_train.training.callbacks.metrics import COLUMNS


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory) -> Path:
    """A finished experiment=smoke with checkpoints of steps 8, 16 and 20, which tests do not change."""
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    train_by_command(run_dir, "checkpoint.every=8")
    return run_dir


def test_smoke_run_leaves_a_whole_run_directory(smoke_run):
    rows = read_metrics(smoke_run)
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    for row in rows:
        loss, norm = float(row["loss"]), float(row["grad_norm"])
        assert row["stage"] == "smoke"
        assert math.isfinite(loss)
        assert repr(loss) == row["loss"]  # nothing is rounded
        assert norm > 0
        assert float(row["clipped"]) == (norm > 10.0)
        assert 0 <= float(row["data_wait"]) <= 1
        assert 0 < float(row["accept_rate"]) <= 1
        assert float(row["tflops_per_s"]) > 0
        assert row["peak_share"] == ""  # of a CPU
        assert 0.1 < float(row["memory_gb"]) < 100
    assert json.loads((smoke_run / "status.json").read_text())["status"] == "finished"
    names = [path.name for path in saved(smoke_run / "checkpoints")]
    assert names == ["step-00000008.ckpt", "step-00000016.ckpt", "step-00000020.ckpt"]
    assert "name: smoke" in (smoke_run / "config.yaml").read_text()


def test_a_finished_run_is_left_as_it_is(smoke_run):
    files = [path for path in smoke_run.rglob("*") if path.is_file() and path.name != "lock"]
    before = [path.stat().st_mtime_ns for path in files]
    with mock.patch.object(StepStream, "draw", side_effect=AssertionError):
        text = train_by_command(smoke_run, "checkpoint.every=8")
    assert "finished already, 20 steps are done" in text
    assert text.splitlines()[-1] == f"next      tabicl-evaluate checkpoint={smoke_run}"
    assert before == [path.stat().st_mtime_ns for path in files]


class StopAfterTwo:
    def reason_to_end(self, state) -> Reason | None:
        return Reason.STOPPED if state.step == 2 else None


def test_a_run_that_a_callback_stops_does_not_name_the_time_limit(tmp_path, capsys):
    assert train_short_run(tmp_path / "run", callbacks=(StopAfterTwo(),)) == "preempted"
    assert "preempted at step 2 (the run was asked to stop): saved to" in capsys.readouterr().err


def test_an_interrupted_run_ends_as_an_undisturbed_one(smoke_run, tmp_path):
    run_dir = tmp_path / "run"
    train_by_command(run_dir, "trainer.max_steps=7", "stream.num_workers=0")
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["status"], status["step"]) == ("finished", 7)
    (run_dir / "checkpoints" / ".step-00000009.ckpt.1.tmp").write_text("left by a kill")
    Records(run_dir).append_rows("metrics.csv", {c: 9 for c in COLUMNS})  # done again
    train_by_command(run_dir, "stream.num_workers=3", "trainer.max_steps=13")
    assert "resumed at step 13" in train_by_command(run_dir, "checkpoint.every=8")
    assert_same_end(run_dir, smoke_run)
    assert (run_dir / "scaling.csv").read_text() == (smoke_run / "scaling.csv").read_text()
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("number", "launcher", "code"),
    [(signal.SIGTERM, {}, os.EX_TEMPFAIL), (signal.SIGINT, {"RANK": "0", "WORLD_SIZE": "1"}, 0)],
    ids=["plain", "torchrun"],  # which takes any code but 0 for a failure
)
def test_a_stop_signal_saves_a_checkpoint(number, launcher, code, tmp_path):
    run_dir, stderr = tmp_path / "run", tmp_path / "stderr"
    # steps enough that the signal, sent when the first row is there, finds the run still going
    endless = ["curriculum.stages.smoke.steps=100000", "trainer.log_every=1"]
    process = start_process(
        train_command, "experiment=smoke", f"run_dir={run_dir}", *endless, stderr=stderr, env=launcher
    )
    while process.is_alive() and not (run_dir / "metrics.csv").exists():
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert wait_for_exit_code(process) == code, stderr.read_text()
    again = "the same command continues" + ("" if launcher else f": tabicl-train experiment=smoke run_dir={run_dir} ")
    assert again in stderr.read_text()
    status = json.loads((run_dir / "status.json").read_text())
    assert status["status"] == "preempted"
    assert status["step"] == last_checkpoint(run_dir)["global_step"] > 0


def train_and_fail_on_rank_1(*settings: str) -> None:
    execute = Dummy.execute

    def fail_on_rank_1(self, plan):
        if os.environ["RANK"] == "1" and plan.address[1] == 5:
            raise ZeroDivisionError("no such luck")
        return execute(self, plan)

    Dummy.execute = fail_on_rank_1
    train_command(*settings)


def test_an_error_on_one_rank_ends_both_and_names_the_table(tmp_path):
    settings = ["experiment=smoke", "prior=dummy", f"run_dir={tmp_path}/run"]
    assert run_ranks(train_and_fail_on_rank_1, *settings, folder=tmp_path) == [1, 1]
    failed = r"error: rank 1 failed: ZeroDivisionError: no such luck\nwhile drawing table \d of step 5, seed 0: "
    second = (tmp_path / "stderr.1").read_text()
    assert re.search(failed, second) and "Traceback" not in second, second
    assert "in fail_on_rank_1" in (tmp_path / "run/rank-1.log").read_text()


# The run that has nothing left takes two CPU seconds as well.
@pytest.mark.parametrize("steps", [2, pytest.param(0, marks=pytest.mark.slow)], ids=["steps left", "none left"])
def test_workers_are_forked_before_anything_of_torch_is_opened(steps, tmp_path, monkeypatch):
    """A run without steps left forks none."""
    settings = ["experiment=smoke", "prior=dummy", "stream.num_workers=1", "trainer.accelerator=cpu"]
    config = compose([*settings, f"run_dir={tmp_path}/run", "validation.every=2", "validation.suites=[]",
                      "validation.best=synthetic", "trainer.max_steps=2"])  # fmt: skip
    if steps == 0:
        loop.train(config)
    found, before, threads = [], len(multiprocessing.active_children()), threading.active_count()
    build = loop.build_loader

    def fork(*arguments):
        assert threading.active_count() <= threads  # threads of earlier tests may end meanwhile
        return build(*arguments)

    def connect(*arguments, connect=rank_process.open_process_groups):
        found.append(len(multiprocessing.active_children()) - before)
        found.append((dist.is_initialized(), torch.cuda.is_initialized()))
        connect(*arguments)

    monkeypatch.setattr(loop, "build_loader", fork)
    monkeypatch.setattr(rank_process, "open_process_groups", connect)
    find = run_folder.find_checkpoint
    monkeypatch.setattr(run_folder, "find_checkpoint", lambda *arguments: found.append("read") or find(*arguments))
    assert loop.train(config) == "finished"
    assert found == [1 if steps else 0, (False, False), "read"]
