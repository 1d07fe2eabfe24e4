"""launch/slurm.sbatch and tabicl-submit under the real scheduler, on this machine alone.

A job that is started again waits for two minutes first, as SLURM has it.
"""

import json
from pathlib import Path

import pytest
from one_machine_slurm import Cluster, cluster, until
from runs import assert_same_end, last, run
from scripts import ENVIRONMENT, copy_scripts

from tabicl_train.config.options import SubmitOptions
from tabicl_train.distributed.submit import submit
from tabicl_train.run_dir.records import Records

pytestmark = pytest.mark.campaign
# Steps enough that a signal a minute after the start finds the run still going.
SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "trainer.accelerator=cpu",
            "checkpoint.every=1000"]  # fmt: skip
LONG = [*SETTINGS, "curriculum.stages.smoke.steps=3000"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        made.environment |= ENVIRONMENT | {"SLURM_CONF": made.environment["SLURM_CONF"]}
        yield made


def sbatch(slurm: Cluster, folder: Path, options: list[str], *settings: str) -> str:
    """Submit launch/slurm.sbatch; returns the number of the job."""
    if not (folder / "launch").exists():
        copy_scripts(folder)
    said = slurm.run("sbatch", "--parsable", *options, "launch/slurm.sbatch", *settings, cwd=folder)
    assert said.strip().isdecimal(), said
    return said.strip()


def give_time(slurm: Cluster, job: str) -> None:
    """Wait until the job has been started again, and let it finish in this life: slow machines need more than one."""
    until(lambda: slurm.value(job, "Restarts") == "1", "the job starts again")
    slurm.run("scontrol", "update", f"jobid={job}", "TimeLimit=60")


def log(folder: Path, job: str) -> str:
    return (folder / f"slurm-tabicl-{job}.log").read_text()


def rows(run_dir: Path) -> int:
    return len(Records(run_dir).rows("metrics.csv"))


def test_a_job_that_reaches_its_time_limit_goes_on_to_the_same_end(slurm, tmp_path):
    options = ["--ntasks=2", "--overcommit", "--time=2", "--signal=USR1@45"]
    job = sbatch(slurm, tmp_path, options, *LONG, f"run_dir={tmp_path / 'torn'}")
    give_time(slurm, job)
    until(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "the job ends", seconds=3000)
    assert slurm.state(job) == "COMPLETED", log(tmp_path, job)
    said = log(tmp_path, job)
    assert "SIGUSR1: stopping after this step" in said and f"SLURM job {job} is requeued" in said
    assert "resumed at step" in said
    whole = sbatch(slurm, tmp_path, ["--ntasks=2", "--overcommit", "--time=60"], *LONG, f"run_dir={tmp_path / 'whole'}")
    until(lambda: slurm.state(whole) in ("COMPLETED", "FAILED"), "the other job ends", seconds=3000)
    assert_same_end(tmp_path / "torn", tmp_path / "whole")


def test_an_array_trains_a_seed_in_each_job(slurm, tmp_path):
    (tmp_path / "settings").write_text("optimizer=muon\noptimizer=adamw seed=5\n")
    options = ["--array=0-1", "--time=20"]
    seeds = sbatch(slurm, tmp_path, options, *SETTINGS, "seed=%a", f"run_dir={tmp_path}/seed-%a")
    lines = sbatch(slurm, tmp_path, options, *SETTINGS, "@settings", f"run_dir={tmp_path}/line-%a")
    for job in (f"{seeds}_0", f"{seeds}_1", f"{lines}_0", f"{lines}_1"):
        until(lambda job=job: slurm.state(job) in ("COMPLETED", "FAILED"), "the jobs end")
        assert slurm.state(job) == "COMPLETED"
    run(tmp_path / "seed", *SETTINGS[1:], "seed=1")
    assert_same_end(tmp_path / "seed-1", tmp_path / "seed")
    run(tmp_path / "line", *SETTINGS[1:], "optimizer=adamw", "seed=5")
    assert_same_end(tmp_path / "line-1", tmp_path / "line")


def test_a_cancelled_job_saves_a_checkpoint_and_does_not_come_back(slurm, tmp_path):
    job = sbatch(slurm, tmp_path, ["--time=20"], *LONG, f"run_dir={tmp_path / 'run'}")
    until(lambda: rows(tmp_path / "run") > 5, "the run begins")
    slurm.run("scancel", job)
    until(lambda: slurm.state(job) == "CANCELLED" and "is not requeued" in log(tmp_path, job), "the job ends")
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["status"] == "preempted" and status["step"] == last(tmp_path / "run")["global_step"] > 0


def test_a_job_whose_machine_is_lost_starts_again(slurm, tmp_path):
    settings = [*SETTINGS, "curriculum.stages.smoke.steps=1000", "checkpoint.every=20"]
    job = sbatch(slurm, tmp_path, ["--time=60"], *settings, f"run_dir={tmp_path / 'run'}")
    until(lambda: rows(tmp_path / "run") > 50, "the run begins")
    slurm.lose_machine(job)
    until(lambda: slurm.state(job) == "PENDING", "SLURM notices")
    slurm.start("slurmd", "-D")
    until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), "the job ends")
    assert slurm.state(job) == "COMPLETED" and "resumed at step" in log(tmp_path, job)
    run(tmp_path / "whole", *settings[1:])
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_job_submitted_from_python_goes_on_after_its_time_limit(slurm, tmp_path, monkeypatch):
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    options = SubmitOptions(gpus=0, hours=2 / 60)
    job = submit([*LONG, f"run_dir={tmp_path / 'run'}"], options, tmp_path / "jobs")
    give_time(slurm, job.job_id)
    until(lambda: slurm.state(job.job_id) in ("COMPLETED", "FAILED", "TIMEOUT"), "the job ends", seconds=3000)
    said = Path(job.paths.stdout).read_text()
    assert slurm.state(job.job_id) == "COMPLETED" and "resumed at step" in said, said
    assert job.result() is None
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "finished"
