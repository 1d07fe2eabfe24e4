"""launch/slurm.sbatch and tabicl-submit under the real scheduler of SLURM:

    tests/launch/start_slurm.sh python -m pytest -m campaign tests/launch/test_slurm.py

SLURM waits for two minutes before it starts a job again.
"""

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import waiting
from runs import assert_same_end, last, run
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


def test_an_array_trains_a_seed_in_each_job(tmp_path):
    job = sbatch(tmp_path, ["--array=0-1", "--time=20"], *SETTINGS, "seed=%a", f"run_dir={tmp_path}/seed-%a")
    assert [end_of(f"{job}_{index}") for index in range(2)] == ["COMPLETED"] * 2
    run(tmp_path / "seed", *SETTINGS[1:], "seed=1")
    assert_same_end(tmp_path / "seed-1", tmp_path / "seed")


def test_a_canceled_job_saves_a_checkpoint_and_does_not_come_back(tmp_path):
    job = sbatch(tmp_path, ["--time=20"], *LONG, f"run_dir={tmp_path / 'run'}")
    until(lambda: rows(tmp_path / "run") > 5, "the run begins")
    command("scancel", job)
    until(lambda: "is not requeued" in log(tmp_path, job), "the job ends")
    assert end_of(job) == "CANCELED"
    status = read_status(tmp_path / "run")
    assert status["status"] == "preempted" and status["step"] == last(tmp_path / "run")["global_step"] > 0


def test_a_job_whose_node_is_lost_starts_again(tmp_path):
    settings = [*LONG, "checkpoint.every=20"]
    job = sbatch(tmp_path, ["--time=60"], *settings, f"run_dir={tmp_path / 'run'}")
    until(lambda: rows(tmp_path / "run") > 50, "the run begins")
    (daemon,) = Path(os.environ["SLURM_CONF"]).parent.glob("slurmd-*.pid")
    words = [line.split()[0] for line in command("scontrol", "listpids", job).splitlines()[1:]]
    processes = [int(word) for word in words if word != "-1"]
    for process in [int(daemon.read_text()), *map(parent_of, processes), *processes]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    until(lambda: value(job, "JobState") == "PENDING", "SLURM notices")
    subprocess.run(["slurmd", "-N", socket.gethostname().partition(".")[0]], check=True)  # ends with the cluster
    assert end_of(job) == "COMPLETED" and "resumed at step" in log(tmp_path, job), log(tmp_path, job)
    run(tmp_path / "whole", *settings[1:])
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


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
