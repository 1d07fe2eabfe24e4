"""Sweeps of real runs, a few steps each."""

import contextlib
import functools
import json
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import forked
import pytest
import waiting
from command_line import command, exit_code
from forked_jobs import forked_jobs, kill  # noqa: F401
from runs import assert_same_end, metrics, read

from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.status import read_status
from tabicl_train.sweep.results import read_sweep

until = functools.partial(waiting.until, seconds=300.0)

pytestmark = pytest.mark.multi_process

SHORT = ("experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", "checkpoint.every=5")


def jobs(folder: Path) -> dict[str, Path]:
    """The folders of jobs by their names without fingerprints."""
    return {path.name[:-9]: path for path in folder.iterdir() if path.is_dir()}


def steps_of(folder: Path, name: str) -> int:
    with contextlib.suppress(FileNotFoundError, KeyError):
        return len(metrics(jobs(folder)[name]))
    return 0


@pytest.mark.usefixtures("forked_jobs")
def test_six_jobs_two_at_a_time_one_impossible_and_one_killed(tmp_path, monkeypatch, capfd):
    folder, diverging = tmp_path / "sweep", "curriculum.stages.smoke.learning_rate"
    sweep = (
        *SHORT,
        "curriculum.stages.smoke.steps=60",
        f"run_dir={folder}",
        "sweep.jobs=2",
        "seed=0,1",
        f"{diverging}=1e-3,2e-3,1e30",
        "guard.skipped_in_a_row=2",
    )
    victim = "learning_rate-0.002_seed-1"

    def kill_in_the_middle() -> None:
        until(lambda: steps_of(folder, victim) >= 7)
        kill(jobs(folder)[victim])

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    assert exit_code(monkeypatch, "train", "-m", *sweep) == 0
    killer.join()
    out, err = capfd.readouterr()
    rows = read(folder / "results.csv")
    found = {row["job"][:-9]: row["status"] for row in rows}
    assert found == {
        f"learning_rate-{rate}_seed-{seed}": "failed" if rate == "1e+30" else "finished"
        for rate in ("0.001", "0.002", "1e+30")
        for seed in (0, 1)
    }
    assert all("finite" in row["reason"] for row in rows if row["status"] == "failed")
    assert len(read_sweep(folder).jobs) == 6 and (folder / "sweep.html").is_file()
    assert "2 finished" in out and "2 failed" in out
    starts = [
        json.loads(line)["job"][:-9] for line in (folder / "jobs.jsonl").read_text().splitlines() if "started" in line
    ]
    assert sorted(starts) == sorted([*found, victim]) and "was killed by SIGKILL" in err

    again = command("sweep", *reversed(sweep[:-1]), "guard.skipped_in_a_row=2")
    assert again.returncode == 0 and not again.stderr
    assert again.stdout.partition("best run")[0] == out.partition("best run")[0]

    provenance = json.loads((jobs(folder)[victim] / "provenance.jsonl").read_text().splitlines()[0])
    line = shlex.join(provenance["command"])
    assert line.startswith("tabicl-train ") and f"run_dir={jobs(folder)[victim]}" in line and " -m " not in line
    assert command("train", *provenance["command"][1:]).stderr.strip().endswith("finished already, 60 steps are done")


def controller(*arguments: str) -> None:
    """tabicl-sweep in a process of its own; its jobs are not forked, since they end with their real parent."""
    from tabicl_train import commands

    sys.argv = ["tabicl-sweep", *arguments]
    commands.sweep()


@pytest.mark.usefixtures("forked_jobs")
def test_a_controller_that_is_killed_takes_its_jobs_along_and_the_same_command_goes_on(tmp_path):
    folder = tmp_path / "sweep"
    sweep = (*SHORT, "curriculum.stages.smoke.steps=60", "checkpoint.keep=1", "optimizer=muon,adamw", "sweep.jobs=1")
    process = forked.start(controller, *sweep, f"run_dir={folder}", stderr=tmp_path / "stderr")
    until(lambda: steps_of(folder, "optimizer-muon_seed-0") >= 12 or not process.is_alive())
    run = jobs(folder)["optimizer-muon_seed-0"]
    refused = command("sweep", *sweep, f"run_dir={folder}")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "is in use: process" in refused.stderr
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    until(lambda: not owner_is_alive(run))
    assert 12 <= len(metrics(run)) < 60 and read_status(run)["status"] == "killed"

    result = command("sweep", *sweep, f"run_dir={folder}")
    assert result.returncode == 0 and "resume    optimizer-muon_seed-0" in result.stderr, result.stderr
    assert command("sweep", *sweep, f"run_dir={tmp_path}/whole").returncode == 0
    for name, run in jobs(folder).items():
        assert_same_end(run, jobs(tmp_path / "whole")[name])


@pytest.mark.usefixtures("forked_jobs")
def test_a_stop_signal_saves_the_jobs_and_says_how_to_go_on(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "sweep"
    sweep = (*SHORT, "curriculum.stages.smoke.steps=60", "seed=0,1,2", "sweep.jobs=2", f"run_dir={folder}")

    def stop() -> None:
        until(lambda: steps_of(folder, "seed-0") >= 3 and steps_of(folder, "seed-1") >= 3)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert exit_code(monkeypatch, "sweep", *sweep) == 75
    stopper.join()
    error = capfd.readouterr().err
    assert "0 of 3 jobs done; the same command continues it:" in error and f"tabicl-sweep {shlex.join(sweep)}" in error
    assert sorted(jobs(folder)) == ["seed-0", "seed-1"]
    assert all(read_status(run)["status"] == "preempted" for run in jobs(folder).values())
    assert exit_code(monkeypatch, "sweep", *sweep) == 0
    assert [len(metrics(run)) for run in jobs(folder).values()] == [60] * 3


def test_a_job_of_two_ranks(tmp_path):
    """As processes started anew: rank 0 starts rank 1 with its own command line."""
    result = command("train", "-m", *SHORT, "trainer.devices=2", "trainer.max_steps=2", f"run_dir={tmp_path}/sweep")
    assert result.returncode == 0, result.stderr
    (run,) = jobs(tmp_path / "sweep").values()
    assert len(metrics(run)) == 2 and "2 x cpu" in (run / "log.txt").read_text()


@pytest.mark.usefixtures("forked_jobs")
def test_the_time_limit_of_a_sweep(tmp_path, monkeypatch):
    sweep = (*SHORT, "sweep.max_hours=1e-9", "seed=0,1", f"run_dir={tmp_path}/sweep")
    assert exit_code(monkeypatch, "sweep", *sweep) == 75
    assert not jobs(tmp_path / "sweep")
