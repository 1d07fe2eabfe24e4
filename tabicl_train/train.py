"""A pretraining run, from its configuration to its last checkpoint; `fit` is the training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

from priors import Prior
from priors.real import real_tables
from tabicl_train import compiling
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles, Checkpoints, load_training
from tabicl_train.callbacks.diagnostics import Diagnostics
from tabicl_train.callbacks.final_test import FinalTest
from tabicl_train.callbacks.guard import Guard
from tabicl_train.callbacks.loggers import Logger, Loggers
from tabicl_train.callbacks.metrics import LoggedSteps, Metrics
from tabicl_train.callbacks.profile import Profile
from tabicl_train.callbacks.progress import Progress
from tabicl_train.callbacks.tensorboard_logger import TensorBoardLogger
from tabicl_train.callbacks.validation import Validation
from tabicl_train.callbacks.validation_tables import final_test_streams, validation_streams
from tabicl_train.callbacks.wandb_logger import WandbLogger
from tabicl_train.config.schema import RunConfig, StreamConfig, TrainerConfig, build_prior
from tabicl_train.console import counted, first_line, info
from tabicl_train.distributed.launch import Launch, read_launch, shares_store
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.distributed.signals import Stop, watch_signals
from tabicl_train.distributed.slurm import requeue
from tabicl_train.errors import ConfigError
from tabicl_train.model.kernels import memory
from tabicl_train.module import Pretraining
from tabicl_train.optimizer import MuonAdamW
from tabicl_train.planning.run_plan import expected_work, run_plan
from tabicl_train.precision import choose, policy, set_up_gpu, uses_cuda
from tabicl_train.resume import Start, find_start, initial_weights
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.lock import RunLock
from tabicl_train.run_dir.outputs import make_folder
from tabicl_train.run_dir.provenance import describe_machine, describe_origin, record_start
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunStatus
from tabicl_train.run_dir.tables_seen import TablesSeen
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader


def train(config: RunConfig) -> str:
    """Start or continue the run in `config.run_dir`, as one of its ranks.

    Parameters
    ----------
    config : RunConfig
        The run; equal on all ranks.

    Returns
    -------
    str
        finished, or preempted: the same command continues it.

    Raises
    ------
    ConfigError
        On all ranks, if the run cannot start.
    """
    folder = Path(config.run_dir)
    launch = read_launch()
    ranks, records, lock = Ranks(launch), Records(folder), RunLock(folder)
    device = device_of(config.trainer, launch)
    prior = build_prior(config.prior)
    fingerprint = None if (real := real_tables(prior)) is None else real.fingerprint()
    with watch_signals() as stop, contextlib.ExitStack() as stack:
        if config.trainer.max_hours is not None:
            stop.limit = 3600 * config.trainer.max_hours
        set_up_process(config)

        # Workers are forked before this process has threads, a process group or a CUDA context; forked late, workers
        # of the trainer in the `tabicl` package took 13 s instead of 0.1 s a batch. They start idle, since the
        # checkpoint is not read yet.
        has_steps = newest_step(folder) < config.total_steps
        stream = build_stream(config, prior, range(config.total_steps), launch)
        loader = stack.enter_context(build_loader(stream, config.stream, device, launch, has_steps))
        status, loggers, averages = RunStatus(records), Loggers(), Averages(config.averages)
        files = CheckpointFiles(config.checkpoint, lambda step: status.write(saved=step))
        parts, log, values = config.curriculum.parts(prior), loggers.log_metrics, dataclasses.asdict(config)
        streams = validation_streams(config.validation, parts, config.model)
        validation = Validation(
            config.validation, values, config.total_steps, streams, records, ranks, stop, averages, log
        )
        logged = LoggedSteps(config.trainer.log_every, config.total_steps)
        progress = Progress(config.curriculum, config.total_steps, lambda stage: expected_work(config, stage)[1])
        seen = TablesSeen(config, records)
        metrics = Metrics(config.curriculum, logged, records, loader, ranks, seen, progress, log)
        guard = Guard(config.guard, stream, logged, records, files, ranks, averages, metrics)
        callbacks = build_callbacks(config, guard, metrics, Diagnostics(records, logged, log), averages, status)
        fabric = open_fabric(config.trainer, launch, ranks, callbacks)
        ranks.raise_on_all_ranks(
            [
                *launch.problems(config.trainer.devices),
                *config.too_few_tables(ranks.size)[:1],
                *compiling.problems(config.trainer),
            ]
        )

        def open_run_dir() -> tuple[Start, dict | None]:
            make_folder("run_dir", folder / "checkpoints")
            lock.acquire()
            checkpoint.sweep(folder)
            checkpoint.sweep(folder / "checkpoints")
            return find_start(config, fingerprint)

        stack.callback(lock.release)
        start, content = ranks.from_first(open_run_dir)
        ranks.raise_on_all_ranks(start.problems(config.seed, fingerprint))
        streams = final_test_streams(config.validation, parts, config.model)
        test = FinalTest(config.validation, streams, choose(config.trainer), device, records, ranks, stop)
        validation.has_ended = ranks.from_first(lambda: validation.history(start.steps).ended is not None)
        last = start.steps if validation.has_ended else config.total_steps
        is_complete = last == start.steps and not ranks.from_first(
            lambda: validation.is_missing(start.steps) or test.is_missing(start.steps)
        )
        if is_complete:
            info(f"{folder}: finished already, {start.steps} steps are done")
            if ranks.rank == 0:
                status.finish_earlier(start.steps)
            close_process_group(ranks)
            return "finished"

        if last > start.steps:  # before the model is built, which takes a second
            start_drawing(loader, start.steps, stop, ranks)
        module, optimizer = build_module(config, fabric)
        if device.type == "cpu":
            memory.keep_freed_memory()
        origin = describe_origin()
        facts = {"real_tables": start.real_tables, "ranks": ranks.size, "device": device_name(device), **origin}
        saves = folder / "checkpoints"
        checkpoints = Checkpoints(saves, files, config.curriculum, values, facts, callbacks, ranks.rank)
        if content is not None:
            checkpoints.load(content, module, optimizer)
        elif config.init_weights is not None:
            module.model.load_state_dict(ranks.from_first(lambda: initial_weights(config)))
        del content  # hundreds of megabytes
        broadcast_weights(module)
        machines = ranks.gather(describe_machine(device))
        if ranks.rank == 0:
            loggers.loggers = build_loggers(config, folder, start.steps)
            status.values |= {"step": start.steps, "saved": start.steps}
            status.write()
            rewind(records, start.steps)
            if last > start.steps:
                records.replace("config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
                record_start(records, start.steps, origin, machines)
                introduce(config, prior, fabric, module, start, loader.drawers)
        try:
            step = fit(fabric, module, optimizer, loader, checkpoints, validation, ranks, stop, start.steps, last)
            unavailable = ranks.any(loader.unavailable)
            is_whole = (validation.has_ended or step >= config.total_steps) and not ranks.any(validation.postponed)
            is_whole = test.run(step) and is_whole
        except BaseException as error:
            fabric.call("on_exception", error=error, module=module)
            if ranks.rank == 0:
                with contextlib.suppress(OSError):  # of a full disk, which is the error
                    status.write(status="failed", cause=f"{type(error).__name__}: {first_line(error)}")
            loggers.close(1)
            raise
        loggers.close()
        outcome = "finished" if is_whole else "preempted"
        if ranks.rank == 0:
            status.write(status=outcome, step=step)
            if outcome == "preempted":
                path = folder / "checkpoints" / f"step-{step:08d}.ckpt"
                cause = "no tables can be drawn" if unavailable else stop.cause
                info(f"preempted at step {step} ({cause}): saved to {path}; the same command continues")
                if step > start.steps or not unavailable:
                    requeue(config.trainer)
        close_process_group(ranks)
        return outcome


def fit(
    fabric: Fabric,
    module: Pretraining,
    optimizer: MuonAdamW,
    loader: Loader,
    checkpoints: Checkpoints,
    validation: Validation,
    ranks: Ranks,
    stop: Stop,
    step: int,
    last: int,
) -> int:
    """The training loop.

    Parameters
    ----------
    step, last : int
        Steps that are done, and with which the run is over.

    Returns
    -------
    int
        Steps that are done.
    """
    fabric.call("on_train_start", step=step, module=module, optimizer=optimizer)
    validation.validate_if_due(step, module)  # the run may have been killed between save and validation
    while step < last and not validation.has_ended:
        item = loader.next() if not validation.postponed else None  # waits for tables, or for a stop signal
        if ranks.any(item is None or stop.asked):
            break
        assert item is not None
        item = item.to(fabric.device)
        fabric.call("on_train_batch_start", step=step, item=item, module=module)
        module.training_step(item, step, ranks.rank, optimizer)
        step += 1
        fabric.call("on_train_batch_end", step=step, item=item, module=module, optimizer=optimizer)
        checkpoints.files.check()
        if checkpoints.is_due(step):
            checkpoints.save(step, module, optimizer)
        validation.validate_if_due(step, module)
    fabric.call("on_train_end", step=step, module=module)
    if checkpoints.saved_step != step:
        checkpoints.save(step, module, optimizer)
    checkpoints.files.wait()
    return step


def start_drawing(loader: Loader, step: int, stop: Stop, ranks: Ranks) -> None:
    """Have the tables drawn from this step on; raises ConfigError on all ranks if a rank has no access to them."""
    problems: list[str] = []
    try:
        loader.start(step, stop)
    except ConfigError as error:
        problems = error.problems
    ranks.raise_on_all_ranks(problems)


def open_fabric(settings: TrainerConfig, launch: Launch, ranks: Ranks, callbacks: list[Any]) -> Fabric:
    """Fabric with a process group, if there are several ranks, and the groups of `ranks`."""
    on_cuda = uses_cuda(settings)
    several = launch.size > 1
    timeout = timedelta(seconds=settings.timeout)
    fabric = Fabric(
        accelerator="cuda" if on_cuda else "cpu",
        devices=launch.local_size if several or not on_cuda else [launch.local_rank],
        num_nodes=launch.size // launch.local_size,
        # Without `setup`, Fabric adds no DistributedDataParallel, which exchanges gradients inside the backward pass
        # and waits forever for those that an out-of-memory error there leaves out.
        strategy=DDPStrategy(process_group_backend="nccl" if on_cuda else "gloo", timeout=timeout)
        if several
        else "auto",
        plugins=[TorchElasticEnvironment() if several else LightningEnvironment()],
        callbacks=callbacks,
    )
    fabric.launch()
    ranks.connect(settings.timeout)
    return fabric


def close_process_group(ranks: Ranks) -> None:
    """Wait for all ranks, after their last write, and close the groups."""
    ranks.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def build_module(config: RunConfig, fabric: Fabric) -> tuple[Pretraining, MuonAdamW]:
    """Module and optimizer on the device, with random weights."""
    module = Pretraining(config)
    fabric.to_device(module)
    module.on_fit_start()
    if config.trainer.compile:
        compiling.compile_blocks(module.model)
    return module, module.configure_optimizers()


def broadcast_weights(module: Pretraining) -> None:
    """Give all ranks the weights of rank 0."""
    if dist.is_initialized():
        for value in module.state_dict().values():
            dist.broadcast(value, 0)


def device_of(settings: TrainerConfig, launch: Launch) -> torch.device:
    return torch.device("cuda", launch.local_rank) if uses_cuda(settings) else torch.device("cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, by the names of the files."""
    return max(map(checkpoint.step_of, checkpoint.saved(folder / "checkpoints")), default=0)


