"""Checks of a run before it starts: of the machine, before processes are forked, and of the network, once it is built.

Contradictions that do not depend on the machine are found when the configuration is composed (`config/checks.py`). Each
check lists problems, which `Ranks.raise_on_all_ranks` reports.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch

from tabicl_train.config.schema import RunConfig, TrainerConfig, configured_prior
from tabicl_train.model.family import Network
from tabicl_train.model.predict import forward_differs
from tabicl_train.outputs import STUDY, input_problems, unwritable_folder
from tabicl_train.run import checkpoint
from tabicl_train.stream.schedules import schedule_problems
from tabicl_train.training.compiling import compiler_problems
from tabicl_train.training.distributed.processes import Launch, is_rank, srun_problems, torchrun_problems
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.objectives import mixing_problem
from tabicl_train.training.planning import memory_problems
from tabicl_train.training.precision import has_bf16, uses_cuda

__all__ = ["check_machine", "check_network"]

MOST_PASSES = 100  # the largest value of prior.passes that is suggested


def check_machine(config: RunConfig, launch: Launch, uses_folder: bool = True) -> list[str]:
    """List why a run cannot start on this machine, without a CUDA context or threads.

    The driver is asked for the memory of the GPU. Processes that are forked afterward, such as workers, cannot use
    CUDA.

    Parameters
    ----------
    config : RunConfig
        The run, whose values have been checked.
    launch : Launch
        The place of this process among the ranks, or that of rank 0 if they have not been started.
    uses_folder : bool
        Whether the run writes to `run_dir`, and this process or torchrun starts it. The runs of a sweep and a Trainer
        of Lightning have other folders, and are started otherwise.

    Returns
    -------
    list of str
        The problems, one line each.
    """
    # How the processes were started, where they write, and the GPUs.
    trainer = config.trainer
    problems = devices_problems(trainer.devices, launch)
    if uses_folder:
        problems += srun_problems() + torchrun_problems() + folder_problems(config, launch)
    problems += gpu_problems(trainer, launch)

    # The tables: who draws them, and whether there are enough.
    if config.prior["name"] == "one_table" and config.init_weights is None and not config.has_checkpoint:
        problems.append("init_weights is not set; prior=one_table fine-tunes given weights on a single table")
    if config.stream.name == "ray":
        from tabicl_train.stream.ray_actors import ray_problems

        problems += ray_problems(config.stream)
    problems += schedule_problems(config.curriculum)
    problems += missing_steps(config)
    problems += config.too_few_tables(launch.size)[:1]

    # Memory and the compiler.
    problems += memory_problems(config, launch.local_rank)
    if trainer.compile:
        problems += compiler_problems(trainer)
    return problems


def devices_problems(devices: int | None, launch: Launch) -> list[str]:
    """Return a contradiction between `trainer.devices` and the number of ranks, in a list."""
    if devices in (None, launch.local_size):
        return []
    if launch.size == 1 and not is_rank():
        # `train` was called from Python.
        start = f"start the command tabicl-train trainer.devices={devices}, or torchrun, instead"
        return [f"trainer.devices is {devices}, but this process is a single rank; {start}"]
    return [f"trainer.devices is {devices}, but torchrun has started {launch.local_size} ranks here; leave it out"]


def folder_problems(config: RunConfig, launch: Launch) -> list[str]:
    """List why the run directory cannot be used; only rank 0 writes to it."""
    problems = []
    run_dir = Path(config.run_dir)
    unwritable = unwritable_folder(run_dir) if launch.rank == 0 else None
    if unwritable:
        problems.append(f"run_dir is {config.run_dir!r}; {unwritable}")
    elif os.path.exists(run_dir / STUDY):
        problems.append(f"run_dir is {config.run_dir!r}; it is the directory of a sweep, which contains runs")
    # A table may be called metrics.csv.
    return problems + input_problems("run_dir", run_dir, config.table_inputs)


def gpu_problems(trainer: TrainerConfig, launch: Launch) -> list[str]:
    """List what the GPUs of this machine lack."""
    problems = []
    bf16_on_gpu = trainer.precision == "bf16" and trainer.accelerator != "cpu"
    if trainer.accelerator == "cuda" and not torch.cuda.is_available():
        problems.append("trainer.accelerator is 'cuda'; torch finds no GPU on this machine")
    elif bf16_on_gpu and torch.cuda.is_available() and not has_bf16():
        problems.append("trainer.precision is 'bf16', which the GPU of this machine does not support; use fp16 or fp32")
    ranks = launch.local_size
    if uses_cuda(trainer) and 0 < torch.cuda.device_count() < ranks:
        problems.append(f"{ranks} ranks were started here, but torch finds {torch.cuda.device_count()} GPUs")
    return problems


def missing_steps(config: RunConfig) -> list[str]:
    """Return why a prior of stored tables has none for some steps, in a list: they end too early, or files are missing.

    The line suggests fewer steps or more passes, if that helps.
    """
    prior = configured_prior(config.prior)
    steps = config.curriculum.whole_steps(prior)
    if steps >= config.total_steps:
        return []
    lacking = f"prior: its stored tables end after {steps:,} of the run's {config.total_steps:,} steps"
    advice = [f"set trainer.max_steps={steps}"] if steps else []
    # Try how many passes would be enough, if the prior can repeat its tables.
    if "passes" in config.prior:
        repeated = copy.copy(prior)
        for passes in range(2, MOST_PASSES + 1):
            repeated.passes = passes  # type: ignore[attr-defined]
            if config.curriculum.whole_steps(repeated) >= config.total_steps:
                advice.append(f"prior.passes={passes}")
                break
    return [f"{lacking}; {' or '.join([*advice, 'dump more'])}"]


def check_network(module: TrainedNetwork) -> list[str]:
    """List why a network cannot be trained, from its losses and predictions for a few small tables.

    - `encode` and `decode` must predict the same as `forward`, so that what is trained is what is scored.
    - The loss of a table must not depend on the other tables of its pack.
    - A checkpoint must be able to hold the network, and no pass may change the shapes that it holds.
    - Trained parameters must be float32.

    Parameters
    ----------
    module : TrainedNetwork
        The network with its objective.

    Returns
    -------
    list of str
        The problems, one line each.
    """
    # What needs no pass.
    network = module.model
    name = type(network).__name__
    problem = checkpoint.state_dict_problem(network.state_dict())
    if problem is not None:
        # Its checkpoints could not be read.
        return [f"{name}: {problem}"]
    for key, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            return [f"{name}: {key} is {parameter.dtype}; parameters that are trained must be torch.float32"]

    # Passes through the network, and whether they have changed its shapes.
    shapes_before = shapes_of_weights(network)
    results = [
        forward_differs(network, perturbed=True),
        mixing_problem(network, module.objective, module.auxiliary),
    ]
    problems = [problem for problem in results if problem is not None]
    differences = shapes_before.items() ^ shapes_of_weights(network).items()
    for key in sorted({key for key, _ in differences}):
        advice = "keep it as an attribute, or as a buffer with persistent=False"
        what = f"a pass changes the shape of {key} in the state_dict, so it could not be loaded again"
        problems.append(f"{name}: {what}; {advice}")
    return problems


def shapes_of_weights(network: Network) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in network.state_dict().items()}
