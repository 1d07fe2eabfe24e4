import math
import shutil

import pytest
import torch
from runs import metrics
from short_runs import run

from tabicl_train import module
from tabicl_train.commands import replay as replay_command
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.curriculum import plan_step
from tabicl_train.debugging.preflight import differences, preflight
from tabicl_train.debugging.replay import replay
from tabicl_train.errors import ConfigError
from tabicl_train.stream import draw_table

SETTINGS = ["experiment=smoke", "stream.num_workers=0", "trainer.accelerator=cpu", "preflight_steps=8"]
QUERY_LOSSES = module.query_losses


@pytest.mark.slow
def test_bf16_passes_and_nothing_is_written(tmp_path, capsys):
    preflight(compose([*SETTINGS, f"run_dir={tmp_path}/run", "trainer.precision=bf16"]))
    printed = capsys.readouterr().err
    assert "preflight fp32 and bf16 mixed, fp32 weights (as configured), steps 0..7" in printed
    assert printed.splitlines()[-1] == "preflight bf16 is fit for this run"
    rows = [line.split() for line in printed.splitlines() if len(line.split()) == 7 and line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == list(range(8))
    assert all(float(row[2]) == pytest.approx(float(row[1]), rel=0.03) for row in rows)
    assert not list(tmp_path.iterdir())


def test_fp32_has_nothing_to_compare(capsys):
    preflight(compose(SETTINGS))
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "words"), [(1.2, "the loss of bf16 is"), (math.nan, "bf16 gives loss nan")])
def test_deviations_from_fp32_are_refused(factor, words, monkeypatch):
    def worse_in_bf16(*arguments):
        return QUERY_LOSSES(*arguments) * (factor if torch.is_autocast_enabled("cpu") else 1.0)

    monkeypatch.setattr(module, "query_losses", worse_in_bf16)
    with pytest.raises(ConfigError, match=words):
        preflight(compose([*SETTINGS, "preflight_steps=3", "trainer.precision=bf16"]))


def test_each_difference_has_its_limit():
    reference = [(2.0, 1.0, 5.0)] * 10
    assert differences(reference, [(2.03, 1.2, 5.5)] * 10, "bf16") == []
    (problem,) = differences(reference, [(2.0, 1.0, 5.0)] * 9 + [(2.0, 1.0, 7.0)], "bf16")
    assert "largest multiplier of bf16 is 7" in problem
    (problem,) = differences(reference, [(2.0, 0.7, 5.0)] * 10, "bf16")
    assert "gradient norm of bf16 is 0.7" in problem
    (problem,) = differences(reference, [(2.06, 1.0, 5.0)] * 10, "bf16")
    assert "the loss of bf16 is 2.0600" in problem
    overflow = [(2.0, math.inf, 5.0)] * 2 + reference[2:]
    assert differences(reference, overflow, "fp16") == []
    assert "gradient norm inf in step 0 of the preflight" in differences(reference, overflow, "bf16")[0]


@pytest.mark.slow
def test_a_preflight_starts_from_the_newest_checkpoint_of_the_run(tmp_path, capsys):
    run(tmp_path / "run", "trainer.max_steps=4")
    capsys.readouterr()
    settings = [*SETTINGS, "prior=dummy", "curriculum.stages.smoke.steps=16", "trainer.precision=bf16"]
    preflight(compose([*settings, f"run_dir={tmp_path}/run", "preflight_steps=2"]))
    assert "steps 4..5" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_uses_the_weights_that_the_run_had(tmp_path, capsys, monkeypatch):
    run(tmp_path / "run", "prior=mlp_scm")
    capsys.readouterr()
    for step in (2, 6, 15):  # before the first checkpoint, between two, at the end
        monkeypatch.setattr("sys.argv", ["tabicl-replay", f"run_dir={tmp_path}/run", f"step={step}"])
        replay_command()
        printed = capsys.readouterr().out
        row = metrics(tmp_path / "run")[step]
        assert f"all tables: loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.4g}" in printed
        tables = [line.split() for line in printed.splitlines() if len(line.split()) == 7 and line.split()[0].isdigit()]
        assert sorted(int(line[0]) for line in tables) == list(range(8))
        assert sum(float(line[5]) for line in tables) / 8 == pytest.approx(float(row["loss"]), rel=1e-4)
    with pytest.raises(ConfigError, match=r"the run has steps 0\.\.15"):
        replay(str(tmp_path / "run"), 16)
    shutil.rmtree(tmp_path / "run/checkpoints")  # as after a run that ended before its first checkpoint
    replay(str(tmp_path / "run"), 2)
    row = metrics(tmp_path / "run")[2]
    assert f"all tables: loss {float(row['loss']):.6g}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no run in it"):
        replay(str(tmp_path / "nowhere"), 1)


@pytest.mark.slow
def test_a_replay_marks_the_table_that_is_not_finite(tmp_path, capsys, monkeypatch):
    run(tmp_path / "run", "trainer.max_steps=4")
    config = compose(["experiment=smoke", "prior=dummy", "curriculum.stages.smoke.steps=16"])
    group = plan_step(config.curriculum, config.model, config.seed, 2).groups[0]
    bad = draw_table(build_prior(config.prior), group.spec, config.seed, 2, group.tables[1])

    def poisoned(model, pack, *settings):
        is_bad = any(torch.equal(X, bad.X) for X, _, _ in pack.tables())
        return QUERY_LOSSES(model, pack, *settings) * (math.nan if is_bad else 1.0)

    monkeypatch.setattr(module, "query_losses", poisoned)
    replay(str(tmp_path / "run"), 2)
    printed = capsys.readouterr().out
    (marked,) = [line.split()[0] for line in printed.splitlines() if line.endswith("<- non-finite")]
    assert marked == str(group.tables[1])
    assert "the step is skipped" in printed and "non-finite weights: 0" in printed
