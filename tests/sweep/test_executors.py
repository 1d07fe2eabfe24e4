"""Where jobs run."""

import functools
import os
import signal
import time

import pytest
import waiting

from tabicl_train.config.compose import compose
from tabicl_train.config.sweep import SweepConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes.signals import PARENT
from tabicl_train.sweep.executors import executor, local
from tabicl_train.sweep.plan import make_plan

until = functools.partial(waiting.until, seconds=120.0)


def test_each_job_gets_gpus_of_its_own():
    pool = local.Pool(["2", "3", "5"], num_cores=2, limit=None)
    assert pool.has_room(2, 99) and pool.take("a", 2, 99) == ["2", "3"]
    assert not pool.has_room(2, 1) and pool.has_room(1, 1)
    assert pool.take("b", 1, 1) == ["5"] and not pool.has_room(1, 1)
    pool.give_back("a")
    assert pool.take("c", 1, 1) == ["2"] and pool.take("d", 1, 1) == ["3"]


def test_a_job_of_a_search_that_needs_more_gpus_than_there_are_does_not_wait_forever():
    pool = local.Pool(["0", "1"], num_cores=2, limit=None)
    assert pool.has_room(3, 1) and pool.take("a", 1, 1) == ["0"] and not pool.has_room(3, 1)


def test_jobs_share_gpus_where_more_are_wanted_at_once():
    pool = local.Pool(["0", "1"], num_cores=2, limit=3)
    assert [pool.take(name, 1, 2) for name in "ab"] == [["0"], ["1"]]
    assert pool.has_room(1, 2) and pool.take("c", 1, 2) in (["0"], ["1"])
    assert not pool.has_room(1, 2)
    pool.give_back("b")
    assert pool.has_room(1, 2) and pool.take("e", 1, 2) == ["1"]


def test_jobs_share_the_cores():
    pool = local.Pool([], num_cores=5, limit=None)
    assert pool.has_room(0, 9), "one job always runs"
    assert pool.take("a", 0, 2) == [] and pool.has_room(0, 3) and not pool.has_room(0, 4)
    pool.take("b", 0, 3)
    assert not pool.has_room(0, 1)
    pool.give_back("a")
    assert pool.has_room(0, 2)


CLUSTER = ("stream=ray", "stream.address=127.0.0.1:6379", "stream.num_workers=64")


@pytest.mark.parametrize(
    ("overrides", "expected"), [((), 2), (("trainer.devices=2", "stream.num_workers=3"), 8), (CLUSTER, 2)]
)
def test_cores_of_a_job(overrides, expected):
    _, (job,) = make_plan(["experiment=smoke"])
    job.config = compose(["experiment=smoke", *overrides])
    assert executor.cores(job) == expected


def test_a_job_of_a_sweep_gets_a_number_of_workers():
    """Since by default it would take all cores of the machine, like every other job."""
    _, (job,) = make_plan(["experiment=smoke"])
    assert executor.process_of(job, 5)[0][-1] == "stream.num_workers=5" and executor.cores(job, 5) == 6
    _, (job,) = make_plan(["experiment=smoke", "stream.num_workers=3"])
    assert executor.process_of(job, 5)[0][-1].startswith("run_dir=") and executor.cores(job, 5) == 4


@pytest.mark.parametrize(
    ("gpus", "limit", "overrides", "workers"),
    [
        (0, None, (), 1),
        (0, 2, (), 7),
        (0, 2, ("trainer.devices=2",), 3),
        (4, None, (), 3),
        (4, None, ("trainer.devices=2",), 3),
        (4, 8, (), 1),
        (1, None, (), 15),
    ],
)
def test_jobs_of_this_machine_share_its_cores_as_workers(gpus, limit, overrides, workers, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: range(16))
    _, (job,) = make_plan(["experiment=smoke", *overrides])
    here = local.Local(limit)
    assert here.workers(job) == workers
    assert here.needs(job)[1] == executor.processes(job) * (workers + 1)


def test_a_job_that_needs_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    here = local.Local(None)
    assert here.gpus == ["4", "GPU-7"]
    (job,) = make_plan(["experiment=smoke", "trainer.devices=3"])[1]
    assert here.problem(job) == "trainer.devices is 3, but this machine has 2 of them"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert local.Local(None).problem(job) is None


