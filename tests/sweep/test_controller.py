"""The controller with jobs that train nothing."""

import errno
import json
import os
import signal

import pytest
from invented_jobs import SETTINGS, Invented, controller_of, kill_once, run, statuses
from runs import read

from tabicl_train.config.sweep import EVENTS
from tabicl_train.processes.signals import Stop
from tabicl_train.sweep.controller import RETRIES
from tabicl_train.sweep.journal import SweepFailed
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.results import read_sweep
from tabicl_train.sweep.run import run as run_sweep

GRID = ("optimizer=muon,adamw", "seed=0,1,2")


def test_two_jobs_at_a_time_until_all_have_finished(tmp_path):
    executor = Invented(lambda job, step: 1 / step + job.seed)
    most = 0
    controller = controller_of(tmp_path, executor, *GRID)
    for _ in controller.steps():
        most = max(most, len(executor.running))
    assert most == 2 and len(executor.started) == 6
    assert set(statuses(controller).values()) == {"finished"}
    sweep = read_sweep(tmp_path)
    assert [job.value for job in sweep.jobs] == [1 / 16 + seed for _ in range(2) for seed in range(3)]


def test_a_failing_job_is_marked_and_a_killed_one_resumed(tmp_path):
    killed = kill_once(step=6, words="adamw_seed-1")

    def accidents(job, step):
        return "no table was accepted" if "muon_seed-2" in job.name else killed(job, step)

    executor = Invented(accidents=accidents)
    found = statuses(run(tmp_path, executor, *GRID))
    assert found.pop("optimizer-muon_seed-2") == "failed" and set(found.values()) == {"finished"}
    assert executor.steps == 5 * 16 + 2  # two steps behind the checkpoint of step 4 were done again
    (failed,) = [job for job in read_sweep(tmp_path).jobs if job.status == "failed"]
    assert failed.reason == "no table was accepted"

    again = Invented()
    run(tmp_path, again, *GRID)
    assert again.started == []
    run(tmp_path, again, *GRID, "sweep.retry_failed=true")
    assert [name[:-9] for name in again.started] == ["optimizer-muon_seed-2"]


def test_a_second_call_and_a_reordered_one_do_nothing(tmp_path):
    run(tmp_path, Invented(), *GRID)
    before = (tmp_path / EVENTS).read_bytes()
    again = Invented()
    run(tmp_path, again, *GRID)
    assert (tmp_path / EVENTS).read_bytes() == before
    run(tmp_path, again, "seed=2,0,1", "optimizer=adamw,muon")
    assert again.started == [] and {job.status for job in read_sweep(tmp_path).jobs} == {"finished"}


def test_results_are_those_of_the_latest_call_even_if_it_ran_nothing(tmp_path):
    run(tmp_path, Invented(), *GRID)
    for seeds in ("0,1,2", "1,2"):
        plan = make_plan([*SETTINGS, f"run_dir={tmp_path}", "optimizer=adamw", f"seed={seeds}"])
        assert run_sweep(*plan) == "finished"
        assert [row["seed"] for row in read(tmp_path / "results.csv")] == seeds.split(",")


def test_another_sweep_in_the_folder_shares_only_equal_jobs(tmp_path):
    run(tmp_path, Invented(), *GRID)
    again = Invented(lambda job, step: 2.0)
    run(tmp_path, again, "optimizer=adamw", "optimizer.eps=1e-8,1e-6", "seed=0")  # 1e-8 is the default
    assert len(again.started) == 1 and "eps-1e-06" in again.started[0]
    assert {job.value for job in read_sweep(tmp_path).jobs} == {1.0, 2.0}


@pytest.mark.parametrize("polls", [1, 3, 5, 9])
def test_a_sweep_that_was_killed_goes_on(polls, tmp_path):
    """Its jobs end with it, and leave what they had saved."""
    executor = Invented(lambda job, step: 1 / step + job.seed)
    run(tmp_path, executor, *GRID, polls=polls)
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"event": "ended", "job"')  # the kill came while it was written
    executor.running.clear()
    before = executor.steps
    run(tmp_path, executor, *GRID)
    assert executor.steps - before <= 6 * 16 - before + 2 * 2  # at most the steps since the last checkpoints
    assert [job.value for job in read_sweep(tmp_path).jobs] == [1 / 16 + seed for _ in range(2) for seed in range(3)]


