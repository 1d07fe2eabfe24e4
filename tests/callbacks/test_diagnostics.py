"""What a run measures of its tables and of its length scaling."""

import math
import statistics
from pathlib import Path

import pytest
import torch
from runs import read

from tabicl_train import module
from tabicl_train import train as training
from tabicl_train.callbacks.diagnostics import SCALING
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import build_prior
from tabicl_train.model import TabICL
from tabicl_train.model.quantiles import guess_loss
from tabicl_train.stream import StepStream


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
        for column in SCALING[5:]:
            assert float(row[column]) == pytest.approx(float(plain[column]), rel=1e-3, abs=1e-6)
    assert all(float(row["gate_std"]) > 1e-4 for row in expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ssmax", "ssa_trainable"])
def test_a_layer_without_a_gate_has_empty_cells(rule, tmp_path):
    rows = train(tmp_path, f"model.icl_scaling={rule}")
    gates = {row["layer"]: (row["gate_mean"], row["gate_std"]) for row in rows}
    assert gates["icl.0"] == gates["icl.1"] == ("", "") and float(gates["column.0"][1]) > 0


def test_guessing_the_frequencies_of_the_labels():
    y = torch.tensor([0, 0, 1, 0, 1, 2, 0])  # four labeled rows; class 2 is not among them
    assert guess_loss(y, 4) == pytest.approx(-(math.log(2 / 7) + math.log(1 / 7) + math.log(4 / 7)) / 3)
    assert guess_loss(torch.tensor([1, 1, 1, 0, 1, 1, 1]), 4) == pytest.approx(-math.log(4 / 6))
    assert guess_loss(torch.tensor([3, 3, 1, 3]), 3) == pytest.approx(-math.log(3 / 5))  # of two classes


def test_guessing_the_quantiles_of_numbers():
    y = torch.randn(60, generator=torch.Generator().manual_seed(0))
    a = torch.arange(1, 1000).double() / 1000
    error = y[40:, None].double() - y[:40].double().quantile(a)
    assert guess_loss(y, 40) == pytest.approx(torch.maximum(a * error, (a - 1) * error).mean().item(), rel=1e-6)
    assert guess_loss(torch.tensor([2.0, 2.0, 5.0, 2.0]), 2) == pytest.approx(3 / 4)  # half of 3, and 0


@pytest.mark.slow
def test_every_row_has_the_loss_of_guessing_its_tables(tmp_path):
    train(tmp_path)
    config = compose(["experiment=smoke", "prior=dummy"])
    stream = StepStream(build_prior(config.prior), config.curriculum, config.model, config.seed, range(4))
    for step, item in zip((2, 4), list(stream)[1::2], strict=True):
        rows = [row for row in read(tmp_path / "batches.csv") if int(row["step"]) == step]
        expected = [guess_loss(y, n) for pack in item.packs for _, y, n in pack.tables()]
        assert len(expected) == sum(int(row["tables"]) for row in rows) == 8
        mean = sum(int(row["tables"]) * float(row["guess_loss"]) for row in rows) / 8
        assert mean == pytest.approx(statistics.fmean(expected), rel=1e-6)
