import dataclasses

import pytest
import yaml
from command_line import exit_code
from runs import metrics

from tabicl_train.config.compose import compose_sweep
from tabicl_train.config.schema import StageConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes.signals import watch_signals


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
        ("seed=interval(-2,3)", "seed: Value '-2.0' of type 'float' could not be converted to Integer"),
        ("averages.ema=interval(2,3)", "averages.ema is 2.0; it must lie in [0, 1)"),
    ],
)
def test_every_combination_of_a_sweep_is_checked(override, problem):
    with pytest.raises(ConfigError) as caught:
        compose_sweep(["experiment=smoke", "name=a,b", override], "train", None, None)
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # The typo is in every job, the wrong seed in the third one only.
        (["model.embed_dm=1", "seed=0,1,-1"], ["model.embed_dm: no such setting", "seed is -1"]),
        (
            ["trainer.precision=fp32,bf17", "seed=0,x"],
            ["trainer.precision is 'bf17'", "seed: Value 'x' of type 'str'"],
        ),
        (
            ["optimizer=muon,sgd", "trainer.max_steps=1,0"],
            ["optimizer=sgd: there is no such choice", "trainer.max_steps is 0"],
        ),
    ],
)
def test_different_mistakes_of_different_jobs_are_reported_at_once(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        compose_sweep(["experiment=smoke", *overrides], "train", None, None)
    found = sorted(caught.value.problems)
    assert len(found) == 2 and all(line.startswith(start) for line, start in zip(found, sorted(expected), strict=True))


def test_combinations_of_a_sweep():
    configs = compose_sweep(["experiment=smoke", "seed=1,2", "prior=glob(mix*)"], "train", None, None)
    assert [c.seed for c in configs] == [1, 1, 2, 2]


@pytest.mark.multi_process
def test_a_sweep_over_a_new_stage_of_own_configurations(own_configs, tmp_path, monkeypatch):
    with watch_signals() as stop:
        stop.started -= 7200  # the jobs before took two hours: max_hours is the time of a job
        assert not exit_code(
            monkeypatch, "train", "-m", "--config-dir", str(own_configs), "experiment=own", f"run_dir={tmp_path}/sweep",
            "+curriculum.stages.long.steps=5,6", "trainer.max_hours=1", "trainer.max_steps=1",
        )  # fmt: skip
    for job, steps in ("0", 5), ("1", 6):
        run_dir = tmp_path / "sweep" / job
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        assert config["curriculum"]["stages"]["long"] == dataclasses.asdict(StageConfig(steps=steps))
        assert config["run_dir"] == str(run_dir) and len(metrics(run_dir)) == 1


def test_typos_of_a_sweep_end_it_before_it_begins(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, "train", "-m", "experiment=smoke", "seed=0,1", "model.embed_dm=1") == 2
    assert capfd.readouterr().err == "error: model.embed_dm: no such setting; did you mean model.embed_dim?\n"
    assert not list(tmp_path.iterdir())
