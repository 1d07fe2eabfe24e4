"""Jobs of a sweep: on this machine, and on SLURM, which a stub stands for."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import waiting

from tabicl_train.run.status import is_in_use
from tabicl_train.sweep import jobs
from tabicl_train.sweep.plan import make_plan

# Holds the lock of the run directory in its first argument until it is asked to stop.
STOPS = """
import os, signal, sys
from pathlib import Path
from tabicl_train.run.status import RunLock

def stop(*_):
    sys.exit(f"error: asked to stop, with {sys.argv[2]} on GPU {os.environ['CUDA_VISIBLE_DEVICES']}")

signal.signal(signal.SIGTERM, stop)
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
while True:
    signal.pause()
"""


@pytest.fixture
def slurm(monkeypatch):
    """The numbers of the jobs that squeue lists, and the jobs that were canceled."""
    queued, canceled = ["7", "8_1"], []

    def run(command, **_):
        if command[0] == "scancel":
            canceled.append(command[1])
        return subprocess.CompletedProcess(command, 0, "\n".join(queued))

    monkeypatch.setattr(jobs.subprocess, "run", run)
    monkeypatch.setattr(jobs, "queue", jobs.Queue())
    return queued, canceled


def test_a_job_that_waits_in_the_queue_is_found_again(slurm, tmp_path):
    assert jobs.running_job(tmp_path, "slurm") is None
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "7_submitted.pkl").touch()
    job = jobs.running_job(tmp_path, "slurm")
    job.stop()
    assert job.number == "7" and slurm[1] == ["7"]
    slurm[0].remove("7")
    jobs.queue.looked = -1e9
    assert job.has_ended() and jobs.running_job(tmp_path, "slurm") is None


def test_a_run_on_slurm_gets_the_options_of_submit(slurm, tmp_path, monkeypatch):
    submit = mock.Mock()
    submit.return_value.job_id = "9"
    monkeypatch.setattr(jobs, "submit_job", submit)
    options = ["sweep.submit.cluster=slurm", "sweep.submit.gpus=2", "sweep.submit.sbatch={mem: 64G}"]
    plan = make_plan(["experiment=smoke", *options])
    jobs.submit_run(plan, ["seed=0"], tmp_path / "run", "", 1)
    arguments, given, folder, cores = submit.call_args.args
    assert arguments == ["seed=0", "stream.num_workers=8"]
    assert (given.gpus, given.sbatch) == (2, {"mem": "64G"})
    assert folder == tmp_path / "run" / "jobs" and cores == 9
    assert submit.call_args.kwargs == {"OMP_NUM_THREADS": "1"}  # its workers share the cores


def test_a_run_on_this_machine_needs_no_submitit_and_is_found_by_a_later_call(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    (tmp_path / "program.py").write_text(STOPS)
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setattr(jobs, "PROGRAM", (str(tmp_path / "program.py"),))
    plan = make_plan(["experiment=smoke", "stream.num_workers=0"])
    job = jobs.submit_run(plan, [str(run_dir), "x='a b'"], run_dir, "3", 1)
    try:
        waiting.until(lambda: is_in_use(run_dir), "the run holds its lock")
        found = jobs.running_job(run_dir, "local")
        assert found.number == job.number
        assert os.getsid(int(found.number)) == int(found.number) != os.getsid(0)
        found.stop()
        waiting.until(job.has_ended, "the run has ended")
        assert job.error() == "asked to stop, with x='a b' on GPU 3"
        assert jobs.running_job(run_dir, "local") is None
    finally:
        job.submitted.process.kill()
        job.submitted.process.wait()


def test_the_error_of_a_job_is_its_first_line_of_error(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "5_submitted.pkl").touch()
    assert jobs.Job(tmp_path, "local").error() == ""
    (tmp_path / "jobs" / "5_0_log.out").write_text("run  here\nerror: no disk\nerror: more\n")
    assert jobs.Job(tmp_path, "local").error() == "no disk"
