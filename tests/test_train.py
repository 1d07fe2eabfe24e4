import errno
import json
import math
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked import exit_code, run_ranks, start, train
from lightning.fabric import Fabric
from runs import assert_same_end, last, metrics, read, run

from priors.dummy import Dummy
from tabicl_train import train as training
from tabicl_train.callbacks import checkpoints
from tabicl_train.callbacks.metrics import COLUMNS
from tabicl_train.config.compose import compose
from tabicl_train.prediction.export import load_model
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepStream


@pytest.mark.slow
def test_smoke_run_leaves_a_whole_run_directory(smoke_run):
    rows = metrics(smoke_run)
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == list(range(1, 21))
    assert {row["stage"] for row in rows} == {"smoke"}
    for row in rows:
        assert math.isfinite(float(row["loss"])) and float(row["grad_norm"]) > 0
        assert 0 <= float(row["data_wait"]) <= 1 and 0 < float(row["accept_rate"]) <= 1
        assert repr(float(row["loss"])) == row["loss"]
        assert float(row["clipped"]) == (float(row["grad_norm"]) > 10.0)
        assert float(row["tflops_per_s"]) > 0 and row["peak_share"] == "" and 0.1 < float(row["memory_gb"]) < 100
    assert json.loads((smoke_run / "status.json").read_text())["status"] == "finished"
    assert [f.name for f in saved(smoke_run / "checkpoints")] == [f"step-{n:08d}.ckpt" for n in (8, 16, 20)]
    assert "name: smoke" in (smoke_run / "config.yaml").read_text()


@pytest.mark.slow
def test_lengths_are_recorded_with_multiplier_and_gate_of_every_layer(smoke_run):
    batches, scaling = read(smoke_run / "batches.csv"), read(smoke_run / "scaling.csv")
    for row in metrics(smoke_run):
        parts = [b for b in batches if b["step"] == row["step"]]
        assert all(2 <= int(b["classes"]) <= 10 for b in parts)
        assert sum(int(b["tables"]) for b in parts) == 8
        assert sum(int(b["tables"]) * float(b["loss"]) for b in parts) / 8 == pytest.approx(
            float(row["loss"]), rel=1e-6
        )
        layers = [s for s in scaling if s["step"] == row["step"]]
        assert [s["layer"] for s in layers] == ["column.0", "icl.0", "icl.1"]
        assert {int(s["n_smallest"]) for s in layers} == {min(int(b["n"]) for b in parts)}
    assert {float(s["gate_mean"]) for s in scaling[:3]} == {1.0}  # the gate starts there, and then learns
    assert all(float(s["gate_std"]) > 0 for s in scaling[-3:])
    model = load_model(str(smoke_run))
    for name, layer in model.named_scalings():
        row = next(s for s in scaling[-3:] if s["layer"] == name)
        assert float(row["at_largest"]) == pytest.approx(layer.multipliers(int(row["n_largest"])).abs().max().item())


@pytest.mark.slow
def test_a_preflight_leaves_no_folder(tmp_path):
    assert "there is nothing to compare" in run(tmp_path / "run", "preflight=true", "trainer.accelerator=cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_lowers_the_loss(tmp_path):
    run(tmp_path / "run", "curriculum.stages.smoke.steps=60", "curriculum.stages.smoke.learning_rate=0.01")
    losses = [float(row["loss"]) for row in metrics(tmp_path / "run")]
    assert sum(losses[-30:]) / 30 < 0.82 * sum(losses[:10]) / 10


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(smoke_run):
    files = [path for path in smoke_run.rglob("*") if path.is_file() and path.name != "lock"]
    before = [path.stat().st_mtime_ns for path in files]
    with mock.patch.object(StepStream, "draw", side_effect=AssertionError):
        assert "finished already, 20 steps are done" in run(smoke_run, "checkpoint.every=8")
    assert before == [path.stat().st_mtime_ns for path in files]


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_undisturbed_one(smoke_run, tmp_path):
    run_dir = tmp_path / "run"
    run(run_dir, "trainer.max_steps=7", "stream.num_workers=0")
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["status"], status["step"]) == ("finished", 7)
    (run_dir / "checkpoints" / ".step-00000009.ckpt.1.tmp").write_text("left by a kill")
    Records(run_dir).append_rows("metrics.csv", {c: 9 for c in COLUMNS})  # done again
    run(run_dir, "stream.num_workers=3", "trainer.max_steps=13")
    assert "resumed at step 13" in run(run_dir, "checkpoint.every=8")
    assert_same_end(run_dir, smoke_run)
    for name in ("batches.csv", "scaling.csv"):
        assert (run_dir / name).read_text() == (smoke_run / name).read_text()
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("number", "launcher", "code"),
    [(signal.SIGTERM, {}, os.EX_TEMPFAIL), (signal.SIGINT, {"RANK": "0", "WORLD_SIZE": "1"}, 0)],
    ids=["plain", "torchrun"],  # which takes any code but 0 for a failure
)
def test_a_stop_signal_saves_a_checkpoint(number, launcher, code, tmp_path):
    run_dir, stderr = tmp_path / "run", tmp_path / "stderr"
    # steps enough that the signal, sent when the first row is there, finds the run still going
    endless = ["curriculum.stages.smoke.steps=100000", "trainer.log_every=1"]
    process = start(train, "experiment=smoke", f"run_dir={run_dir}", *endless, stderr=stderr, env=launcher)
    while process.is_alive() and not (run_dir / "metrics.csv").exists():
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert exit_code(process) == code, stderr.read_text()
    status = json.loads((run_dir / "status.json").read_text())
    assert status["status"] == "preempted" and status["step"] == last(run_dir)["global_step"] > 0


