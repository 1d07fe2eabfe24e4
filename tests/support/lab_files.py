"""Shared by the tests of the laboratory: a run with random weights, and a file with a table."""

import numpy as np
import pandas as pd
import pytest
from made_run import make_run

CLASSES = ("no", "yes", "<maybe>")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file of 80 rows: two numbers with gaps, a text, and the class in the middle."""
    rng = np.random.default_rng(0)
    y = rng.choice(CLASSES, 80)
    frame = pd.DataFrame({
        "height": rng.normal(size=80) + (y == "yes"), "class": y, "color": rng.choice(["red", "green"], 80),
        "weight": np.where(rng.random(80) < 0.1, np.nan, rng.normal(size=80)),
    })  # fmt: skip
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    frame.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, "prior=dummy")
    return folder
