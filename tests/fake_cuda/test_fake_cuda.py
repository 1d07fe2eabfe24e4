"""The training step on a GPU, without one: see fake_device.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_device import CannotBuild, build_guard
from kernel_limits import KernelLimit, launch
from planted_faults import FAULTS

from tabicl_train.config.compose import compose
from tabicl_train.curriculum import plan_step
from tabicl_train.model.attention import batch_limit

PROBE = Path(__file__).with_name("probe.py")
FIRST = {"stage1": 0, "stage2": 500_000, "stage3": 540_000}  # steps of the curriculum tabicl_v2
FEW_BLOCKS = ("model.col_num_blocks=1", "model.row_num_blocks=2", "model.icl_num_blocks=2")


@pytest.fixture(scope="module")
def probe(request):
    """Runs probe.py and returns what it reports."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA of its own")
    folder = request.config.cache.mkdir("fake_cuda")
    try:
        build_guard(folder)
    except CannotBuild as error:
        pytest.skip(str(error))

    def probe(*arguments: str) -> dict:
        command = [sys.executable, PROBE, *arguments, f"guard={folder}"]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return probe


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "stage, overrides",
    [
        ("stage1", ("tables=2",)),
        ("stage1", ("tables=1", "trainer.precision=fp32")),
        ("stage2", ("tables=1", "trainer.precision=fp16", "model.dropout=0.1")),
        ("stage3", ("tables=2",)),
    ],
)
def test_a_step_never_waits_for_the_device(probe, stage, overrides):
    """Optimizer and callbacks included; everything stays on the device."""
    settings = [f"curriculum.stages.{stage}.{text}" if text.startswith("tables") else text for text in overrides]
    assert probe("check", f"step={FIRST[stage]}", *FEW_BLOCKS, *settings) == {"off_device": []}


@pytest.fixture(scope="module")
def errors(probe) -> dict:
    return probe("faults")


@pytest.mark.multi_process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(errors, fault):
    _, _, expected = FAULTS[fault]
    name, _ = errors[fault]
    assert name == expected


@pytest.mark.parametrize("stage", FIRST)
def test_attention_of_planned_steps_fits_its_kernels(stage):
    """Dimensions of the real model; whatever the priors draw, no table is wider than planned."""
    config = compose(["curriculum=tabicl_v2", "run_dir=unused"])
    m = config.model
    for step in range(FIRST[stage], FIRST[stage] + 200):
        for batch in plan_step(config.curriculum, m, config.seed, step).micro_batches:
            tables, rows, features = len(batch.tables), batch.spec.num_rows, batch.spec.num_features
            for sequences, heads, queries, width in (
                (tables * features, m.col_num_heads, m.col_num_inducing, m.embed_dim),
                (tables * features, m.col_num_heads, rows, m.embed_dim),
                (tables * rows, m.row_num_heads, features + m.row_num_cls, m.embed_dim),
                (tables, m.icl_num_heads, rows, m.row_dim),
            ):
                limit = batch_limit(heads, queries, width // heads)
                launch(min(sequences, limit), heads, queries, width // heads)


def test_limits_of_a_launch():
    launch(65_535, 8, 128, 16)
    launch(65_535, 8, 128, 16, lengths_vary=True)
    with pytest.raises(KernelLimit, match="65535 blocks"):
        launch(65_536, 1, 1, 16)
    with pytest.raises(KernelLimit, match="2\\^31"):
        launch(65_535, 8, 129, 16)
    with pytest.raises(KernelLimit, match="2\\^31"):
        launch(65_535, 8, 257, 16, lengths_vary=True)
