"""Multipliers and gates in scaling.csv."""

from pathlib import Path

import pytest
import torch
from runs import read

from tabicl_train import module
from tabicl_train import train as training
from tabicl_train.callbacks.diagnostics import COLUMNS
from tabicl_train.config.compose import compose
from tabicl_train.model import TabICL


def train(run_dir: Path, *overrides: str) -> list[dict]:
    """The rows of scaling.csv of a short run, of whose steps the even ones are logged."""
    training.train(compose([
        "experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", f"run_dir={run_dir}",
        "trainer.max_steps=4", "trainer.log_every=2", "curriculum.stages.smoke.learning_rate=0.03", *overrides,
    ]))  # fmt: skip
    return read(run_dir / "scaling.csv")


def compiled_network(config) -> TabICL:
    network = TabICL(config)
    block = network.icl_predictor.tf_icl["blocks"][0]
    block.compile(dynamic=True, backend="eager")  # tracing is what keeps hooks from firing
    return network


@pytest.mark.slow
def test_gates_are_measured_in_a_compiled_block_too(tmp_path, monkeypatch):
    expected = train(tmp_path / "plain")
    torch._dynamo.reset()
    monkeypatch.setattr(module, "family_of", lambda config: compiled_network)
    compiled = train(tmp_path / "compiled")
    assert [row["step"] for row in compiled] == [row["step"] for row in expected]
    for row, plain in zip(compiled, expected, strict=True):
        for column in COLUMNS[5:]:
            assert float(row[column]) == pytest.approx(float(plain[column]), rel=1e-3, abs=1e-6)
    assert all(float(row["gate_std"]) > 1e-4 for row in expected)


@pytest.mark.parametrize("rule", ["ssmax", pytest.param("ssa_trainable", marks=pytest.mark.slow)])
def test_a_layer_without_a_gate_has_empty_cells(rule, tmp_path):
    rows = train(tmp_path, f"model.icl_scaling={rule}")
    gates = {row["layer"]: (row["gate_mean"], row["gate_std"]) for row in rows}
    assert gates["icl.0"] == gates["icl.1"] == ("", "") and float(gates["column.0"][1]) > 0
