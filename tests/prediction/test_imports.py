"""Prediction and export work without the packages that only training needs."""

import subprocess
import sys

import pytest

CODE = """
import sys
import priors.real.preprocessing
assert "tabicl_train" not in sys.modules
from tabicl_train.prediction.export import export
from tabicl_train import TabICLClassifier, TabICLRegressor
import tabicl_train.prediction.predict, tabicl_train.run_dir.checkpoint
assert not {"lightning", "hydra", "omegaconf"} & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
def test_what_is_imported():
    subprocess.run([sys.executable, "-c", CODE], check=True)
