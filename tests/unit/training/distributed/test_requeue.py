"""How a SLURM job asks to be started again, with a stand-in for scontrol."""

from pathlib import Path

import pytest

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.training.distributed.requeue import requeue

SCONTROL = """#!/bin/sh
echo "$*" >> "${0%/*}/calls"
[ "$1" != show ] || echo "JobId=17 JobState=RUNNING"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("array", "name"), [({}, "17"), ({"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "4"}, "17_4")]
)
def test_one_job_of_an_array_does_not_requeue_the_others(array, name, folder, monkeypatch, capsys):
    """SLURM gives one job of an array the number of the array."""
    for variable, value in array.items():
        monkeypatch.setenv(variable, value)
    requeue(TrainerConfig(requeue=True))
    assert (folder / "calls").read_text().splitlines() == [f"show job {name}", f"requeue {name}"]
    assert capsys.readouterr().err == f"stop      SLURM job {name} is requeued\n"


def test_without_scontrol_the_run_still_ends_in_order(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder / "empty"))
    requeue(TrainerConfig(requeue=True))
    assert "SLURM job 17 is not requeued: " in capsys.readouterr().err


def test_only_a_job_that_wants_it_is_requeued(folder, monkeypatch, capsys):
    requeue(TrainerConfig(requeue=False))
    monkeypatch.delenv("SLURM_JOB_ID")
    requeue(TrainerConfig(requeue=True))
    assert not (folder / "calls").exists() and capsys.readouterr().err == ""