@pytest.mark.multi_process
def test_the_process_of_a_job(tmp_path, monkeypatch):
    """It is no rank of the job that the sweep runs in, has a session of its own, and its output goes to its log."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    script = f'echo "$RANK$SLURM_PROCID $OMP_NUM_THREADS $CUDA_VISIBLE_DEVICES ${PARENT} $(pwd)"; exec sleep 100'
    process = executor.start_process(["sh", "-c", script], 3, str(tmp_path), str(tmp_path / "log"), ["1", "2"])
    try:
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        log = tmp_path / "log"
        deadline = time.monotonic() + 60
        while "\n" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert log.read_text() == f" 3 1,2 {os.getpid()} {tmp_path}\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "words"),
    [("{nonsense: 1,cluster: local}", "nonsense"), ("{timeout_min: 5}", "slurm")],
)
def test_wrong_parameters_of_slurm_are_reported(options, words, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    from tabicl_train.sweep.executors.slurm import Slurm

    monkeypatch.setenv("PATH", str(tmp_path))  # without sbatch
    plan, _ = make_plan(["experiment=smoke", "sweep.executor=slurm", f"sweep.slurm={options}"])
    with pytest.raises(ConfigError, match=rf"sweep\.slurm: .*{words}"):
        Slurm(plan.sweep, tmp_path)


@pytest.mark.multi_process
def test_a_job_that_slurm_no_longer_has_does_not_run_forever(tmp_path, monkeypatch):
    """SLURM without accounting: there is no sacct that would say how a job has ended."""
    pytest.importorskip("submitit")
    from tabicl_train.sweep.executors import slurm

    queue, programs = tmp_path / "queue", tmp_path / "bin"
    programs.mkdir()
    scripts = {"srun": "", "squeue": f'[ -e {queue} ] || exit 1; while read -r job; do echo "$job"; done < {queue}'}
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(slurm, "LOOK", 0.0)
    plan, (job,) = make_plan(["experiment=smoke", "sweep.executor=slurm", f"run_dir={tmp_path}/sweep"])
    where = slurm.Slurm(plan.sweep, plan.folder)
    monkeypatch.setattr(where, "submit", lambda job: "submitted anew")
    job.folder.mkdir(parents=True)
    (job.folder / slurm.JOB_ID).write_text("17")
    queue.write_text("3\n17\n")
    assert where.has(job)
    handle = where.start(job)
    assert handle.poll() is None
    queue.unlink()
    assert handle.poll() is None, "SLURM does not answer"
    queue.write_text("3\n")
    assert handle.poll() == -signal.SIGKILL and not where.running
    assert not where.has(job) and where.start(job).submitted == "submitted anew"


def test_a_ray_cluster_that_does_not_answer_is_reported(monkeypatch):
    ray = pytest.importorskip("ray")
    from tabicl_train.sweep.executors.ray import Ray

    def fails(**_):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is '10\.0\.0\.9:6379'; .* nobody is there"):
        Ray(SweepConfig())


@pytest.mark.multi_process
@pytest.mark.parametrize("name", ["slurm", "ray"])
def test_jobs_elsewhere_end_with_the_exit_code_of_their_process(name, tmp_path, monkeypatch):
    """One that ends by itself, and one that is asked to stop."""
    pytest.importorskip("submitit" if name == "slurm" else "ray")
    monkeypatch.chdir(tmp_path)
    options = ["sweep.slurm={cluster: local,timeout_min: 5}"] if name == "slurm" else []
    many = "trainer.cpu_threads=999"  # more than any machine of the cluster has
    plan, jobs = make_plan(["experiment=smoke", many, "seed=0,1", f"sweep.executor={name}", "run_dir=sweep", *options])
    scripts = ["echo ready; exit 7", "trap 'exit 75' TERM; echo ready; while :; do sleep 0.1; done"]

    def process_of(job):
        return ["sh", "-c", scripts[job.seed]], 1, os.getcwd(), str(executor.log_file(job).absolute())

    if name == "slurm":
        from tabicl_train.sweep.executors import slurm as module

        where = module.Slurm(plan.sweep, plan.folder)
    else:
        from tabicl_train.sweep.executors import ray as module

        where = module.Ray(plan.sweep)
    monkeypatch.setattr(module, "process_of", process_of)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs would ignore it if this process does
    try:
        for job in jobs:
            job.folder.mkdir(parents=True)
        ends, stops = (where.start(job) for job in jobs)
        assert wait(ends) == 7
        log = executor.log_file(jobs[1])
        until(lambda: log.exists() and "ready" in log.read_text())
        assert stops.poll() is None
        stops.stop()
        assert wait(stops) in (75, -signal.SIGKILL) and not where.running
    finally:
        signal.signal(signal.SIGINT, interrupt)
        where.close()


def wait(handle) -> int:
    code = None

    def ended() -> bool:
        nonlocal code
        code = handle.poll()
        return code is not None

    until(ended)
    return code