@pytest.mark.slow
def test_another_model_or_seed_is_refused_in_the_same_run_directory(smoke_run):
    refused = run(
        smoke_run, "seed=1", "model.embed_dim=32", "trainer.max_steps=40", "curriculum.stages.smoke.steps=40", code=2
    )
    assert "Traceback" not in refused
    assert "seed was 0, is 1" in refused and "model.embed_dim was 16, is 32" in refused


@pytest.mark.multi_process
def test_six_kills_at_random_moments_change_no_bit(tmp_path):
    settings = ["prior=dummy", "curriculum.stages.smoke.steps=60", "checkpoint.every=3"]
    run(tmp_path / "whole", *settings)
    torn, generator = tmp_path / "torn", random.Random(0)
    for workers in (2, 0, 1, 2, 0, 1):
        before, more = count_rows(torn), generator.randint(1, 9)
        process = start(train, "experiment=smoke", f"run_dir={torn}", *settings, f"stream.num_workers={workers}")
        # Rows after the last checkpoint are dropped at the start, so the count falls before it rises.
        while process.is_alive() and count_rows(torn) < max(before - 3, 0) + more:
            time.sleep(generator.uniform(0, 0.01))
        assert process.is_alive(), "the run ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        assert exit_code(process) == -signal.SIGKILL
    run(torn, *settings)
    assert_same_end(torn, tmp_path / "whole")


def count_rows(run_dir: Path) -> int:
    path = run_dir / "metrics.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


@pytest.mark.multi_process
def test_two_processes_train_like_one(smoke_run, tmp_path):
    run_dir = tmp_path / "run"
    settings = ["experiment=smoke", f"run_dir={run_dir}", "trainer.accelerator=cpu"]
    assert run_ranks(train, *settings, folder=tmp_path) == [0, 0]
    alone, together = metrics(smoke_run), metrics(run_dir)
    assert len(together) == 20
    for a, b in zip(alone, together, strict=True):
        # the same tables and the same sum of gradients, added up in another order
        assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=2e-3)
        assert float(b["grad_norm"]) == pytest.approx(float(a["grad_norm"]), rel=2e-2)
    assert float(together[0]["loss"]) == pytest.approx(float(alone[0]["loss"]), rel=1e-5)
    assert float(together[0]["grad_norm"]) == pytest.approx(float(alone[0]["grad_norm"]), rel=1e-4)


def train_and_fail_on_rank_1(*settings: str) -> None:
    execute = Dummy.execute

    def fail_on_rank_1(self, plan):
        if os.environ["RANK"] == "1" and plan.address[1] == 5:
            raise ZeroDivisionError("no such luck")
        return execute(self, plan)

    Dummy.execute = fail_on_rank_1
    train(*settings)


