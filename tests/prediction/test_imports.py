"""Prediction and export work without the packages that only training needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.multi_process

CODE = """
import sys
from tabicl_train.prediction.export import export
from tabicl_train import TabICLClassifier, TabICLRegressor
import tabicl_train.prediction.predict, tabicl_train.run_dir.checkpoint, tabicl_train.model.cost, priors.real.normalize
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"lightning", "hydra", "omegaconf"}))
"""


def test_prediction_and_export_import_neither_lightning_nor_hydra():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_preprocessing_of_real_tables_does_not_import_the_program():
    code = "import sys, priors.real.features, priors.real.normalize; sys.exit('tabicl_train' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
