"""Runs of several stages: boundaries, fresh optimizers, frozen parts, and a later start."""

from pathlib import Path

import pytest
import torch
from training_runs import THREE_STAGES, assert_same_end, assert_same_state, read_metrics, train_short_run

from tabicl_train.errors import ConfigError
from tabicl_train.run.checkpoint import saved
from tabicl_train.weights.export import export

STEPS = (("stage1", 3), ("stage2", 3), ("stage3", 1))
SETTINGS = [*THREE_STAGES, *(f"curriculum.stages.{stage}.steps={steps}" for stage, steps in STEPS)]


def train_three_stages(run_dir: Path, *overrides: str) -> None:
    assert train_short_run(run_dir, "checkpoint.every=1", *overrides, settings=SETTINGS) == "finished"


def checkpoint(run_dir: Path, name: str) -> dict:
    return torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)


def steps_in_optimizer(run_dir: Path, step: int) -> set[int]:
    (states,) = checkpoint(run_dir, f"step-{step:08d}")["optimizer_states"]
    return {int(state["taken"]) for state in states["state"].values() if "taken" in state}


@pytest.fixture(scope="module")
def three_stages(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("stages") / "run"
    train_three_stages(run_dir)
    return run_dir


def test_stages_follow_each_other_with_a_named_checkpoint_each_and_a_fresh_optimizer(three_stages):
    rows = read_metrics(three_stages)
    assert [row["stage"] for row in rows] == ["stage1"] * 3 + ["stage2"] * 3 + ["stage3"]
    assert float(rows[3]["lr"]) == 1e-4
    for stage, step in (("stage1", 3), ("stage2", 6), ("stage3", 7)):
        named, numbered = checkpoint(three_stages, f"stage-{stage}"), checkpoint(three_stages, f"step-{step:08d}")
        assert named["global_step"] == step
        assert_same_state(named, numbered)
    assert [steps_in_optimizer(three_stages, step) for step in (3, 5, 7)] == [{3}, {2}, {1}]


def test_interruption_at_a_boundary_changes_nothing(three_stages, tmp_path):
    for stop in (3, 4, 6, 7):
        train_three_stages(tmp_path / "run", f"trainer.max_steps={stop}")
    assert_same_end(tmp_path / "run", three_stages)


def test_an_optimizer_is_kept_frozen_parts_stay_and_another_optimizer_starts_anew(three_stages, tmp_path):
    stage = ["curriculum.stages.stage2.fresh_optimizer=false", "curriculum.stages.stage2.frozen=[column,row]"]
    train_three_stages(tmp_path / "run", *stage, "trainer.max_steps=5")
    assert steps_in_optimizer(tmp_path / "run", 5) == {3, 5}  # of frozen and of trained parts
    before, after = (checkpoint(tmp_path / "run", f"step-0000000{n}")["state_dict"] for n in (3, 5))
    assert {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])} == {"icl_predictor"}

    train_three_stages(tmp_path / "run", *stage, "optimizer=adamw", "resume.allow_changes=true", "trainer.max_steps=6")
    assert steps_in_optimizer(tmp_path / "run", 6) == {1}
    moved = checkpoint(tmp_path / "run", "step-00000006")["state_dict"]
    assert 0 < max((moved[key] - value).abs().max() for key, value in after.items()) < 0.1  # from the run's weights


def test_a_run_starts_at_a_later_stage_from_weights(three_stages, tmp_path):
    export(str(three_stages / "checkpoints/stage-stage1.ckpt"), str(tmp_path / "start.ckpt"))
    train_three_stages(tmp_path / "run", "curriculum.start=stage2", f"init_weights={tmp_path}/start.ckpt")
    assert [path.stem for path in saved(tmp_path / "run/checkpoints")][-1] == "step-00000004"
    assert [row["stage"] for row in read_metrics(tmp_path / "run")] == ["stage2"] * 3 + ["stage3"]
    with pytest.raises(ConfigError, match=r"curriculum\.start is 'third'; it must be one of stage1"):
        train_three_stages(tmp_path / "third", "curriculum.start=third")
