"""Experiments of the laboratory, and what they need: a run with random weights, and a file with a table."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import command
from training_runs import write_untrained_run

from tabicl_train.lab.folder import SMALL_FORM

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
    write_untrained_run(folder, "prior=dummy")
    return folder


def run_small_experiment(name: str, folder: Path, *settings: str) -> str:
    """Run an experiment at its smallest size; return its page, which shows all of its figures."""
    result = command("lab", name, f"folder={folder}", "small=true", *settings)
    assert result.returncode == 0, result.stderr
    page = (folder / "README.md").read_text()
    assert f"folder={folder}" in page
    assert SMALL_FORM in page
    assert f"{folder / 'README.md'}\n" in result.stdout
    for figure in folder.glob("*.png"):
        assert f"({figure.name})" in page
    return page
