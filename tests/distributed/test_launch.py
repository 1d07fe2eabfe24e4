"""How a process was launched, according to its environment."""

import pytest

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.processes.launch import Launch, first_host, read_launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
SRUN = SBATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[03-04],login",
                 "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0)),
        ({"devices": 2}, {}, Launch("plain", 0, 2, 0, 2, "127.0.0.1", 0)),
        ({"devices": 2, "nodes": 2}, {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
         Launch("plain", 2, 4, 0, 2, "a", 9)),
        ({}, TORCHRUN, Launch("torchrun", 3, 4, 1, 2, "a", 1234, agent=True)),
        ({}, TORCHRUN | SRUN, Launch("torchrun", 3, 4, 1, 2, "a", 1234, agent=True)),
        ({"devices": 2}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
         Launch("torchrun", 1, 2, 1, 2, "127.0.0.1", 0)),
        ({}, SRUN, Launch("srun", 2, 4, 0, 2, "gpu03", 15_000 + 17 * 7 + 2)),
        ({"devices": 2}, SBATCH | {"SLURM_NTASKS": "1"}, Launch("plain", 0, 2, 0, 2, "127.0.0.1", 0)),
        ({}, SBATCH, Launch("plain", 0, 1, 0, 1, "127.0.0.1", 0)),
    ],
)  # fmt: skip
def test_who_started_this_process(settings, environ, expected):
    assert read_launch(TrainerConfig(**settings), environ) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 4}, "trainer.devices is 4, but torchrun gives 2"),
        ({"nodes": 1}, "trainer.nodes is 1, but torchrun gives 2"),
        ({"devices": 2, "nodes": 2}, None),
        ({}, None),
    ],
)
def test_settings_that_differ_from_the_launcher_are_refused(settings, message):
    settings = TrainerConfig(**settings)
    problem = read_launch(settings, TORCHRUN).problem(settings)
    assert problem is None if message is None else problem.startswith(message)
    assert "machine" in read_launch(settings, TORCHRUN | {"WORLD_SIZE": "5"}).problem(settings)


@pytest.mark.parametrize(
    ("hosts", "first"), [("a", "a"), ("gpu-1,b", "gpu-1"), ("n[007-9,11],m", "n007"), ("x[4],y", "x4")]
)
def test_the_first_of_the_hosts_of_slurm(hosts, first):
    assert first_host(hosts) == first


def test_a_run_that_torchrun_may_restart_has_no_fixed_number_of_machines():
    environ = TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    for settings, refused in (({"nodes": 2}, True), ({"devices": 2}, False)):
        problem = read_launch(TrainerConfig(**settings), environ).problem(TrainerConfig(**settings))
        assert bool(problem and "leave it out" in problem) == refused
