import json
import subprocess
import sys
from dataclasses import replace

import pytest
from command_line import command

from tabicl_train.config.schema import StageConfig
from tabicl_train.model import TabICLConfig
from tabicl_train.planning.memory import peak_bytes, stage_peak

SMALL = {"embed_dim": 32, "col_num_heads": 4, "col_num_inducing": 16, "row_num_heads": 4, "row_num_cls": 2}
SMALL |= {"icl_num_heads": 4}
LONG = {**SMALL, "col_num_blocks": 1, "row_num_blocks": 2, "icl_num_blocks": 3}
SHAPES = [  # model; tables, rows, labelled rows, features
    ({**SMALL, "col_num_blocks": 3, "row_num_blocks": 3, "icl_num_blocks": 2}, (4, 512, 300, 10)),
    ({**SMALL, "col_num_blocks": 1, "row_num_blocks": 1, "icl_num_blocks": 8}, (8, 512, 150, 3)),
    (LONG, (1, 4096, 3200, 8)),
    ({**LONG, "checkpoint_rows": 1000}, (1, 4096, 3200, 8)),
]
# A process of its own for each, forked from one that has imported torch and taken a step.
MEASURE = """
import json, os, resource, sys, torch
from tabicl_train.config.schema import OptimizerConfig
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.module import query_losses
from tabicl_train.optimizer import build_optimizer
from tabicl_train.stream import TableBatch

def step(config, tables, rows, train_size, features):
    model = TabICL(config)
    optimizer = build_optimizer(model, OptimizerConfig())
    batch = TableBatch(torch.randn(tables, rows, features), torch.randint(0, 10, (tables, rows)), train_size)
    for _ in range(2):
        query_losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.numel() for p in model.parameters())

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(1)
step(TabICLConfig(embed_dim=16, col_num_heads=2, row_num_heads=2, icl_num_heads=2), 1, 20, 10, 3)
for values, shape in json.loads(sys.argv[1]):
    if os.fork() == 0:
        before = peak()
        print(json.dumps([step(TabICLConfig(**values), *shape), peak() - before]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.multi_process
def test_the_estimate_is_within_a_factor_of_the_resident_set():
    arguments = [sys.executable, "-c", MEASURE, json.dumps(SHAPES)]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    for (values, shape), (parameters, measured) in zip(SHAPES, map(json.loads, lines), strict=True):
        estimated = peak_bytes(TabICLConfig(**values), parameters, *shape)
        assert measured / 1.5 < estimated < measured * 1.5, f"{shape}: {estimated / 1e6:.0f}, {measured / 1e6:.0f} MB"


def test_the_peak_of_a_stage_is_that_of_its_largest_micro_batch():
    config = TabICLConfig()
    stage = StageConfig(rows=[100, 2000], features=[1, 100], train_share=[0.3, 0.9], group_size=4)
    assert stage_peak(config, 10, stage, "fp32") == peak_bytes(config, 10, 4, 2000, 1800, 100)
    # Three tables of 2,000 rows are over the budget; of 1,250 rows four fit.
    budget = stage_peak(config, 10, replace(stage, micro_batch_rows=5000), "fp32")
    assert budget == peak_bytes(config, 10, 4, 1250, 1125, 100) > peak_bytes(config, 10, 2, 2000, 1800, 100)
    # Above 60,000 rows a table has at most 15 features, and above 20,000 most activations are computed again.
    long = stage_peak(config, 10, replace(stage, rows=[15_000, 60_001]), "fp32")
    assert long == peak_bytes(config, 10, 1, 20_000, 18_000, 80)
    forced = stage_peak(config, 10, replace(stage, checkpoint_rows=500), "fp32")
    assert forced < 0.8 * stage_peak(config, 10, stage, "fp32")


def test_the_plan_of_a_run_is_printed_before_anything_starts(tmp_path):
    result = command("train", "curriculum=tabicl_v2", f"run_dir={tmp_path}/run", "--cfg", "job")
    assert result.returncode == 0 and "embed_dim: 128" in result.stdout
    for words in (("27,552,258 parameters",), ("stage2", "40,000", "2,560,000", "400..10,240", "GB"), ("stage3",)):
        assert any(all(word in line for word in words) for line in result.stderr.splitlines())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["num_rows", "num_features", "tables"])
def test_more_of_anything_needs_more(field):
    shape = {"tables": 2, "num_rows": 1000, "train_size": 500, "num_features": 10}
    more = shape | {field: 2 * shape[field]}
    assert peak_bytes(TabICLConfig(), 10, **more) > 1.4 * peak_bytes(TabICLConfig(), 10, **shape)
