"""nanoTabPFN's model as written by its authors, through the adapter for dense batches.

NANOTABPFN names a clone of github.com/automl/nanoTabPFN. Without it, tests/model/test_counting.py tests the adapter
with a stand-in of the same interface.
"""

import os
import sys
from dataclasses import dataclass

import pytest
import torch
from runs import metrics
from short_runs import run

from tabicl_train import register
from tabicl_train.model.config import NetworkSettings
from tabicl_train.model.counting import random_tables
from tabicl_train.model.dense import dense
from tabicl_train.model.pack import Pack
from tabicl_train.prediction.export import load_network


@dataclass
class NanoConfig(NetworkSettings):
    """Settings of nanoTabPFN."""

    family: str = "nanotabpfn"
    """The family."""
    width: int = 16
    """Width of a cell."""


@pytest.fixture
def module(monkeypatch):
    folder = os.environ.get("NANOTABPFN")
    if folder is None:
        pytest.skip("NANOTABPFN names no clone of nanoTabPFN")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model

    return model.NanoTabPFNModel


def test_nanotabpfn_trains_and_predicts_what_it_predicts_alone(module, tmp_path, monkeypatch):
    monkeypatch.setattr(register.network, "_entries", dict(register.network._entries))

    def build(config):
        return module(config.width, 2, 32, 1, config.outputs)

    network_class = dense(build, lambda network, X, y: network((X, y.float()), y.shape[1]))
    register.network("nanotabpfn", network_class, settings=NanoConfig)
    settings = ["experiment=smoke", "trainer.accelerator=cpu", "stream.num_workers=0", "model=nanotabpfn"]
    run(tmp_path / "run", "trainer.max_steps=3", "trainer.log_every=1", settings=settings)
    assert len(metrics(tmp_path / "run")) == 3
    network = load_network(tmp_path / "run", "newest").eval()
    ((X, y, n),) = random_tables(network.config, [(12, 8, 3)], torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = network.network((X[None], y[None, :n].float()), n)[0]
        torch.testing.assert_close(network(Pack.of([(X, y, n)])), alone)
