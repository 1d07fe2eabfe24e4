"""Prediction and export work without the packages that only training needs."""

import subprocess
import sys
from pathlib import Path

import pytest

import tabicl_train

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import sys
import priors.real.preprocessing
assert "tabicl_train" not in sys.modules
from tabicl_train.weights.export import export
from tabicl_train import TabICLClassifier, TabICLRegressor
import tabicl_train.model.predict, tabicl_train.run.checkpoint
assert not {"lightning", "hydra", "omegaconf"} & {name.partition(".")[0] for name in sys.modules}
"""


def test_the_version_is_known_in_a_checkout_without_any_package():
    """-S: without site-packages."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tabicl_train; print(tabicl_train.__version__)"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == tabicl_train.__version__


@pytest.mark.slow
def test_what_is_imported():
    subprocess.run([sys.executable, "-c", CODE], check=True)
