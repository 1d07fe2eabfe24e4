"""launch/slurm.sbatch and tabicl-submit under the real scheduler of SLURM:

    tests/launch/start_slurm.sh python -m pytest -m campaign tests/launch/test_slurm.py

SLURM waits for two minutes before it starts a job again.
"""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
import waiting
from runs import assert_same_end
from scripts import ENVIRONMENT, copy_scripts

from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import read_status

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="runs beside tests/launch/start_slurm.sh"),
]
until = functools.partial(waiting.until, seconds=600.0)
SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu",
            "checkpoint.every=1000"]  # fmt: skip
LONG = [*SETTINGS, "curriculum.stages.smoke.steps=500"]  # the run still goes when the signal comes
ENDS = ("COMPLETED", "FAILED", "CANCELED", "TIMEOUT")


def command(*words: str, **keywords) -> str:
    result = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, **keywords)
    return result.stdout + result.stderr


def sbatch(folder: Path, options: list[str], *settings: str) -> str:
    """Submit launch/slurm.sbatch; returns the number of the job."""
    if not (folder / "launch").exists():
        copy_scripts(folder)
    job = command("sbatch", "--parsable", *options, "launch/slurm.sbatch", *settings, cwd=folder).strip()
    assert job.isdecimal(), job
    return job


def value(job: str, name: str) -> str:
    shown = command("scontrol", "show", "job", "--oneliner", job)
    return next((word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")), "")


def end_of(job: str) -> str:
    """Wait for the end of a job; returns its state."""
    until(lambda: value(job, "JobState") in ENDS, f"job {job} ends")
    return value(job, "JobState")


def start_again(job: str) -> None:
    """Wait until SLURM is asked to start the job again, and have it do so at once and without a limit of time."""
    until(lambda: value(job, "Restarts") == "1" and value(job, "JobState") == "PENDING", "the job is requeued")
    command("scontrol", "update", f"jobid={job}", "TimeLimit=60", "StartTime=now")


def log(folder: Path, job: str) -> str:
    return (folder / f"slurm-tabicl-{job}.log").read_text()


def rows(run_dir: Path) -> int:
    return len(Records(run_dir).rows("metrics.csv"))


def test_a_preempted_job_goes_on_to_the_same_end(tmp_path, monkeypatch):
    """One task with two ranks: SLURM signals them and torchrun, which passes the signal on."""
    monkeypatch.setitem(ENVIRONMENT, "RANKS", "2")
    job = sbatch(tmp_path, ["--time=60"], *LONG, f"run_dir={tmp_path / 'torn'}")
    until(lambda: rows(tmp_path / "torn") > 5, "the run begins")
    command("scancel", "--signal=USR1", job)
    start_again(job)
    assert end_of(job) == "COMPLETED", log(tmp_path, job)
    assert f"SLURM job {job} is requeued" in log(tmp_path, job) and "resumed at step" in log(tmp_path, job)
    whole = sbatch(tmp_path, ["--time=60"], *LONG, f"run_dir={tmp_path / 'whole'}")
    assert end_of(whole) == "COMPLETED", log(tmp_path, whole)
    assert_same_end(tmp_path / "torn", tmp_path / "whole")


def test_a_submitted_job_goes_on_after_its_time_limit(tmp_path):
    """submitit's signal before the time limit is SIGUSR2."""
    program = ("python", "-c", "from tabicl_train import commands; commands.submit()")
    said = command(*program, *LONG, f"run_dir={tmp_path / 'run'}", "submit.gpus=0", "submit.hours=1")
    found = re.search(r"job +(\d+)", said)
    assert found, said
    until(lambda: rows(tmp_path / "run") > 5, "the run begins")
    command("scancel", "--signal=USR2", found[1])
    start_again(found[1])
    assert end_of(found[1]) == "COMPLETED"
    starts = [start["step"] for start in Records(tmp_path / "run").lines("provenance.jsonl")]
    assert starts[0] == 0 < starts[1] and read_status(tmp_path / "run")["status"] == "finished"