def rewind(records: Records, step: int) -> None:
    """Drop the rows of steps that are done again."""
    for name in ("metrics.csv", "scaling.csv", "incidents.jsonl"):
        records.rewind(name, step)
    records.rewind("validation.csv", step or -1)  # at the beginning of a run, without rows of what it starts from


def build_callbacks(
    config: RunConfig, guard: Guard, metrics: Metrics, diagnostics: Diagnostics, averages: Averages, status: RunStatus
) -> list[Any]:
    """What watches or keeps a run, in the order in which it is called: the guard may change the weights."""
    if guard.ranks.rank > 0:
        return [guard, metrics]
    profile = [Profile(config.profile, guard.records.folder)] if config.profile.step is not None else []
    return [guard, metrics, diagnostics, *profile, averages, status]


def build_loggers(config: RunConfig, folder: Path, step: int) -> list[Logger]:
    """The logs beside the run's own files."""
    loggers: list[Logger] = []
    if config.wandb.mode != "disabled":
        loggers.append(WandbLogger(config.wandb, folder, dataclasses.asdict(config)))
    return loggers + ([TensorBoardLogger(folder, step)] if config.tensorboard else [])


def build_stream(config: RunConfig, prior: Prior, steps: range, launch: Launch) -> StepStream:
    """This rank's share of the steps."""
    return StepStream(prior, config.curriculum, config.model, config.seed, steps, launch.rank, launch.size)


