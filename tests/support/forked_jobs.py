"""The runs of a sweep in forked processes: a new Python takes 5 CPU seconds to import everything."""

from pathlib import Path
from types import SimpleNamespace

import forked
import pytest

from tabicl_train.sweep import jobs


def start(arguments: list[str], folder: Path, **variables: str) -> SimpleNamespace:
    """What a sweep uses of a LocalProcess."""
    process = forked.start_process(forked.train_command, *arguments, stderr=folder / "0_0_log.out", env=variables)
    return SimpleNamespace(job_id="0", done=lambda: process.exitcode is not None)


@pytest.fixture
def forked_jobs(monkeypatch):
    monkeypatch.setattr(jobs, "LocalProcess", start)
