"""Sweeps from start to end. Where training is not the subject, stand_in.py takes the place of tabicl-train."""

import contextlib
import csv
import os
import signal
import statistics
from pathlib import Path

import forked
import pytest
import stand_in
import waiting
from command_line import command
from html_page import Page
from optuna.trial import TrialState
from scipy import stats
from training_runs import read_metrics

from tabicl_train.run.status import is_in_use, read_status
from tabicl_train.sweep import jobs
from tabicl_train.sweep import run as sweep_run
from tabicl_train.sweep.results import Sweep
from tabicl_train.sweep.study import load_study

pytestmark = pytest.mark.slow

REAL_ONLY = ("validation.rows=[]", "validation.best=real", "curriculum.stages.smoke.rows=[20,120]")  # iris is inside
SETTINGS = ("experiment=smoke", "validation.every=5", *REAL_ONLY, "trainer.accelerator=cpu", "sweep.jobs=2")
MOMENTUMS = (0.8, 0.85, 0.9, 0.95, 0.97, 0.99)
GRID = (*SETTINGS, f"optimizer.momentum={','.join(map(str, MOMENTUMS))}", "seed=0,1")
PAIR = (*SETTINGS, "optimizer.momentum=0.9,0.95", "seed=0,1")


@pytest.fixture(autouse=True)
def stands_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))
    monkeypatch.setattr(jobs, "PROGRAM", (stand_in.__file__,))
    monkeypatch.setattr(sweep_run, "POLL", 0.02)
    monkeypatch.setattr(sweep_run, "DRAW", 1e9)


@pytest.fixture
def controller(tmp_path):
    """Starts tabicl-sweep in a process group of its own, with its runs; what it prints goes to a file."""
    started = []

    def start(*arguments: str, stderr: str = "stderr"):
        (tmp_path / stderr).touch()
        started.append(forked.start_process(stand_in.controller, *arguments, stderr=tmp_path / stderr))
        return started[-1]

    yield start
    for process in started:
        for folder in (tmp_path, *tmp_path.iterdir()):
            kill_all(process.pid, folder)
        process.join()


