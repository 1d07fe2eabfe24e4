"""nanoTabPFN's model as written by its authors, through the adapter for dense batches.

NANOTABPFN names a clone of github.com/automl/nanoTabPFN. Without it, tests/unit/model/test_dense.py tests the
adapter with a stand-in of the same interface.
"""

import os
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from command_line import command
from training_runs import read_metrics, train_short_run

from tabicl_train import TableStream, register
from tabicl_train.config.compose import compose
from tabicl_train.model.config import NetworkSettings
from tabicl_train.model.dense import dense
from tabicl_train.model.family import random_tables
from tabicl_train.model.pack import Pack
from tabicl_train.weights.reader import load_network


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
    train_short_run(tmp_path / "run", "trainer.max_steps=3", "trainer.log_every=1", settings=settings)
    assert len(read_metrics(tmp_path / "run")) == 3
    network = load_network(tmp_path / "run", "newest").eval()
    ((X, y, n),) = random_tables(network.config, [(12, 8, 3)], torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = network.network((X[None], y[None, :n].float()), n)[0]
        torch.testing.assert_close(network(Pack.of([(X, y, n)])), alone)


def test_its_loader_reads_a_dump_batch_by_batch(module, monkeypatch, tmp_path):
    for name in ("train", "schedulefree"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "schedulefree", ModuleType("schedulefree"))  # its loader does not need it
    import train

    stage = "curriculum.stages.smoke"
    settings = ["experiment=smoke", "prior=dummy", f"{stage}.group_size=8"]
    output = tmp_path / "tables.h5"
    assert command("prior", "dump", *settings, "format=file", f"output={output}").returncode == 0
    config = compose(settings)
    loader = train.PriorDumpDataLoader(str(output), num_steps=20, batch_size=8, device="cpu")
    assert loader.max_num_classes == config.model.max_classes
    stream = TableStream(config.prior, config.curriculum, model=config.model, dense=True)
    for batch, (X, y, n, _) in zip(loader, stream, strict=True):
        assert torch.equal(batch["x"], X) and torch.equal(batch["y"], y.float())
        assert batch["train_test_split_index"] == n
