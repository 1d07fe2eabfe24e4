"""Fixtures that several folders share."""

from pathlib import Path
from unittest import mock

import pytest
from runs import run


@pytest.fixture(scope="session", autouse=True)
def default_allocator():
    """Keep malloc as it is: the setting of a training process would last as long as the test process."""
    with mock.patch("tabicl_train.model.kernels.memory.keep_freed_memory"):
        yield


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory) -> Path:
    """Return the run directory of a finished experiment=smoke with checkpoints of steps 8, 16 and 20.

    Tests must not change it.
    """
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    run(run_dir, "checkpoint.every=8")
    return run_dir
