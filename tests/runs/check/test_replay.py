"""Replays of a step, also of a run that was rewound."""

import dataclasses
import math
import shutil
from pathlib import Path

import pytest
import torch
from command_line import command
from training_runs import REWIND, THREE_STAGES, Ruin, read_metrics, train_short_run

from tabicl_train.check.replay import replay, replay_values
from tabicl_train.config.compose import compose, from_values
from tabicl_train.config.schema import configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.stream.curriculum import plan_step
from tabicl_train.stream.steps import draw_table
from tabicl_train.training import module
from tabicl_train.training.callbacks import guard

QUERY_LOSSES = module.query_losses


def replayed(run_dir: Path, step: int) -> str:
    """What tabicl-replay prints, which ends with loss and gradient norm of the run."""
    result = command("replay", f"run_dir={run_dir}", f"step={step}")
    assert result.returncode == 0, result.stderr
    row = read_metrics(run_dir)[step]
    norms = f"all tables: loss {float(row['loss']):.6g}, gradient norm {float(row['grad_norm']):.4g}; the step is taken"
    assert result.stdout.splitlines()[-1] == norms
    return result.stdout


def test_a_replay_uses_the_weights_that_the_run_had(tmp_path, monkeypatch):
    train_short_run(tmp_path / "run", "prior=mlp_scm", "trainer.max_steps=7")
    for step in (2, 6):  # before the first checkpoint, after it
        rows = [line.split() for line in replayed(tmp_path / "run", step).splitlines()]
        tables = [row for row in rows if len(row) == 7 and row[0].isdigit()]
        assert sorted(int(row[0]) for row in tables) == list(range(4))
        loss = float(read_metrics(tmp_path / "run")[step]["loss"])
        assert sum(float(row[5]) for row in tables) / 4 == pytest.approx(loss, rel=1e-4)
    with pytest.raises(ConfigError, match=r"the run has steps 0\.\.6"):
        replay(str(tmp_path / "run"), 7)
    shutil.rmtree(tmp_path / "run/checkpoints")  # as after a run that ended before its first checkpoint
    replayed(tmp_path / "run", 2)
    with pytest.raises(ConfigError, match="there is no run in it"):
        replay(str(tmp_path / "nowhere"), 1)


def test_a_replay_marks_the_table_that_is_not_finite(tmp_path, capsys, monkeypatch):
    train_short_run(tmp_path / "run", "trainer.max_steps=4")
    config = compose(["experiment=smoke", "prior=dummy"])
    group = plan_step(config.curriculum, config.model, config.seed, 2).groups[0]
    bad = draw_table(configured_prior(config.prior), group.spec, config.seed, 2, group.tables[1])

    def poisoned(model, pack, *settings):
        is_bad = any(torch.equal(X, bad.X) for X, _, _ in pack.tables())
        return QUERY_LOSSES(model, pack, *settings) * (math.nan if is_bad else 1.0)

    monkeypatch.setattr(module, "query_losses", poisoned)
    replay(str(tmp_path / "run"), 2)
    printed = capsys.readouterr().out
    (marked,) = [line.split()[0] for line in printed.splitlines() if line.endswith("<- non-finite")]
    assert marked == str(group.tables[1])
    assert "the step is skipped" in printed
    assert "non-finite weights: 0" in printed


@pytest.mark.slow
def test_a_rewound_run_is_replayed_from_checkpoints_after_the_rewind_only(tmp_path, monkeypatch):
    """Back from 8 to 6, the end of the first stage; checkpoints are saved every two steps."""
    monkeypatch.setattr(guard, "HORIZON", 2)
    monkeypatch.setattr(guard, "MEMORY", 0.5)
    train_short_run(tmp_path / "run", *REWIND, "trainer.max_steps=10", callbacks=(Ruin(7),), settings=THREE_STAGES)
    replayed(tmp_path / "run", 6)
    replayed(tmp_path / "run", 9)  # from the checkpoint of step 8, saved after it
    (tmp_path / "run/checkpoints/step-00000008.ckpt").unlink()
    with pytest.raises(ConfigError, match="the run went back from step 8 to 6, and no checkpoint between"):
        replay(str(tmp_path / "run"), 9)


def test_a_replay_needs_neither_devices_nor_files_that_it_does_not_use():
    values = dataclasses.asdict(compose(["experiment=smoke"]))
    values |= {"init_weights": "gone.ckpt", "trainer": values["trainer"] | {"accelerator": "cuda", "devices": 8}}
    config = from_values(replay_values(values, from_checkpoint=True))
    assert config.init_weights is None
    assert config.trainer.accelerator == "auto"
    assert config.trainer.devices is None
    with pytest.raises(ConfigError, match=r"init_weights is 'gone\.ckpt'"):  # from step 0 it needs them
        from_values(replay_values(values, from_checkpoint=False))


def test_a_run_with_another_table_stream_is_refused(tmp_path):
    content = {"global_step": 4, "state_dict": {}, "config": dataclasses.asdict(compose(["experiment=smoke"]))}
    (tmp_path / "checkpoints").mkdir()
    torch.save(content | {"run": {"stream_version": 999}}, tmp_path / "checkpoints/step-00000004.ckpt")
    with pytest.raises(ConfigError, match=r"04\.ckpt cannot be replayed: the version of the table stream was 999"):
        replay(str(tmp_path), 5)
