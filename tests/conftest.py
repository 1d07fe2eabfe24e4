"""Fixtures that several folders share."""

from pathlib import Path

import pytest
from runs import run


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory) -> Path:
    """Return the run directory of a finished experiment=smoke with checkpoints of steps 8, 16 and 20.

    Tests must not change it.
    """
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    run(run_dir, "checkpoint.every=8")
    return run_dir
