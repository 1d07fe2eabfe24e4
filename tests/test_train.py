import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked import exit_code, ranks, start, train
from runs import assert_same_end, last, metrics, read, run
from tqdm import tqdm

from priors.dummy import Dummy
from tabicl_train import train as training
from tabicl_train.callbacks.metrics import COLUMNS
from tabicl_train.callbacks.progress import Progress
from tabicl_train.config.compose import compose
from tabicl_train.planning.run_plan import expected_work
from tabicl_train.prediction.export import load_model
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.records import Records


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
    before = {f: f.stat().st_mtime_ns for f in smoke_run.rglob("*") if f.is_file()}
    assert "finished already, 20 steps are done" in run(smoke_run, "checkpoint.every=8")
    assert before == {f: f.stat().st_mtime_ns for f in smoke_run.rglob("*") if f.is_file()}


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
    [(signal.SIGTERM, {}, os.EX_TEMPFAIL), (signal.SIGINT, {"TORCHELASTIC_RUN_ID": "a"}, 0)],
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
def test_four_kills_at_random_moments_change_no_bit(tmp_path):
    settings = ["prior=dummy", "curriculum.stages.smoke.steps=48", "checkpoint.every=3"]
    run(tmp_path / "whole", *settings)
    torn, generator = tmp_path / "torn", random.Random(0)
    for _ in range(4):
        before, more = count_rows(torn), generator.randint(1, 9)
        process = start(train, "experiment=smoke", f"run_dir={torn}", *settings)
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
    with ranks(train, *settings, folder=tmp_path) as processes:
        assert [exit_code(process) for process in processes] == [0, 0]
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
    with ranks(train_and_fail_on_rank_1, *settings, folder=tmp_path) as processes:
        assert [exit_code(process) for process in processes] == [1, 1]
    failed = (
        r"error: rank 1 on \S+ failed: ZeroDivisionError: no such luck; while drawing table \d of step 5, seed 0: .*; "
        rf"the whole trace is in {tmp_path}/run/rank-1.log\n"
    )
    first, second = ((tmp_path / f"stderr.{rank}").read_text() for rank in (0, 1))
    assert re.search(failed, second), second
    assert re.search(r"error: rank 1 on \S+ failed; rank 0 ends with it\n", first), first
    assert "in fail_on_rank_1" in (tmp_path / "run/rank-1.log").read_text()


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
def test_workers_draw_while_the_model_is_made(tmp_path, monkeypatch):
    drawn = multiprocessing.Event()
    monkeypatch.setattr(Dummy, "plan", lambda *arguments, plan=Dummy.plan: drawn.set() or plan(*arguments))

    def build(config, build=training.Pretraining):
        assert drawn.wait(60)
        return build(config)

    monkeypatch.setattr(training, "Pretraining", build)
    training.train(compose(["experiment=smoke", "prior=dummy", "trainer.max_steps=1", f"run_dir={tmp_path}/run"]))


@pytest.mark.slow
def test_bf16_stays_near_fp32(smoke_run, tmp_path):
    run(tmp_path / "run", "trainer.precision=bf16", "trainer.max_steps=5")
    for a, b in zip(metrics(smoke_run), metrics(tmp_path / "run"), strict=False):
        assert float(b["loss"]) == pytest.approx(float(a["loss"]), rel=0.03)
    weights = last(tmp_path / "run")["state_dict"].values()
    assert all(w.dtype == torch.float32 for w in weights)


def test_time_left_counts_the_work_of_later_stages(monkeypatch):
    config = compose(["experiment=demo", "curriculum=mini_v2"])
    progress = Progress(config, 0)
    one, two, three = (expected_work(config, stage)[1] for stage in config.curriculum.stages.values())
    progress.started, passed = 0.0, 600.5  # half a second beyond what is shown, so that no rounding matters
    monkeypatch.setattr("tabicl_train.callbacks.metrics.time.perf_counter", lambda: passed)
    seconds = passed * (0.5 * one + two + three) / (0.5 * one)
    assert progress.time_left({"step": 1500, "stage": "stage1"}) == (
        f"{tqdm.format_interval(seconds)} left (10:00 of stage1)"
    )
    assert progress.time_left({"step": config.total_steps, "stage": "stage3"}) == "00:00 left"


def test_progress_forgets_a_loss_that_is_not_finite(capsys):
    progress = Progress(compose(["experiment=smoke"]), 0)
    row = {"stage": "smoke", "tables_per_s": 1.0, "data_wait": 0.0, "memory_gb": 1.0}
    for step, loss in enumerate((math.inf, math.nan, 2.0, math.nan, -math.inf, 1.0), 1):
        progress.last_line = -math.inf  # so that there is a line
        progress.show(row | {"step": step, "loss": loss})
    losses = [line.split("loss ")[1].split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert losses == ["inf", "nan", "2.000", "2.000", "2.000", "1.900"]


@pytest.mark.slow
def test_progress_shows_loss_rate_wait_and_time_left(smoke_run, tmp_path):
    stderr = run(tmp_path / "run", "trainer.max_steps=3")
    line = stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"smoke step 3/3: loss \d\.\d+, \d+ tables/s, data wait \d+\.\d%, \d+\.\d GB, 00:00 left", line)
    assert "precision fp32 (the default on a CPU)" in stderr and "parameters" in stderr


def test_processes_share_cores_unless_each_is_bound_to_its_own(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3}, raising=False)
    for others, expected in (([], 1), ([[2, 3], [0, 1]], 2), ([[0, 1, 2, 3]], 2), ([[4, 5], [6, 7]], 1)):
        together = [(socket.gethostname(), cores) for cores in others] + [("another machine", [2, 3])]
        processes = SimpleNamespace(gather=lambda own, together=together: [own, *together])
        assert training.sharing(processes) == expected
