"""tabicl-submit, here on submitit's cluster of this machine."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
from command_line import command
from torch.distributed.run import get_args_parser
from training_runs import assert_same_end, train_by_command
from waiting import until

from tabicl_train.config.compose import compose
from tabicl_train.config.options import SubmitOptions
from tabicl_train.run.records import Records
from tabicl_train.run.status import read_status
from tabicl_train.training.distributed.submit import Training, submit_job

SETTINGS = ["prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=120", "checkpoint.every=1000",
            "trainer.accelerator=cpu"]  # fmt: skip
RAY = "stream.address=host:6379"


def test_all_mistakes_are_reported_at_once(tmp_path):
    result = command(
        "submit", "experiment=smoke", f"run_dir={tmp_path / 'run'}", "seed=x", "submit.nodes=0", "submit.hours=-1",
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.count("error: ") == 3
    for key in ("submit.nodes", "submit.hours", "seed"):
        assert f"error: {key}" in result.stderr
    assert "error: submit.sbatch: it must be a mapping" in command("submit", "seed=1", "submit.sbatch=fast").stderr
    assert "did you mean nodes" in command("submit", "experiment=smoke", "submit.nods=2").stderr
    many = command("submit", "experiment=smoke", "submit.nodes=4", "submit.gpus=8", "trainer.devices=8")
    assert "it must be at least 32, the number of processes" in many.stderr
    assert "trainer.devices is 8; leave it out" in many.stderr
    assert (
        "trainer.requeue is true; leave it out" in command("submit", "experiment=smoke", "trainer.requeue=true").stderr
    )
    assert "error: submit.hours is inf" in command("submit", "experiment=smoke", "submit.hours=inf").stderr
    assert "there are no settings of the run" in command("submit", "submit.gpus=8").stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("stream", "cores"), [([], 7), (["stream=ray"], 7), (["stream=ray", RAY], 2)])
def test_each_process_gets_cores_for_the_workers_of_its_machine(stream, cores, tmp_path, monkeypatch):
    submitted = mock.Mock()
    monkeypatch.setattr("tabicl_train.training.distributed.submit.submit_job", submitted)
    monkeypatch.setitem(sys.modules, "tabicl_train.sweep.space", None)  # needs Optuna, which the extra slurm lacks
    settings = ["experiment=smoke", *stream, "stream.num_workers=6", f"run_dir={tmp_path}/a run"]
    submitted.return_value.paths.stdout = Path(tmp_path, "a run/jobs/1_log.out")
    result = command("submit", *settings)
    assert result.returncode == 0 and submitted.call_args.args[-1] == cores
    assert f"tail -F '{tmp_path}/a run/jobs/1_log.out'" in result.stdout


@pytest.mark.parametrize(("gpus", "workers"), [(4, 8), (0, 1)])
def test_a_job_gets_a_number_of_workers_and_cores_for_them(gpus, workers, tmp_path, monkeypatch):
    """By default a run takes the cores of its machine, and those of this machine do not matter."""
    submitted = mock.Mock()
    monkeypatch.setattr("tabicl_train.training.distributed.submit.submit_job", submitted)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/own.yaml").write_text("# @package _global_\ndefaults: [smoke, _self_]\nname: own\n")
    own = ["--config-dir", str(tmp_path), "experiment=own"]
    result = command("submit", *own, f"run_dir='{tmp_path}/a,b'", f"submit.gpus={gpus}")
    assert result.returncode == 0, result.stderr
    arguments, *_, cores = submitted.call_args.args
    assert arguments[:3] == own
    assert compose(arguments[2:], str(tmp_path)).run_dir == f"{tmp_path}/a,b"
    assert f"stream.num_workers={workers}" in arguments and cores == workers + 1


def test_a_job_is_asked_to_stop_five_minutes_before_its_limit_or_halfway(tmp_path, monkeypatch):
    executor = mock.Mock()
    monkeypatch.setattr("submitit.AutoExecutor", executor)
    for hours, minutes, seconds in ((2, 120, 300), (0.1, 6, 180)):
        submit_job(["seed=1"], SubmitOptions(hours=hours), tmp_path)
        given = executor.return_value.update_parameters.call_args.kwargs
        assert (given["timeout_min"], given["slurm_signal_delay_s"]) == (minutes, seconds)


def test_without_slurm_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = command("submit", "experiment=smoke", f"run_dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert "the job cannot be submitted: " in result.stderr


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_are_started_by_the_elastic_agent(monkeypatch):
    one, several = Training(["seed=1"]), Training(["seed=1"], processes=4)
    assert one.command()[1:] == ["-m", "tabicl_train", "seed=1"]
    assert several.command()[1:] == ["-m", "tabicl_train", "seed=1", "trainer.devices=4"]
    variables = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "gpu[03-04]"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    agent = get_args_parser().parse_args(Training(["seed=1"], nodes=2, processes=8).command()[3:])
    assert (agent.nnodes, agent.nproc_per_node, agent.rdzv_backend, agent.rdzv_id) == ("2", "8", "c10d", "20007")
    assert agent.rdzv_endpoint == "gpu03:20007"
    assert "SIGUSR1" in agent.signals_to_handle
    assert agent.module
    assert [agent.training_script, *agent.training_script_args] == ["tabicl_train", "seed=1"]


@pytest.mark.slow
def test_a_job_at_its_time_limit_starts_again_and_ends_as_an_undisturbed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[4]))
    run_dir = tmp_path / "run"
    settings = [*SETTINGS, f"run_dir={run_dir}", "submit.cluster=local", "submit.gpus=0"]
    result = command("submit", "experiment=smoke", *settings)
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    job, log = int(words[1].strip(",")), Path(words[words.index("-F") + 1])
    assert words[0] == "job"
    try:
        until(lambda: len(Records(run_dir).rows("metrics.csv")) > 5, "the run begins", seconds=300)
        os.kill(parent_of(read_status(run_dir)["process"]), signal.SIGUSR2)  # submitit's signal before the time limit
        until(lambda: read_status(run_dir)["status"] == "finished", "the job ends", seconds=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGTERM)
    assert "120 steps in this run" in log.read_text()
    first, second = Records(run_dir).lines("provenance.jsonl")
    assert 0 == first["step"] < second["step"] < 120
    train_by_command(tmp_path / "whole", *SETTINGS)
    assert_same_end(run_dir, tmp_path / "whole")
