"""Optuna's searches and pruners with jobs that train nothing."""

import math
import signal

import pytest
from invented_jobs import SETTINGS, Invented, run, statuses

from tabicl_train.errors import ConfigError, is_installed
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.results import read_sweep
from tabicl_train.sweep.search import NAME

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow  # each point is composed

SPACE = ("optimizer.momentum=interval(0.0,0.99)", "sweep.method=tpe", "sweep.trials=12")


def loss(job, step: int) -> float:
    """Best at a momentum of 0.7; worse the earlier, and for other seeds."""
    return 1 + (job.params["optimizer.momentum"] - 0.7) ** 2 + 1 / step + job.seed / 10


def momenta(folder) -> list[float]:
    jobs = [job for job in read_sweep(folder).jobs if job.seed == 0]
    return [job.params["optimizer.momentum"] for job in jobs]


def trials(folder) -> list:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / NAME)))
    (study,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=study, storage=storage).get_trials()


def test_a_search_learns_from_the_points_before(tmp_path):
    run(tmp_path, Invented(loss), *SPACE, "sweep.trials=30")
    found = momenta(tmp_path)
    assert len(found) == 30
    first, later = ([abs(m - 0.7) for m in part] for part in (found[:10], found[15:]))
    assert sum(later) / len(later) < sum(first) / len(first)


def test_the_value_of_a_point_is_the_mean_over_its_seeds(tmp_path):
    run(tmp_path, Invented(loss), *SPACE, "sweep.trials=3", "seed=0,1,2", "sweep.pruner=median")
    for trial in trials(tmp_path):
        expected = 1 + (trial.params["optimizer.momentum"] - 0.7) ** 2 + 1 / 16 + 0.1
        assert math.isclose(trial.value, expected) and len(trial.intermediate_values) == 7
        assert math.isclose(trial.intermediate_values[4], expected - 0.1 - 1 / 16 + 1 / 4)  # of the first seed


def one_at_a_time() -> Invented:
    """With several at once, a point depends on which results were there."""
    executor = Invented(loss)
    executor.limit = 1
    return executor


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    """The points of a search that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, one_at_a_time(), *SPACE)
    return momenta(folder)


@pytest.mark.parametrize("polls", [1, 13, 30])
def test_a_search_that_was_killed_goes_on_with_the_same_points(polls, undisturbed, tmp_path):
    executor = one_at_a_time()
    run(tmp_path / "killed", executor, *SPACE, polls=polls)
    executor.running.clear()
    with open(tmp_path / "killed" / NAME, "a") as file:
        file.write('{"op_code":')
    (tmp_path / "killed" / f"{NAME}.lock").symlink_to(tmp_path)
    run(tmp_path / "killed", executor, *SPACE)
    assert momenta(tmp_path / "killed") == undisturbed
    ended = trials(tmp_path / "killed")
    assert [trial.number for trial in ended] == list(range(12))
    assert all(trial.state == optuna.trial.TrialState.COMPLETE for trial in ended)
    again = Invented(loss)
    run(tmp_path / "killed", again, *SPACE)
    assert again.started == []
    run(tmp_path / "killed", again, *SPACE, "sweep.trials=13")
    assert len(again.started) == 1
    run(tmp_path / "killed", again, *SPACE, "sweep.trials=3")
    assert len(again.started) == 1 and momenta(tmp_path / "killed") == undisturbed[:3]


@pytest.mark.parametrize("method", ["tpe", "random", "grid"])
def test_a_pruned_search_takes_less_than_half_the_steps(method, tmp_path):
    momentum = ",".join(str(7 * i % 24 / 24) for i in range(24)) if method == "grid" else "interval(0.0,0.99)"
    space = (f"optimizer.momentum={momentum}", f"sweep.method={method}", "sweep.trials=24", "seed=0,1")
    pruned, all_steps = Invented(loss), 24 * 2 * 16
    controller = run(tmp_path / "pruned", pruned, *space, "sweep.pruner=halving")
    assert pruned.steps < all_steps / 2
    found = list(statuses(controller).values())
    assert set(found) == {"finished", "pruned"} and len(found) == 48
    kept = min(job.value for job in read_sweep(tmp_path / "pruned").jobs if job.status == "finished")
    if method != "tpe":  # whose points depend on the results
        run(tmp_path / "whole", Invented(loss), *space)
        assert kept < min(job.value for job in read_sweep(tmp_path / "whole").jobs) + 0.1
    again = Invented(loss)
    run(tmp_path / "pruned", again, *space, "sweep.pruner=halving")
    assert again.started == []
    if method == "grid":  # without a pruner, those that were stopped go on from where they were
        whole_now = run(tmp_path / "pruned", again, *space)
        assert set(statuses(whole_now).values()) == {"finished"} and pruned.steps + again.steps <= all_steps + 48 * 4


def test_the_median_stops_what_is_worse(tmp_path):
    run(tmp_path, Invented(loss), *SPACE, "sweep.method=random", "sweep.trials=20", "sweep.pruner=median")
    jobs = read_sweep(tmp_path).jobs
    pruned = [job for job in jobs if job.status == "pruned"]
    assert pruned and all(job.reason.startswith("real/loss ") for job in pruned)
    distance = {
        s: [abs(j.params["optimizer.momentum"] - 0.7) for j in jobs if j.status == s] for s in ("pruned", "finished")
    }
    assert min(distance["pruned"]) > min(distance["finished"])


def test_a_point_that_fails_is_told_and_does_not_end_the_search(tmp_path):
    def accidents(job, step):
        return "it diverged" if job.params["optimizer.momentum"] > 0.5 else None

    run(tmp_path, Invented(loss, accidents), *SPACE)
    states = {trial.state for trial in trials(tmp_path)}
    assert states == {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL}
    assert len(read_sweep(tmp_path).jobs) == 12


def test_a_point_that_cannot_be_composed_fails_alone(tmp_path):
    """Both ends are possible, but not what lies between: the width must be a multiple of the heads."""
    space = ("model.embed_dim=int(interval(16,32))", "sweep.method=tpe", "sweep.trials=6")
    found = statuses(run(tmp_path, Invented(lambda job, step: 1.0), *space))
    assert "failed" in found.values()
    reasons = {job.reason for job in read_sweep(tmp_path).jobs if job.status == "failed"}
    assert all("model." in reason for reason in reasons)


def test_a_killed_job_of_a_search_is_resumed(tmp_path):
    controller = run(tmp_path, Invented(loss, lambda job, step: -signal.SIGKILL if step == 2 else None), *SPACE)
    assert set(statuses(controller).values()) == {"failed"}  # it never reaches its first checkpoint
    assert len(trials(tmp_path)) == 12


def test_choices_of_groups_and_lists_are_points_too(tmp_path):
    space = (
        "optimizer=muon,adamw",
        "curriculum.stages.smoke.rows=[40,50],[50,60]",
        "sweep.method=tpe",
        "sweep.trials=5",
    )
    run(tmp_path, Invented(lambda job, step: 1.0), *space)
    for job in read_sweep(tmp_path).jobs:
        assert job.params["optimizer"] in ("muon", "adamw")
        assert job.params["curriculum.stages.smoke.rows"] in ([40, 50], [50, 60])


def test_without_optuna_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr("tabicl_train.config.sweep.is_installed", lambda name: name != "optuna" and is_installed(name))
    with pytest.raises(ConfigError) as caught:
        make_plan([*SETTINGS, *SPACE])
    assert len(caught.value.problems) == 1
    assert "sweep.method=tpe needs optuna" in str(caught.value) and "[sweep]" in str(caught.value)
    make_plan([*SETTINGS, "seed=0,1"])
