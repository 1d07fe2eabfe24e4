"""Multipliers and gates in scaling.csv."""

from pathlib import Path

import pytest
from runs import read

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.prediction.export import load_model
from tabicl_train.stream import StepStream


def train(run_dir: Path, *overrides: str) -> list[dict]:
    """The rows of scaling.csv of a short run, of whose steps the even ones are logged."""
    training.train(compose([
        "experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu", f"run_dir={run_dir}",
        "trainer.max_steps=4", "trainer.log_every=2", "curriculum.stages.smoke.learning_rate=0.03", *overrides,
    ]))  # fmt: skip
    return read(run_dir / "scaling.csv")


def test_rows_hold_multiplier_and_gate_of_every_layer(tmp_path):
    rows, config = train(tmp_path), compose(["experiment=smoke", "prior=dummy"])
    assert [(row["step"], row["layer"]) for row in rows] == [
        (step, layer) for step in "24" for layer in ("column.0", "icl.0", "icl.1")
    ]
    stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, [1, 3])
    for item, of_step in zip(stream, (rows[:3], rows[3:]), strict=True):
        labeled = [n for pack in item.packs for _, n, _ in pack.shapes]
        assert {(int(row["n_smallest"]), int(row["n_largest"])) for row in of_step} == {(min(labeled), max(labeled))}
    assert all(float(row["gate_std"]) > 0 for row in rows[3:])  # the gate starts at 1, and then learns
    for row, (name, layer) in zip(rows[3:], load_model(str(tmp_path)).named_scalings(), strict=True):
        base = layer.multipliers(int(row["n_largest"])).abs().max().item()
        assert row["layer"] == name and float(row["at_largest"]) == pytest.approx(base)


def test_a_layer_without_a_gate_has_empty_cells(tmp_path):
    rows = train(tmp_path, "model.icl_scaling=ssmax")
    gates = {row["layer"]: (row["gate_mean"], row["gate_std"]) for row in rows}
    assert gates["icl.0"] == gates["icl.1"] == ("", "") and float(gates["column.0"][1]) > 0
