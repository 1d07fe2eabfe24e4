"""What training must do on a GPU: the checks of tabicl-gpu-check, and what takes exports and estimators.

The checks were run on an H100 (launch/README.md), exports and estimators were not. `DEVICE=cpu pytest -m gpu tests/gpu`
runs those that CUDA is not essential for.
"""

import os
import time

import numpy as np
import pytest
import torch
from networks import tiny_network
from training_runs import train_short_run as train_here

from tabicl_train import TabICLClassifier
from tabicl_train.check.gpu.place import CheckSkipped, Place, set_up
from tabicl_train.check.gpu.run import CHECKS
from tabicl_train.check.gpu.small import random_pack
from tabicl_train.weights.export import export
from tabicl_train.weights.reader import load_model

DEVICE = os.environ.get("DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
]
SMOKE = ["experiment=smoke"]
ON_DEVICE = [f"trainer.accelerator={DEVICE}", "stream.num_workers=0"]


@pytest.fixture(autouse=True)
def exact_products():
    """Products of fp32 in fp32, unless a test says otherwise, and the attention kernels of training."""
    set_up()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of all checks, since some need the tables that another one has drawn."""
    return tmp_path_factory.mktemp("checks")


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_a_check_passes(check, folder):
    try:
        check.run(Place(torch.device(DEVICE), folder, deadline=time.monotonic() + check.seconds))
    except CheckSkipped as skipped:
        pytest.skip(str(skipped))


def test_a_run_on_a_gpu_is_exported(tmp_path):
    train_here(tmp_path / "run", *ON_DEVICE, settings=SMOKE)
    export(str(tmp_path / "run"), str(tmp_path / "weights.ckpt"))
    network, pack = load_model(str(tmp_path / "weights.ckpt")).eval(), random_pack()
    with torch.no_grad():
        expected, found = network(pack), network.to(DEVICE)(pack.to(torch.device(DEVICE))).cpu()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_the_estimator_predicts_what_it_does_on_the_cpu():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 5)), rng.integers(0, 3, 80)
    predicted = {
        device: TabICLClassifier(tiny_network(), device=device).fit(X[:60], y[:60]) for device in ("cpu", DEVICE)
    }
    assert predicted[DEVICE].device_.type == DEVICE
    expected = predicted["cpu"].predict_proba(X[60:])
    np.testing.assert_allclose(predicted[DEVICE].predict_proba(X[60:]), expected, atol=1e-3)
