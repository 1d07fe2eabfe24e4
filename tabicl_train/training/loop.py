"""A pretraining run, from its configuration to its last checkpoint; `fit` is the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tabicl_train.config.schema import RunConfig, StreamConfig, configured_prior
from tabicl_train.console import info
from tabicl_train.errors import ConfigError
from tabicl_train.run import checkpoint
from tabicl_train.signals import Stop
from tabicl_train.stream.steps import StepStream
from tabicl_train.stream.workers import Loader
from tabicl_train.training.callbacks.build import build_callbacks
from tabicl_train.training.callbacks.callback import Callbacks, Reason, RunContext
from tabicl_train.training.checks import check_machine, check_network
from tabicl_train.training.cuda_graph import step_problem
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.rank_process import RankProcess
from tabicl_train.training.run_folder import RunFolder
from tabicl_train.training.state import TrainState, build_module

__all__ = ["train"]


def train(config: RunConfig, callbacks: Sequence[Any] = ()) -> str:
    """Start or continue the run in `config.run_dir`, as one of its ranks.

    In the main thread of a process, stop signals such as ctrl-C end the run after the current step, with a checkpoint.
    In another thread they are not watched, and a warning says so; `trainer.max_hours` works in any thread.

    Parameters
    ----------
    config : RunConfig
        The run; equal on all ranks.
    callbacks : sequence of Callback
        Further callbacks, called before those of the configuration on every rank.

    Returns
    -------
    str
        "finished", also if there is nothing left to do, or "preempted": the same command continues the run.

    Raises
    ------
    ConfigError
        On all ranks, if the run cannot start.
    Diverged
        On all ranks, if the run no longer learns, or has skipped most of its steps.
    """
    with RankProcess.open(config.trainer) as process:
        launch = process.launch
        problems = check_machine(config, launch)
        # Without its GPU, this rank cannot be connected with the others.
        if not process.has_device:
            raise ConfigError(problems)

        # Workers are forked before this process has threads, a process group or a CUDA context: in the trainer of the
        # `tabicl` package, workers forked later took 13 s instead of 0.1 s a batch. They start idle, since the
        # checkpoint is not read yet.
        stream = build_stream(config, launch.rank, launch.size, process.device)
        has_steps = not problems and needs_tables(config)
        loader = process.enter(build_loader(stream, config.stream, process.device, launch.local_size, has_steps))

        ranks = process.connect()
        ranks.raise_on_all_ranks(problems)
        with RunFolder.open(config, ranks) as folder:
            # Where the run begins: at step 0 or at its newest checkpoint.
            start = folder.find_start()
            if start.is_finished:
                return folder.finish_earlier(start)
            # Tables are drawn while the network is built, which takes a second.
            if start.has_steps:
                start_drawing(loader, start.steps, process.stop, ranks)

            # The network, the optimizer and the callbacks, with their states in the checkpoint.
            module, optimizer = build_module(config, start.content, ranks, process.device)
            ranks.raise_on_all_ranks(ranks.from_first(lambda: check_network(module)))
            state = TrainState(module, optimizer, start.steps, start.last, ranks.rank)
            context = RunContext(
                config=config,
                values=folder.values,
                prior=stream.prior,
                stream=stream,
                loader=loader,
                device=process.device,
                records=folder.records,
                status=folder.status,
                ranks=ranks,
                stop=process.stop,
                resumed=start.content is not None,
            )
            called = Callbacks([*callbacks, *build_callbacks(context)], context)
            if start.content is not None:
                called.load(start.content)

            # Training, and how it ends.
            folder.begin(state, start, context)
            start.content = None  # hundreds of megabytes
            with folder.failures(called, state):
                reason = fit(state, loader, called)
            return folder.close(state, reason, start, process.stop)


def fit(state: TrainState, loader: Loader, callbacks: Callbacks) -> Reason:
    """Train until the last step, until a callback ends the run, or until a rank is asked to stop.

    Parameters
    ----------
    state : TrainState
        Weights, optimizer and steps done; it is changed.
    loader : Loader
        Yields this rank's tables of each step.
    callbacks : Callbacks
        What watches and keeps the run; the last of them save checkpoints, validate and test.

    Returns
    -------
    Reason
        Why training ended.
    """
    callbacks.start(state)
    while (reason := callbacks.reason_to_end(state)) is None:
        item = loader.next()  # waits for tables, or for a stop signal
        # This and the gradients are all that ranks exchange in every step.
        reason = callbacks.agree_to_stop(item)
        if reason is not None:
            break
        assert item is not None  # otherwise all ranks have stopped
        item = item.to(state.device)
        state.module.seed_torch(state.step, "callbacks")  # equally on all ranks
        callbacks.before_step(state, item)
        state.take_step(item)
        callbacks.after_step(state, item)  # guard, metrics, averages, checkpoint, validation
    return callbacks.end(state, reason)


def needs_tables(config: RunConfig) -> bool:
    """Whether workers are worth starting: judged by file names, the newest checkpoint is from before the last step."""
    # This is a guess, since workers are forked before the run directory is locked and read. `RunFolder.find_start`
    # decides what is left to do. If the newest file is damaged, steps are left and this process draws the tables.
    saved = checkpoint.saved(Path(config.run_dir) / "checkpoints")
    newest = max((checkpoint.step_of(path) for path in saved), default=0)
    return newest < config.total_steps


def build_stream(config: RunConfig, rank: int, ranks: int, device: torch.device) -> StepStream:
    """Build the stream of a rank's tables in all steps, with the layouts and padding that its device needs."""
    return StepStream(
        configured_prior(config.prior),
        config.curriculum,
        config.model,
        config.seed,
        range(config.total_steps),
        rank,
        ranks,
        prepares=device.type == "cuda",
        pads=step_problem(config, ranks) is None,
    )


def build_loader(
    stream: StepStream, config: StreamConfig, device: torch.device, local_size: int, has_steps: bool = True
) -> Loader:
    """Build the loader of tables, idle; without steps to train it has no workers."""
    if not has_steps:
        return Loader(stream, StreamConfig(num_workers=0))
    if config.name == "ray":
        from tabicl_train.stream.ray_actors import RayLoader

        return RayLoader(stream, config, device)
    local = config.local(local_size)
    if config.num_workers is not None and local.workers < config.num_workers:
        info(f"warning   stream.num_workers is {config.num_workers}; limited to {local.workers} by the number of cores")
    return Loader(stream, local, device)


def start_drawing(loader: Loader, step: int, stop: Stop, ranks: Ranks) -> None:
    """Start drawing tables at this step; raise ConfigError on all ranks if a rank cannot."""
    problems: list[str] = []
    try:
        loader.start(step, stop)
    except ConfigError as error:
        problems = error.problems
    ranks.raise_on_all_ranks(problems)
