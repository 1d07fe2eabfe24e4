"""How this process was started, and how the other processes of this machine are."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.errors import ConfigError
from tabicl_train.processes.signals import PARENT

# Exit code of a run that ended early, and that the same command continues. Under torchrun it is 0, since torchrun takes
# any other code for a failure; launch/torchrun.sh reads status.json instead.
PREEMPTED = os.EX_TEMPFAIL


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    launcher: "torchrun" (or anything else that sets RANK and WORLD_SIZE), "srun", or "plain"
    rank, size: rank among, and number of, all processes of the run
    local_rank, local_size: rank among, and number of, the processes on this machine
    address, port: where rank 0 hosts the store; port 0 stands for any free port
    agent: whether torchrun hosts the store there instead
    restarts: restarts that torchrun allows
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    agent: bool = False
    restarts: int = 0

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def problem(self, settings: TrainerConfig) -> str | None:
        """What contradicts the settings, if anything."""
        if self.size % self.local_size:
            return (
                f"{self.launcher} started {self.size} processes, {self.local_size} of them on this machine; "
                "each machine needs the same number"
            )
        if self.restarts and settings.nodes is not None:
            return f"trainer.nodes is {settings.nodes}; leave it out, torchrun may restart on other numbers of machines"
        pairs = {"devices": (settings.devices, self.local_size), "nodes": (settings.nodes, self.nodes)}
        for name, (configured, started) in pairs.items():
            if configured not in (None, started):
                return f"trainer.{name} is {configured}, but {self.launcher} gives {started}; leave it out"
        return None


def read_launch(settings: TrainerConfig, environ: Mapping[str, str]) -> Launch:
    """Find out from the environment how this process was started.

    torchrun's variables win over SLURM's. SLURM's count only in an srun step with several tasks: the sbatch script
    itself is a single process, whatever the job's number of tasks. Raises ConfigError for an invalid NODE_RANK.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return torchrun_launch(settings, environ)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and slurm_tasks(environ) > 1:
        return srun_launch(environ)
    devices, nodes = settings.devices or 1, settings.nodes or 1
    if nodes == 1:  # the variables below may be set for another purpose
        return Launch("plain", 0, devices, 0, devices, "127.0.0.1", 0)
    node = int(environ.get("NODE_RANK", 0))
    if not 0 <= node < nodes:
        raise ConfigError([f"NODE_RANK is {node}, and trainer.nodes is {nodes}; it must lie in 0..{nodes - 1}"])
    address, port = environ.get("MASTER_ADDR") or socket.gethostname(), int(environ.get("MASTER_PORT", 0))
    return Launch("plain", node * devices, devices * nodes, 0, devices, address, port)


def torchrun_launch(settings: TrainerConfig, environ: Mapping[str, str]) -> Launch:
    size = int(environ["WORLD_SIZE"])
    local_size = int(environ.get("LOCAL_WORLD_SIZE") or max(1, size // (settings.nodes or 1)))
    rank, local_rank = int(environ["RANK"]), int(environ.get("LOCAL_RANK", 0))
    address, port = environ.get("MASTER_ADDR") or "127.0.0.1", int(environ.get("MASTER_PORT", 0))
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return Launch("torchrun", rank, size, local_rank, local_size, address, port, agent, restarts)


def slurm_tasks(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)


def srun_launch(environ: Mapping[str, str]) -> Launch:
    tasks = slurm_tasks(environ)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    address, port = environ.get("MASTER_ADDR"), int(environ.get("MASTER_PORT", 0))
    if address is None:
        address = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1")
    if not port:  # below the range from which the system hands out free ports; each step of a job has its own
        port = 15_000 + (int(environ.get("SLURM_JOB_ID", 0)) * 7 + int(environ["SLURM_STEP_ID"])) % 15_000
    return Launch("srun", rank, tasks, local_rank, max(1, tasks // nodes), address, port)


def first_host(hosts: str) -> str:
    """The first host of a list in SLURM's notation, such as gpu[03-05,09],login1."""
    prefix, bracket, rest = re.match(r"([^,\[]+)(\[?)(.*)", hosts).groups()
    return prefix + re.match(r"\w+", rest)[0] if bracket else prefix


def start_children(launch: Launch) -> dict[int, subprocess.Popen]:
    """Start the other processes of this machine, by rank: the same command, with torchrun's variables."""
    common = {
        "WORLD_SIZE": launch.size,
        "LOCAL_WORLD_SIZE": launch.local_size,
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": launch.port,
        PARENT: os.getpid(),
    }
    children = {}
    for local_rank in range(1, launch.local_size):
        rank = launch.rank + local_rank
        variables = {**common, "RANK": rank, "LOCAL_RANK": local_rank}
        children[rank] = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdin=subprocess.DEVNULL,
        )
    return children


def describe_exit(code: int) -> str:
    """How a process ended, from the exit code as Python's process objects give it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
