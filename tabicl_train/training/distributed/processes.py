"""How the processes of a run are started, read from the environment.

Ranks are started by torchrun, or by `trainer.devices=N` with the same elastic agent of torch. Several machines need
torchrun (launch/README.md).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tabicl_train.doors import plugins
from tabicl_train.errors import TORCHRUN, ConfigError
from tabicl_train.signals import die_with_parent

# Exit code of a preempted run, which the same command continues. Under torchrun it is 0, since any other code counts as
# a failure.
PREEMPTED = os.EX_TEMPFAIL
OWN = "tabicl-train-"  # prefix of the elastic agent's run id if this program started the agent
SHUTDOWN = 300  # seconds that ranks have for their last step and its checkpoint after a stop signal
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # tells torch's agent so; torch 2.11 ignores it and waits 30 s


@dataclass(frozen=True)
class Launch:
    """The place of this process among the ranks of a run, from torchrun's variables.

    Parameters
    ----------
    rank, size : int
        The number of this rank, and the number of ranks on all machines.
    local_rank, local_size : int
        The same among the ranks of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the place of this process from torchrun's variables; without them it is a single process.

    Raises
    ------
    ConfigError
        If the variables were set by another launcher.
    """
    if problems := torchrun_problems(environ):
        raise ConfigError(problems)
    if not is_rank(environ):
        return Launch()
    return Launch(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
    )


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started as a rank, by torchrun or by this program."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def is_own_launch(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the agent of this rank was started by this program rather than by torchrun."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN)


def start_command() -> str:
    """Return a colon and the command that started this run or sweep; "" if it was another one, such as torchrun."""
    program = Path(sys.argv[0])
    name = program.name
    if program.parent.name == "tabicl_train" and (is_own_launch() or not is_rank()):
        name = "tabicl-train"  # python -m tabicl_train
    if name not in ("tabicl-train", "tabicl-sweep"):
        return ""
    return f": {shlex.join([name, *sys.argv[1:], *plugins.arguments(hashes=False)])}"


def srun_problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a problem, in a list, if srun has started several tasks without torchrun."""
    if is_rank(environ) or "SLURM_STEP_ID" not in environ:
        return []
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1:
        return []
    return [f"srun has started {tasks} tasks of this command; {TORCHRUN}"]


def torchrun_problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a problem, in a list, if the variables of a rank were set by a launcher other than torchrun.

    The variables are RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
    """
    # Values of a single process, as Kubernetes sets them for one replica; some may be missing, or all.
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    given = {name: environ[name] for name in single if name in environ}
    if given.items() <= single.items():
        return []
    # Without both RANK and WORLD_SIZE this is a single process, too; one of them may be exported for a later torchrun.
    are_numbers = all(map(str.isdecimal, given.values()))
    if are_numbers and not is_rank(environ):
        return []
    # All of them, with values that fit together.
    if are_numbers and len(given) == len(single):
        rank, size, local_rank, local_size = (int(given[name]) for name in single)
        if rank < size and local_rank < local_size and local_size <= size and size % local_size == 0:
            return []
    # Anything else.
    found = " ".join(f"{name}={value}" for name, value in given.items())
    missing = [name for name in single if name not in given]
    lack = f" without {' and '.join(missing)}" if missing else ""
    return [f"the environment has {found}{lack}, which torchrun does not set; unset them, or {TORCHRUN}"]


def shares_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether restarted ranks find the addresses of earlier ones; then one of two restarts failed in torch 2.13."""
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    is_of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent opens a store for each start.
    is_new = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"
    return restarts > 0 and is_of_agent and not is_new


def die_with_launcher() -> None:
    """Let the system kill a rank whose elastic agent has ended, since it would otherwise keep its device."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
