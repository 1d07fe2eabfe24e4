"""How the processes of a run start.

torchrun starts the ranks, or `trainer.devices=N` does with the same elastic agent of torch (several machines need
torchrun, launch/README.md).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.prior_checks import missing_steps
from tabicl_train.console import is_first
from tabicl_train.doors import plugins
from tabicl_train.errors import TORCHRUN
from tabicl_train.outputs import input_problems, unwritable_folder
from tabicl_train.signals import die_with_parent
from tabicl_train.stream.schedules import schedule_problems

if TYPE_CHECKING:
    from tabicl_train.config.schema import RunConfig

# Exit code of a run that was preempted, and that the same command continues. Under torchrun it is 0, since any other
# code counts as a failure.
PREEMPTED = os.EX_TEMPFAIL
STUDY = "study.log"  # Optuna's journal, in the folder of a sweep
OWN = "tabicl-train-"  # prefix of the elastic agent's run id if this program has started the agent
SHUTDOWN = 300  # seconds that ranks have for their last step and its checkpoint after a stop signal
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # by which torch's agent is told; that of torch 2.11 waits 30 s


@dataclass(frozen=True)
class Launch:
    """The place of this process among the ranks of a run, from torchrun's variables."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def problems(self, devices: int | None) -> list[str]:
        """List the contradiction between `trainer.devices` and the number of ranks."""
        if devices in (None, self.local_size):
            return []
        if self.size == 1 and not is_rank():  # `train` was called from Python
            start = f"start the command tabicl-train trainer.devices={devices}, or torchrun, instead"
            return [f"trainer.devices is {devices}, but this process is a single rank; {start}"]
        return [f"trainer.devices is {devices}, but torchrun has started {self.local_size} ranks here; leave it out"]


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the place of this process from torchrun's variables; without them it is a single process."""
    if not is_rank(environ):
        return Launch()
    return Launch(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_size=int(environ.get("LOCAL_WORLD_SIZE", 1)),
    )


def is_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or this program as it does, has started this process."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def is_own_launch(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this program, rather than torchrun, has started the agent of this rank."""
    return environ.get("TORCHELASTIC_RUN_ID", "").startswith(OWN)


def start_command() -> str:
    """Return the command that starts this run or sweep, after a colon; "" if another program such as torchrun did."""
    program = Path(sys.argv[0])
    name = program.name
    if program.parent.name == "tabicl_train" and (is_own_launch() or not is_rank()):
        name = "tabicl-train"  # python -m tabicl_train
    if name not in ("tabicl-train", "tabicl-sweep"):
        return ""
    return f": {shlex.join([name, *sys.argv[1:], *plugins.arguments(hashes=False)])}"


def start_problems(config: RunConfig) -> list[str]:
    """List why a run cannot start on this machine; `config.problems` are the same on every machine."""
    import torch

    from tabicl_train.training.precision import has_bf16, uses_cuda

    trainer = config.trainer
    run_dir = Path(config.run_dir)
    problems = srun_problems() + torchrun_problems()
    unwritable = unwritable_folder(run_dir) if is_first() else None  # other ranks do not need it
    if unwritable:
        problems.append(f"run_dir is {config.run_dir!r}; {unwritable}")
    elif os.path.exists(run_dir / STUDY):
        problems.append(f"run_dir is {config.run_dir!r}; it is the folder of a sweep, whose runs lie in it")
    problems += input_problems("run_dir", run_dir, config.table_inputs)  # a table may be called metrics.csv
    bf16_on_gpu = trainer.precision == "bf16" and trainer.accelerator != "cpu"
    if trainer.accelerator == "cuda" and not torch.cuda.is_available():
        problems.append("trainer.accelerator is 'cuda'; torch finds no GPU on this machine")
    elif bf16_on_gpu and torch.cuda.is_available() and not has_bf16():
        problems.append("trainer.precision is 'bf16', which the GPU of this machine lacks; use fp16 or fp32")
    ranks = read_launch().local_size
    if uses_cuda(trainer) and 0 < torch.cuda.device_count() < ranks:
        problems.append(f"{ranks} ranks were started here, but torch finds {torch.cuda.device_count()} GPUs")
    if config.prior["name"] == "one_table" and config.init_weights is None and not config.has_checkpoint:
        problems.append("init_weights is not set; prior=one_table fine-tunes weights, on a single table")
    if config.stream.name == "ray":
        from tabicl_train.stream.ray_actors import ray_problems

        problems += ray_problems(config.stream)
    problems += schedule_problems(config.curriculum)
    problems += missing_steps(config)
    return problems


def srun_problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the problem if srun has started several tasks without torchrun."""
    if is_rank(environ) or "SLURM_STEP_ID" not in environ:
        return []
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1:
        return []
    return [f"srun has started {tasks} tasks of this command; {TORCHRUN}"]


def torchrun_problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the problem if the variables of a rank, as another launcher may set them, are not those of torchrun."""
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    given = {name: environ[name] for name in single if name in environ}
    are_numbers = all(map(str.isdecimal, given.values()))
    if given.items() <= single.items() or (are_numbers and not is_rank(environ)):
        return []
    if are_numbers and len(given) == len(single):
        rank, size, local_rank, local_size = (int(given[name]) for name in single)
        if rank < size and local_rank < local_size and local_size <= size and size % local_size == 0:
            return []
    found = " ".join(f"{name}={value}" for name, value in given.items())
    missing = [name for name in single if name not in given]
    lack = f" without {' and '.join(missing)}" if missing else ""
    return [f"the environment has {found}{lack}, which torchrun does not set; unset them, or {TORCHRUN}"]


def shares_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether restarted ranks find the addresses of earlier ones, as one of two restarts then failed in torch 2.13."""
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    is_of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_new = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1"  # the agent opens one for each start
    return restarts > 0 and is_of_agent and not is_new


def die_with_launcher() -> None:
    """Let the system kill a rank whose elastic agent has ended, since it would keep its device."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
