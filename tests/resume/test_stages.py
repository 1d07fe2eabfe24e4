"""Runs of several stages: boundaries, fresh optimizers, frozen parts, and changed configurations."""

from pathlib import Path

import pytest
import runs
import torch

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.checkpoint import saved

pytestmark = pytest.mark.slow

TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")


def run(run_dir: Path, *overrides: str, code: int = 0) -> str:
    """mini_v2 with stages of 4, 5 and 1 steps on small tables of noise."""
    settings = [
        "curriculum=mini_v2", "prior=dummy", "stream.num_workers=0", "checkpoint.every=1", "checkpoint.keep=100",
    ]  # fmt: skip
    for stage, steps in (("stage1", 4), ("stage2", 5), ("stage3", 1)):
        settings += [f"curriculum.stages.{stage}.{value}" for value in (f"steps={steps}", *TABLES)]
    return runs.run(run_dir, *settings, *overrides, code=code)


def checkpoint(run_dir: Path, name: str) -> dict:
    return torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)


def steps_in_optimizer(content: dict) -> set[int]:
    return {int(s["taken"]) for s in content["optimizer_states"][0]["state"].values() if "taken" in s}


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("stages") / "run"
    run(run_dir)
    return run_dir


def test_stages_follow_each_other_with_a_named_checkpoint_each(two_stages):
    rows = runs.metrics(two_stages)
    assert [row["stage"] for row in rows] == ["stage1"] * 4 + ["stage2"] * 5 + ["stage3"]
    assert float(rows[4]["lr"]) == 1e-3
    for stage, step in (("stage1", 4), ("stage2", 9), ("stage3", 10)):
        named, numbered = checkpoint(two_stages, f"stage-{stage}"), checkpoint(two_stages, f"step-{step:08d}")
        assert named["global_step"] == step
        assert all(torch.equal(v, numbered["state_dict"][k]) for k, v in named["state_dict"].items())


def test_the_optimizer_is_fresh_at_a_stage_or_kept(two_stages, tmp_path):
    assert steps_in_optimizer(checkpoint(two_stages, "step-00000004")) == {4}
    assert steps_in_optimizer(checkpoint(two_stages, "step-00000006")) == {2}
    run(tmp_path / "kept", "curriculum.stages.stage2.fresh_optimizer=false")
    assert steps_in_optimizer(checkpoint(tmp_path / "kept", "step-00000006")) == {6}


def test_interruption_at_a_boundary_changes_nothing(two_stages, tmp_path):
    for stop in (4, 5, 9, 10):
        run(tmp_path / "run", f"trainer.max_steps={stop}")
    for step in (5, 10):
        a, b = (checkpoint(folder, f"step-{step:08d}") for folder in (two_stages, tmp_path / "run"))
        assert all(torch.equal(v, b["state_dict"][k]) for k, v in a["state_dict"].items())
        for p, state in a["optimizer_states"][0]["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer_states"][0]["state"][p][key]))


def test_frozen_parts_keep_their_weights(tmp_path):
    run(tmp_path / "run", "curriculum.stages.stage2.frozen=[column,row]")
    before, after = (checkpoint(tmp_path / "run", f"step-{n:08d}")["state_dict"] for n in (4, 9))
    changed = {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"icl_predictor"}


def test_a_run_starts_at_a_later_stage_from_weights(two_stages, tmp_path):
    from tabicl_train.prediction.export import export

    export(str(two_stages / "checkpoints/stage-stage1.ckpt"), str(tmp_path / "start.ckpt"))
    run(tmp_path / "run", "curriculum.start=stage2", f"init_weights={tmp_path}/start.ckpt")
    assert [f.stem for f in saved(tmp_path / "run/checkpoints")][-1] == "step-00000006"
    with pytest.raises(ConfigError, match=r"curriculum\.start is 'third'; it must be one of smoke"):
        compose(["experiment=smoke", "curriculum.start=third"])


def test_changes_on_resume_are_reported_and_breaking_ones_refused(two_stages, tmp_path):
    run_dir = tmp_path / "run"
    run(run_dir, "trainer.max_steps=2")
    changed = run(run_dir, "trainer.max_steps=3", "stream.num_workers=1", "curriculum.stages.stage2.clip=3.0")
    assert "changed   stream.num_workers was 0, is 1" in changed
    assert "changed   curriculum.stages.stage2.clip was 1.0, is 3.0" in changed
    broken = run(run_dir, "curriculum.stages.stage1.clip=3.0", "seed=5", "model.icl_num_blocks=1", code=2)
    assert "Traceback" not in broken
    for words in ("curriculum.stages.stage1.clip was 1.0, is 3.0", "seed was 0, is 5", "model.icl_num_blocks was 2"):
        assert words in broken
    allowed = run(run_dir, "curriculum.stages.stage1.clip=3.0", "resume.allow_changes=true")
    assert "changed   curriculum.stages.stage1.clip" in allowed


def test_a_changed_optimizer_starts_anew_and_a_changed_model_is_always_refused(tmp_path):
    run_dir = tmp_path / "run"
    run(run_dir, "trainer.max_steps=2")
    other = ("resume.allow_changes=true", "trainer.max_steps=4")
    refused = run(run_dir, "model.icl_num_blocks=1", *other, code=2)
    assert "model.icl_num_blocks was 2, is 1; choose a new run_dir\n" in refused
    allowed = run(run_dir, "optimizer=adamw", *other)
    assert "changed   optimizer.name was muon, is adamw" in allowed
    before, after = checkpoint(run_dir, "step-00000002"), checkpoint(run_dir, "step-00000004")
    assert steps_in_optimizer(before) == steps_in_optimizer(after) == {2}
    moved = max((after["state_dict"][k] - v).abs().max() for k, v in before["state_dict"].items())
    assert 0 < moved < 0.1  # from the weights of the run, not from new ones