def build_loader(
    stream: StepStream, config: StreamConfig, device: torch.device, launch: Launch, has_steps: bool = True
) -> Loader:
    """What draws the tables, idle; nothing is started for a run without steps."""
    if not has_steps:
        return Loader(stream, StreamConfig(num_workers=0))
    if config.name == "ray":
        from tabicl_train.distributed.ray_actors import RayLoader

        return RayLoader(stream, config, device)
    local = config.local(launch.local_size)
    if config.num_workers is not None and local.workers < config.num_workers:
        info(f"warning   stream.num_workers is {config.num_workers}; {local.workers}, as there are no more cores")
    return Loader(stream, local, device)


def run_steps(
    config: RunConfig, content: dict | None, steps: range, watch: Any, ranks: Ranks, fabric: Fabric, loader: Loader
) -> None:
    """Train some steps, watched by a callback; nothing is written.

    Parameters
    ----------
    content : dict, optional
        Of the checkpoint to begin from.
    steps : range
        The steps.
    loader : Loader
        Idle; its stream has these steps.
    """
    set_up_process(config)
    module, optimizer = build_module(config, fabric)
    if content is not None:
        load_training(dict(content), module, optimizer)
    elif config.init_weights is not None:
        module.model.load_state_dict(ranks.from_first(lambda: initial_weights(config)))
    broadcast_weights(module)
    start_drawing(loader, steps.start, Stop(), ranks)
    for step in steps:
        item = loader.next()
        if item is None:
            raise ConfigError(["no tables can be drawn any more"])
        item = item.to(fabric.device)
        watch.on_train_batch_start(step=step, item=item, module=module, optimizer=optimizer)
        module.training_step(item, step, ranks.rank, optimizer)
        watch.on_train_batch_end(step=step + 1, item=item, module=module, optimizer=optimizer)