def test_a_job_that_is_killed_again_and_again_is_given_up(tmp_path):
    executor = Invented(accidents=lambda job, step: -signal.SIGKILL if step == 6 else None)
    controller = run(tmp_path, executor, "seed=0")
    # The first kill comes after the checkpoint of step 4, which is new.
    assert len(executor.started) == 2 + RETRIES
    (job,) = read_sweep(tmp_path).jobs
    assert job.status == "failed" and job.reason.startswith("was killed by SIGKILL")
    assert controller.ended == 2 + RETRIES


def test_a_job_that_saves_between_its_kills_goes_on(tmp_path):
    steps = set()

    def accident(job, step):  # once at each multiple of 4
        if step % 4 or step in steps or step == 0:
            return None
        steps.add(step)
        return 143

    assert statuses(run(tmp_path, Invented(accidents=accident), "seed=0")) == {"seed-0": "finished"}
    assert steps == {4, 8, 12}


def test_a_stop_ends_all_jobs_and_starts_no_new_one(tmp_path):
    stop, executor = Stop(), Invented()
    controller = controller_of(tmp_path, executor, *GRID, stop=stop)
    for number, _ in enumerate(controller.steps()):
        if number == 2:
            stop.notice(signal.SIGTERM, 0.0)
    assert len(executor.started) == 2 and sorted(executor.stopped) == sorted(executor.started)
    assert sorted(str(s) for s in statuses(controller).values()) == ["None"] * 4 + ["interrupted"] * 2
    done = executor.steps
    run(tmp_path, executor, *GRID)
    assert executor.steps == 6 * 16 and done > 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_ends_the_sweep_and_blames_no_job(number, tmp_path, monkeypatch):
    full = f"the last checkpoint could not be written: {os.strerror(number)}"
    accident = kill_once(4)
    executor = Invented(accidents=lambda job, step: full if accident(job, step) else None)
    controller = run(tmp_path, executor, *GRID)
    assert full in controller.failure and len(executor.started) == 2
    assert "failed" not in statuses(controller).values()
    assert set(statuses(run(tmp_path, Invented(), *GRID)).values()) == {"finished"}

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(SweepFailed, match=r"jobs\.jsonl cannot be written"):
        controller.journal.begin([])


def test_a_job_that_another_process_trains_is_left_to_it(tmp_path, monkeypatch):
    busy = set()
    monkeypatch.setattr("tabicl_train.sweep.controller.owner_is_alive", lambda folder: folder.name[:-9] in busy)
    busy.add("seed-0")
    executor = Invented()
    controller = controller_of(tmp_path, executor, "seed=0,1")
    for _ in controller.steps():
        if not executor.running:
            assert [name[:-9] for name in executor.started] == ["seed-1"]
            busy.clear()
    assert [name[:-9] for name in executor.started] == ["seed-1", "seed-0"]


def test_a_job_that_outlived_the_sweep_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr("tabicl_train.sweep.controller.owner_is_alive", lambda folder: True)
    executor = Invented()
    executor.has = lambda job: True
    assert set(statuses(run(tmp_path, executor, "seed=0,1")).values()) == {"finished"} and len(executor.started) == 2


def test_the_events_tell_the_whole_story(tmp_path):
    run(tmp_path, Invented(accidents=kill_once(6)), "optimizer.momentum=0.9", "seed=3")
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["event"] for event in events] == ["sweep", "planned", "started", "ended", "started", "ended"]
    assert events[1]["params"] == {} and events[1]["seed"] == 3
    assert "optimizer.momentum=0.9" in events[1]["overrides"] and "seed=3" in events[1]["overrides"]
    assert not any("run_dir" in text for text in events[1]["overrides"])
    assert [event.get("status") for event in events[3::2]] == ["interrupted", "finished"]


def test_when_the_sweep_cannot_go_on_its_jobs_are_stopped(tmp_path, monkeypatch):
    executor = Invented()
    controller = controller_of(tmp_path, executor, *GRID)
    next(controller.steps())
    monkeypatch.setattr(
        controller.journal.records, "append_line", lambda name, _: controller.journal.records.failing.add(name)
    )
    with pytest.raises(SweepFailed):
        for _ in controller.steps():
            pass
    controller.end_all()
    assert not controller.running and set(executor.stopped) <= set(executor.started)
    assert set(statuses(run(tmp_path, Invented(), *GRID)).values()) == {"finished"}
