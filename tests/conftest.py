"""The fast tier stays fast: a test without the marker of another tier may neither start a process nor train."""

import multiprocessing.process
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from runs import run

TIERS = ("slow", "gpu", "multi_process", "campaign")  # described in pyproject.toml


def refusal(action: str, marker: str):
    def refuse(*_, **__):
        pytest.fail(f"a test of the fast tier {action}; mark it with pytest.mark.{marker}", pytrace=False)

    return refuse


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Around the whole test, since fixtures of wider scope are set up before those of the function."""
    with ExitStack() as patches:
        # it would last as long as the test process
        patches.enter_context(mock.patch("tabicl_train.model.kernels.memory.keep_freed_memory"))
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            starts = refusal("starts a process", "multi_process")
            patches.enter_context(mock.patch.object(subprocess.Popen, "__init__", starts))
            patches.enter_context(mock.patch.object(multiprocessing.process.BaseProcess, "start", starts))
            if training := sys.modules.get("tabicl_train.train"):  # 3 s to import, and not every test needs it
                patches.enter_context(mock.patch.object(training, "fit", refusal("trains", "slow")))
        return (yield)


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory) -> Path:
    """A finished run of experiment=smoke with checkpoints of steps 8, 16 and 20; tests must not change it."""
    run_dir = tmp_path_factory.mktemp("smoke") / "run"
    run(run_dir, "checkpoint.every=8")
    return run_dir
