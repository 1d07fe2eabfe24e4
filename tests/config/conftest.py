"""What the tests of the configuration share."""

from pathlib import Path

import pytest


@pytest.fixture
def own_configs(tmp_path) -> Path:
    """A folder of a user's own configuration files."""
    folder = tmp_path / "configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment/own.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: tiny, override /prior: dummy, override /curriculum: own]\n"
        "stream: {num_workers: 0}\n"
    )
    (folder / "curriculum").mkdir()
    (folder / "curriculum/own.yaml").write_text("stages: {only: {steps: 3, rows: [40, 50], tables: 4}}\n")
    return folder
