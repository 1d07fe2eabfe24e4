"""How a process was launched, according to its environment, and the script that launches several."""

import os
import subprocess
from pathlib import Path

import pytest
from meeting import until

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


# In place of python: prints a configuration, or stands for torchrun, which ends with an error after a signal.
PYTHON = """#!/usr/bin/env bash
status() {  # dated later than the start, which may lie in the same tick of the clock
    echo "{\\"status\\": \\"$1\\"}" > "a run/status.json"; touch -d "1 hour" "a run/status.json"
}
echo "$*" >> calls
case "$*" in
*--cfg*) echo "run_dir: a run" ;;
*fail*) exit 1 ;;
*signal*)
    trap '[ "${*: -1}" = early-signal ] || status preempted; exit 1' TERM
    touch ready
    while true; do sleep 0.1; done ;;
*) for last; do true; done; status "$last" ;;
esac
"""


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("argument", "code"),
    [("finished", 0), ("preempted", 75), ("fail", 1), ("signal", 75), ("early-signal", 75), ("one", 0)],
)
def test_the_launch_script_ends_as_the_run_did(argument, code, tmp_path):
    (tmp_path / "local.sh").write_text((Path(__file__).parents[2] / "launch/local.sh").read_text())
    (tmp_path / "setup.sh").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")"\nPATH=$PWD:$PATH\n')
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/status.json").write_text('{"status": "preempted"}')  # of the time before
    os.utime(tmp_path / "a run/status.json", (0, 0))
    devices = [] if argument == "one" else ["2"]
    with subprocess.Popen(["bash", tmp_path / "local.sh", *devices, argument]) as process:
        if "signal" in argument:
            until((tmp_path / "ready").exists)
            process.terminate()
    assert process.returncode == code
    started = (tmp_path / "calls").read_text().splitlines()[-1]
    ranks = "-m torch.distributed.run --standalone --nproc-per-node 2 " if devices else ""
    assert started == f"{ranks}-m tabicl_train {argument}"