@pytest.mark.multi_process
def test_an_error_on_one_rank_ends_both_and_names_the_table(tmp_path):
    settings = ["experiment=smoke", "prior=dummy", f"run_dir={tmp_path}/run"]
    assert run_ranks(train_and_fail_on_rank_1, *settings, folder=tmp_path) == [1, 1]
    failed = r"error: rank 1 failed: ZeroDivisionError: no such luck\nwhile drawing table \d of step 5, seed 0: "
    second = (tmp_path / "stderr.1").read_text()
    assert re.search(failed, second) and "Traceback" not in second, second
    assert "in fail_on_rank_1" in (tmp_path / "run/rank-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 20], ids=["in between", "the last one"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(step, tmp_path, monkeypatch):
    def full(content, path, save=checkpoints.save_atomically):
        if content["global_step"] == step:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path)

    run_dir, settings = tmp_path / "run", ("prior=dummy", "checkpoint.every=4", "stream.num_workers=0")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_atomically", full)
        said = run(run_dir, *settings, code=1)
    path = run_dir / f"checkpoints/step-{step:08d}.ckpt"
    error = said.splitlines()[-1]
    assert re.match(rf"error: {path} could not be written: .*No space left on device\. Earlier checkpoints", error)
    assert "Traceback" not in said and json.loads((run_dir / "status.json").read_text())["status"] == "failed"
    assert last(run_dir)["global_step"] == step - 4 and not list(path.parent.glob(".*"))
    assert f"resumed at step {step - 4}" in run(run_dir, *settings)


def train_and_lose_a_worker(*settings: str) -> None:
    plan = Dummy.plan

    def die(self, spec, address):
        if address[1] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return plan(self, spec, address)

    Dummy.plan = die
    train(*settings)


@pytest.mark.multi_process
def test_the_death_of_a_worker_ends_the_run_with_a_message(tmp_path):
    stderr = tmp_path / "stderr"
    settings = ["experiment=smoke", "prior=dummy", f"run_dir={tmp_path}/run"]
    assert exit_code(start(train_and_lose_a_worker, *settings, stderr=stderr)) == 1
    assert "Traceback" not in stderr.read_text()
    assert re.search(r"error: worker 0 was killed by SIGKILL .*table \d of step 5, seed 0", stderr.read_text())
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 0], ids=["steps left", "none left"])
def test_workers_are_forked_before_anything_of_torch_is_opened(steps, tmp_path, monkeypatch):
    """Idle, since no checkpoint is read yet; a run without steps left forks none."""
    settings = ["experiment=smoke", "prior=dummy", "stream.num_workers=1", "trainer.accelerator=cpu"]
    config = compose([*settings, f"run_dir={tmp_path}/run", "validation.every=2", "validation.real_rows=0",
                      "validation.best=synthetic", "trainer.max_steps=2"])  # fmt: skip
    if steps == 0:
        training.train(config)
    found, threads, before = [], threading.active_count(), len(multiprocessing.active_children())

    def launch(self, launch=Fabric.launch):
        found.append((len(multiprocessing.active_children()) - before, threading.active_count()))
        found.append((dist.is_initialized(), torch.cuda.is_initialized()))
        launch(self)

    monkeypatch.setattr(Fabric, "launch", launch)
    monkeypatch.setattr(Dummy, "plan", lambda *arguments: pytest.fail("a table is drawn"))
    monkeypatch.setattr(training, "find_start", lambda *a, find=training.find_start: found.append("read") or find(*a))
    monkeypatch.setattr(training, "fit", lambda *a: a[-1])
    training.train(config)
    workers = 2 if steps else 0  # one draws the tables of the validation
    assert found == [(workers, threads), (False, False), "read"]


@pytest.mark.slow
def test_bf16_stays_near_fp32(smoke_run, tmp_path):
    run(tmp_path / "run", "trainer.precision=bf16", "trainer.max_steps=5")
    for a, b in zip(metrics(smoke_run), metrics(tmp_path / "run"), strict=False):
        assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=0.03)
    weights = last(tmp_path / "run")["state_dict"].values()
    assert all(w.dtype == torch.float32 for w in weights)


@pytest.mark.slow
def test_progress_shows_loss_rate_wait_and_time_left(smoke_run, tmp_path):
    stderr = run(tmp_path / "run", "trainer.max_steps=3")
    line = stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"smoke step 3/3: loss \d\.\d+, \d+ tables/s, data wait \d+\.\d%, \d+\.\d GB, 00:00 left", line)
    assert "precision fp32 (the default on a CPU)" in stderr and "parameters" in stderr