def kill_all(controller: int, folder: Path) -> None:
    """Kill a controller, its jobs and their runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(controller, signal.SIGKILL)
    for run in filter(is_in_use, folder.glob("*_seed-*")):
        os.kill(int((run / "starts").read_text().split()[-1]), signal.SIGKILL)


def results(folder: Path) -> list[dict]:
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def starts(folder: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text().split()) for path in folder.glob("*/starts")}


def until_held(folder: Path, count: int) -> None:
    """Wait until this many runs are waiting at a step."""
    waiting.until(lambda: sum(map(is_in_use, folder.glob("*_seed-*"))) >= count, f"{count} runs are held")


def expected(momentums=MOMENTUMS) -> list[tuple[float, float, float, float]]:
    """Momentum, mean and interval of each point, best first."""
    rows = []
    for momentum in momentums:
        values = [stand_in.loss(momentum, seed, stand_in.STEPS) for seed in (0, 1)]
        mean, half = statistics.fmean(values), stats.t.ppf(0.975, 1) * statistics.stdev(values) / 2**0.5
        rows.append((momentum, mean, mean - half, mean + half))
    return sorted(rows, key=lambda row: row[1])


def test_a_grid_that_is_killed_twice_ends_with_the_table_of_an_undisturbed_one(tmp_path, controller):
    folder = tmp_path / "sweep"
    for number in range(2):
        folder.mkdir(exist_ok=True)
        (folder / f"hold-{number}").write_text("2")
        process = controller(*GRID, f"run_dir={folder}")
        until_held(folder, 1 + number)
        if number == 0:
            os.kill(process.pid, signal.SIGKILL)  # its runs outlive it
        else:
            kill_all(process.pid, folder)
        process.join()
        (folder / f"hold-{number}").unlink()
    result = command("sweep", *GRID, f"run_dir={folder}")
    assert result.returncode == 0, result.stderr
    sweep = Sweep(folder)
    assert [trial.params["optimizer.momentum"] for trial, _ in sweep.ranked] == [row[0] for row in expected()]
    shown = sweep.ranking()
    assert shown["real/loss"].tolist() == [f"{mean:.4f}" for _, mean, _, _ in expected()]
    assert shown["95% interval"].tolist() == [f"[{low:.4f}, {high:.4f}]" for *_, low, high in expected()]
    assert sweep.text() in result.stdout and len(results(folder)) == 12
    assert "written   comparison.csv" in result.stderr  # by the call that has ended the sweep only
    again = command("sweep", *GRID, f"run_dir={folder}")
    assert again.returncode == 0
    assert again.stdout == result.stdout
    assert not again.stderr


def test_a_failing_point_does_not_end_the_sweep(tmp_path):
    (tmp_path / "crash").write_text("0.95")
    result = command("train", "-m", *PAIR, f"run_dir={tmp_path}")
    assert result.returncode == 0
    assert "it crashes" in result.stdout
    assert "1 finished, 1 failed" in result.stdout
    assert [row["status"] for row in results(tmp_path)].count("failed") == 2
    (failed,) = Page(tmp_path / "sweep.html").table("trial", "reason").values()
    assert failed["momentum"] == "0.95"
    assert failed["reason"].count("it crashes") == 2
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "crash").write_text("0.9")
    result = command("train", "-m", *SETTINGS, "optimizer.momentum=0.9", f"run_dir={tmp_path}/alone")
    assert result.returncode == 1 and "no run has finished" in result.stderr


def test_a_killed_run_is_continued_once(tmp_path, controller):
    for seed in (0, 1):
        (tmp_path / f"hold-{seed}").write_text("2")
    process = controller(*SETTINGS, "optimizer.momentum=0.9", "seed=0,1", f"run_dir={tmp_path}")
    for number in (1, 2):
        waiting.until(lambda n=number: set(starts(tmp_path).values()) == {n} and len(starts(tmp_path)) == 2)
        until_held(tmp_path, 2)
        first, second = sorted(tmp_path.glob("*_seed-*"))
        for run in (first, second)[number - 1 :]:
            os.kill(int((run / "starts").read_text().split()[-1]), signal.SIGKILL)
    (tmp_path / "hold-0").unlink()
    assert forked.wait_for_exit_code(process) == 1
    assert set(starts(tmp_path).values()) == {2}
    assert [read_status(run)["status"] for run in (first, second)] == ["finished", "killed"]
    assert results(tmp_path)[0]["status"] == "finished"
    (trial,) = load_study(tmp_path).get_trials()
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs["reason"] == f"{second.name}: it was killed"


def test_runs_of_a_dead_controller_are_adopted_and_a_torn_journal_is_repaired(tmp_path, controller):
    for seed in (0, 1):
        (tmp_path / f"hold-{seed}").write_text("2")
    process = controller(*PAIR, f"run_dir={tmp_path}")
    until_held(tmp_path, 2)
    refused = command("sweep", *PAIR, f"run_dir={tmp_path}")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "in use" in refused.stderr
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with open(tmp_path / "study.log", "a") as file:
        file.write('{"op_code": 4, "worker')
    (tmp_path / "study.log.lock").symlink_to("gone")
    process = controller(*PAIR, f"run_dir={tmp_path}", stderr="stderr.2")
    waiting.until(lambda: (tmp_path / "stderr.2").read_text().count("adopt ") == 2, "both runs are adopted")
    for seed in (0, 1):
        (tmp_path / f"hold-{seed}").unlink()
    assert forked.wait_for_exit_code(process) == 0
    assert set(starts(tmp_path).values()) == {1}
    assert len(Sweep(tmp_path).ranked) == 2


def test_a_stop_signal_stops_adopted_runs_too_and_the_same_command_goes_on(tmp_path, controller):
    (tmp_path / "hold-0").write_text("2")
    sweep = (*PAIR, "seed=0", f"run_dir={tmp_path}")
    process = controller(*sweep)
    until_held(tmp_path, 2)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process = controller(*sweep, stderr="stderr.2")
    waiting.until(lambda: (tmp_path / "stderr.2").read_text().count("adopt ") == 2, "both runs are adopted")
    os.kill(process.pid, signal.SIGTERM)
    assert forked.wait_for_exit_code(process) == 75
    assert [read_status(run)["status"] for run in tmp_path.glob("*_seed-0")] == ["preempted"] * 2
    assert "the same command continues it: tabicl-sweep experiment=smoke" in (tmp_path / "stderr.2").read_text()
    (tmp_path / "hold-0").unlink()
    assert command("sweep", *sweep).returncode == 0
    assert set(starts(tmp_path).values()) == {2}


def test_the_pruner_stops_a_run_and_spares_its_other_seeds(tmp_path):
    search = [*SETTINGS, "optimizer.momentum=interval(0.9,0.99)", "seed=0,1", "sweep.sampler=random"]
    search += ["sweep.pruner=median", f"run_dir={tmp_path}"]
    assert command("sweep", *search, "sweep.trials=6").returncode == 0
    (tmp_path / "hold-0").write_text("3")  # the seventh point, which is poor, ends only if it is stopped
    result = command("sweep", *search, "sweep.trials=7")
    assert result.returncode == 0, result.stderr
    *others, last = load_study(tmp_path).get_trials()
    assert {trial.state for trial in others} == {TrialState.COMPLETE}
    assert last.state == TrialState.PRUNED
    assert [row["status"] for row in results(tmp_path)[-2:]] == ["pruned", "pruned"]
    assert len(starts(tmp_path)) == 6 * 2 + 1
    assert "real/loss" in last.user_attrs["reason"]
    assert [read_status(run)["status"] for run in tmp_path.glob("006*")] == ["preempted"]


def test_another_sweep_in_the_folder_is_refused(tmp_path):
    assert command("sweep", *PAIR, "seed=0", f"run_dir={tmp_path}").returncode == 0
    result = command("sweep", *PAIR, "optimizer.momentum=0.9", f"run_dir={tmp_path}")
    assert result.returncode == 2
    assert "which holds another sweep (seeds was [0]" in result.stderr
    assert load_study(tmp_path).get_trials(states=[TrialState.RUNNING]) == []
    assert command("sweep", *PAIR, "seed=0", "stream.num_workers=3", f"run_dir={tmp_path}").returncode == 0


def test_a_sweep_of_real_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "PROGRAM", ("-m", "tabicl_train"))
    short = ("experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.max_steps=2")
    result = command(
        "train", "-m", *short, "trainer.accelerator=cpu", "optimizer.momentum=0.9,0.95", f"run_dir={tmp_path}/sweep"
    )
    assert result.returncode == 0, result.stderr
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["finished"] * 2
    assert {len(read_metrics(run)) for run in (tmp_path / "sweep").glob("*_seed-0")} == {2}
