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
from probe import COSTS

from tabicl_train.config.compose import compose
from tabicl_train.curriculum import plan_step
from tabicl_train.model.attention import fits_one_launch
from tabicl_train.model.kernels.launches import batch_limit
from tabicl_train.model.layout import Spans

PROBE = Path(__file__).with_name("probe.py")
FIRST = {"stage1": 0, "stage2": 500_000, "stage3": 540_000}  # steps of the curriculum tabicl_v2


@pytest.fixture(scope="module")
def report(request) -> dict:
    """What probe.py found."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA of its own")
    folder = request.config.cache.mkdir("fake_cuda")
    try:
        build_guard(folder)
    except CannotBuild as error:
        pytest.skip(str(error))
    result = subprocess.run([sys.executable, PROBE, "suite", "--guard", folder], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.multi_process
def test_steps_never_wait_for_the_device(report):
    """In any stage and precision, optimizer and callbacks included; and everything stays on the device."""
    assert len(report["checks"]) == 8 and not any(report["checks"].values())


@pytest.mark.multi_process
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(report, fault):
    _, _, expected = FAULTS[fault]
    assert report["faults"][fault].startswith(expected)


@pytest.mark.multi_process
def test_costs_of_a_step_are_the_stored_ones(report):
    """If they changed on purpose, `probe.py store` stores them: tests/benchmarks/gpu.py predicts times from them."""
    found, stored = costs_by_part(report["costs"]), costs_by_part(json.loads(COSTS.read_text())["stage1"])
    assert found.keys() == stored.keys()
    for part, costs in found.items():
        assert costs == pytest.approx(stored[part], rel=0.02), part  # versions of torch differ by an operator or two


@pytest.mark.multi_process
def test_a_step_is_a_few_passes_and_launches(report):
    costs = costs_by_part(report["costs"])
    assert report["costs"]["passes"] <= 4
    assert sum(launches for _, launches, _, _ in costs.values()) <= 10_000
    assert costs["optimizer"][1] <= 350
    assert sum(moved for *_, moved in costs.values()) <= 640e9  # 961e9 with a pass for each group of equal width


def costs_by_part(content: dict) -> dict[str, list[float]]:
    """Operators, launches, FLOPs and bytes."""
    parts: dict[str, list[float]] = {}
    for part, _, *costs in content["operators"]:
        parts[part] = [a + b for a, b in zip(parts.get(part, [0] * 4), costs, strict=True)]
    return parts


@pytest.mark.parametrize("stage", FIRST)
def test_attention_of_planned_steps_fits_its_kernels(stage):
    """With the dimensions of the real network; whatever the prior drops, no table is wider than planned."""
    config = compose(["curriculum=tabicl_v2", "run_dir=unused"])
    m = config.model
    for step in range(FIRST[stage], FIRST[stage] + 200):
        for pack in plan_step(config.curriculum, m, config.seed, step).packs(0, 1):
            tables = [(group.spec, len(group.tables)) for group in pack]
            column = [(k * s.num_features, s.train_size, s.num_rows - s.train_size) for s, k in tables]
            context = [(k, s.train_size, s.num_rows - s.train_size) for s, k in tables]
            points = [(columns, m.col_num_inducing, 0) for columns, _, _ in column]
            for runs in (points, column):
                check(runs, m.col_num_heads, m.embed_dim // m.col_num_heads)
            check(context, m.icl_num_heads, m.row_dim // m.icl_num_heads)


def check(runs: list[tuple[int, int, int]], heads: int, width: int) -> None:
    """Raise KernelLimit if the network would launch too much. runs: numbers of sequences, and two lengths of them"""
    lengths = [(count, length) for count, *both in runs for length in both if length]
    sequences = sum(count for count, _ in lengths)
    queries = sum(count * length for count, length in lengths)
    ends, longest = torch.empty(sequences + 1, device="meta"), max(length for _, length in lengths)
    if fits_one_launch(Spans(ends, queries, ends, ends, longest, 0), heads, width):
        launch(sequences, heads, longest, width, lengths_vary=True)
    else:
        for count, length in lengths:
            launch(min(count, batch_limit(heads, length, width)), heads, length, width)


def test_limits_of_a_launch():
    launch(65_535, 8, 128, 16)
    launch(65_535, 8, 128, 16, lengths_vary=True)
    with pytest.raises(KernelLimit, match="65535 blocks"):
        launch(65_536, 1, 1, 16)
    with pytest.raises(KernelLimit, match="2\\^31"):
        launch(65_535, 8, 129, 16)
    with pytest.raises(KernelLimit, match="2\\^31"):
        launch(65_535, 8, 257, 16, lengths_vary=True)
