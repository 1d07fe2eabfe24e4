"""The wheel, installed outside the checkout, has everything that the commands and the estimators need."""

import os
import subprocess
import sys

import pytest
from unpacked_wheel import unpack_wheel

# One process for all commands, since importing torch and Lightning takes longer than the rest.
COMMANDS = """
import sys
from tabicl_train import cli as commands

assert "site" in commands.__file__, commands.__file__
for line in (
    "train --version",
    "train experiment=smoke run_dir=runs/one trainer.max_steps=2",
    "runs",
    "export checkpoint=runs/one output=model.ckpt",
    "export checkpoint=runs/one output=hub",
    "evaluate checkpoint=runs/one splits=1 rows=100 n_estimators=1 output=scores.csv",
    "predict train=train.csv target=price test=test.csv output=predictions.csv n_estimators=1",
    "report run_dir=runs/one",
):
    name, *arguments = line.split()
    sys.argv = [f"tabicl-{name}", *arguments]
    try:
        getattr(commands, name)()
    except SystemExit as end:
        assert not end.code, line
"""
PREDICTIONS = """
import socket, sys
import numpy as np

def no_network(*arguments):
    raise OSError("the network is off")

socket.socket.connect = socket.getaddrinfo = no_network
import tabicl_train
from tabicl_train import TabICLClassifier, TabICLRegressor

assert "site" in tabicl_train.__file__, tabicl_train.__file__
X = np.random.default_rng(0).normal(size=(60, 3))
p = TabICLClassifier().fit(X[:40], X[:40, 0] > 0).predict_proba(X[40:])
means = TabICLRegressor().fit(X[:40], X[:40, 0]).predict(X[40:])
assert p.shape == (20, 2) and np.ptp(p[:, 0]) > 0 and np.ptp(means) > 0
"""

pytestmark = pytest.mark.slow


def test_an_installed_wheel_predicts_trains_exports_evaluates_and_reports(tmp_path):
    site = unpack_wheel(tmp_path)
    lab = "tabicl_train/lab/configs/sweep/needle.yaml"
    for name in ("tabicl_train/weights/scores.csv", "tabicl_train/py.typed", "priors/py.typed", lab):
        assert (site / name).is_file()
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.csv").write_text("size,price\n" + "".join(f"{i},{'low' if i < 20 else 'high'}\n" for i in range(40)))
    (work / "test.csv").write_text("size\n3\n33\n")
    for code in (PREDICTIONS, COMMANDS):
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=work,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
    for line in ("commit unknown", "runs/one", "finished"):
        assert line in result.stdout
    assert (work / "predictions.csv").read_text().splitlines()[0] == "price,probability_high,probability_low"
    assert {"model.ckpt", "hub", "scores.csv"} <= {path.name for path in work.iterdir()}
    assert (work / "runs/one/report.html").is_file()