def set_up_process(config: RunConfig) -> None:
    """Settings of torch and Lightning in a process that trains."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # start-up lines
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # torchrun and plain starts are fine
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch 2.13 about lightning 2.6
    torch.set_num_threads(config.trainer.cpu_threads)
    set_up_gpu(config.trainer)
    # cuDNN attention plans for every new shape and crashed for others; flash and memory-efficient attention remain.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(config.seed)


def introduce(config: RunConfig, prior: Prior, fabric: Fabric, module: Pretraining, start: Start, drawers: int) -> None:
    """Print what is about to run, as it is in force; drawers: processes that draw its tables for each rank."""
    info(f"run       {config.run_dir}" + (f", resumed at step {start.steps}" if start.steps else ""))
    workers = counted(drawers, "Ray actor" if config.stream.name == "ray" else "worker")
    info(f"prior     {config.prior['name']}, seed {config.seed}, {workers}")
    described = real.describe() if (real := real_tables(prior)) else []
    for line in [*described, *config.curriculum.eligible_tables(prior, config.model.is_regression)]:
        info(f"          {line}")
    has_compiled = config.trainer.compile and next(module.model.blocks(), None) is not None
    compiled = ", compiled blocks (the first steps take long)" if has_compiled else ""
    info(f"device    {fabric.world_size} x {fabric.device.type}{compiled}")
    if config.trainer.compile and not has_compiled:
        info("warning   trainer.compile has no effect: a network of this family has no blocks to compile")
    if shares_store():
        info("warning   restarts by torchrun may fail; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (launch/README.md)")
    for line in [*policy(config), *run_plan(config)]:
        info(line)
