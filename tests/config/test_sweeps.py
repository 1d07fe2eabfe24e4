import pytest
from command_line import exit_code

from tabicl_train.errors import ConfigError
from tabicl_train.sweep.plan import make_plan


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.embed_dm=8,16", "model.embed_dm: no such setting; did you mean model.embed_dim?"),
        ("trainer.max_steps=range(0,3)", "trainer.max_steps is 0; it must be at least 1"),
        (
            "trainer.precision=choice(fp32,bf17)",
            "trainer.precision is 'bf17'; it must be one of auto, fp32, bf16, fp16",
        ),
        ("optimizer=muon,sgd", "optimizer=sgd: there is no such choice; there are adamw, muon, muon_all"),
        ("seed=interval(-2,3)", "seed=interval(-2,3): a seed must be a whole number"),
    ],
)
def test_every_combination_of_a_sweep_is_checked(override, problem):
    with pytest.raises(ConfigError) as caught:
        make_plan(["experiment=smoke", "name=a,b", override])
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # The typo is in every job, the wrong number of steps in the third one only.
        (
            ["model.embed_dm=1", "trainer.max_steps=2,1,0"],
            ["model.embed_dm: no such setting", "trainer.max_steps is 0"],
        ),
        (
            ["trainer.precision=fp32,bf17", "seed=0,x"],
            ["trainer.precision is 'bf17'", "seed=0,x: a seed must be a whole number"],
        ),
        (
            ["optimizer=muon,sgd", "trainer.max_steps=1,0"],
            ["optimizer=sgd: there is no such choice", "trainer.max_steps is 0"],
        ),
    ],
)
def test_different_mistakes_of_different_jobs_are_reported_at_once(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        make_plan(["experiment=smoke", *overrides])
    found = sorted(caught.value.problems)
    assert len(found) == 2 and all(line.startswith(start) for line, start in zip(found, sorted(expected), strict=True))


def test_combinations_of_a_sweep():
    plan = make_plan(["experiment=smoke", "seed=1,2", "prior=glob(mix*)"])
    assert plan.points == [{"prior": "mix_scm"}, {"prior": "mix_scm_causal"}] and plan.sweep.seeds == [1, 2]


@pytest.mark.parametrize("command", [("train", "-m"), ("sweep",)])
def test_a_sweep_without_settings_does_not_start_the_default_run(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, *command) == 2
    assert capfd.readouterr().err.startswith("error: there are no settings; tabicl-sweep ")
    assert not list(tmp_path.iterdir())


def test_typos_of_a_sweep_end_it_before_it_begins(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "train", "-m", "experiment=smoke", "seed=0,1", "model.embed_dm=1") == 2
    assert capfd.readouterr().err == "error: model.embed_dm: no such setting; did you mean model.embed_dim?\n"
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_sweep_is_not_taken_for_that_of_a_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "study.log").touch()
    assert exit_code(monkeypatch, "train", "experiment=smoke", f"run_dir={tmp_path}") == 2
    assert "it is the folder of a sweep" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["study.log"]
