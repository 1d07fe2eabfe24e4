"""A pretraining run, from its configuration to its last checkpoint; `fit` is the training loop.

`train` takes the configuration apart: each component gets its own section, or an object built from it.
"""

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
from tabicl_train.callbacks.final_test import TEST, FinalTest, is_test_missing
from tabicl_train.callbacks.guard import Guard
from tabicl_train.callbacks.metrics import Diagnostics, LoggedSteps, Metrics, Progress
from tabicl_train.callbacks.profile import Profile
from tabicl_train.callbacks.tables_seen import TablesSeen
from tabicl_train.callbacks.tensorboard_logger import TensorBoardLogger
from tabicl_train.callbacks.validation import BEST, START, Validation, final_test_streams, validation_streams
from tabicl_train.callbacks.wandb_logger import WandbLogger
from tabicl_train.config.schema import (
    ProfileConfig,
    RunConfig,
    StreamConfig,
    TrainerConfig,
    WandbConfig,
    build_prior,
)
from tabicl_train.console import counted, first_line, info
from tabicl_train.distributed.processes import (
    Launch,
    Stop,
    read_launch,
    shares_store,
    start_command,
    watch_signals,
)
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.distributed.submit import requeue
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import family_of
from tabicl_train.module import Pretraining
from tabicl_train.optimizer import MuonAdamW
from tabicl_train.outputs import make_folder
from tabicl_train.planning import expected_work, memory_problems, run_plan
from tabicl_train.precision import choose, policy, set_up_gpu, uses_cuda
from tabicl_train.resume import ResumePoint, find_resume_point, initial_weights
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.provenance import describe_machine, describe_origin, record_start
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunLock, RunStatus
from tabicl_train.run_dir.summary import end_lines
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader

__all__ = ["train"]


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
    folder, launch = Path(config.run_dir), read_launch()
    ranks, records, lock = Ranks(launch), Records(folder), RunLock(folder)
    device, prior, values = device_of(config.trainer, launch), build_prior(config.prior), dataclasses.asdict(config)
    model, curriculum, seed, total = config.model, config.curriculum, config.seed, config.total_steps
    parts, real = curriculum.parts(prior), real_tables(prior)
    fingerprint = None if real is None else real.fingerprint()
    with watch_signals() as stop, contextlib.ExitStack() as stack:
        if config.trainer.max_hours is not None:
            stop.limit = 3600 * config.trainer.max_hours
        set_up_process(config.trainer)

        # Workers are forked before this process has threads, a process group or a CUDA context: in the trainer of the
        # `tabicl` package, workers forked later took 13 s instead of 0.1 s a batch. They start idle, since the
        # checkpoint is not read yet.
        stream = StepStream(prior, curriculum, model, seed, range(total), launch.rank, launch.size)
        has_steps = max(map(checkpoint.step_of, checkpoint.saved(folder / "checkpoints")), default=0) < total
        loader = stack.enter_context(build_loader(stream, config.stream, device, launch.local_size, has_steps))

        # Callbacks, and what they write to
        status, logged = RunStatus(records), LoggedSteps(config.trainer.log_every, total)
        files = CheckpointFiles(config.checkpoint, curriculum, lambda step: status.write(saved=step))
        averages = [Averages(config.averages)] if config.averages.ema or config.averages.last else []
        seen = [TablesSeen(real.sources(), ranks)] if real is not None else []
        guard = Guard(config.guard, stream, logged, records, files, ranks, [*averages, *seen])
        progress = Progress(curriculum, total, lambda stage: expected_work(stage, model, seed).flops)
        metrics = Metrics(curriculum, logged, records, loader, ranks, progress)
        callbacks = build_callbacks(config.profile, guard, metrics, seen, averages, status)
        streams = validation_streams(config.validation, parts, model)
        validation = Validation(config.validation, values, total, streams, records, ranks, stop, averages)

        # Connect the ranks; rank 0 finds where the run begins and sends it to the others
        fabric = open_fabric(config.trainer, launch, ranks, callbacks)
        problems = [*launch.problems(config.trainer.devices), *config.too_few_tables(ranks.size)[:1]]
        problems += memory_problems(config)
        if config.trainer.compile or config.trainer.triton:
            problems += compiling.problems(config.trainer)
        ranks.raise_on_all_ranks(problems)

        def open_run_dir() -> tuple[ResumePoint, dict | None]:
            make_folder("run_dir", folder)
            lock.acquire()
            checkpoint.sweep(folder)
            checkpoint.sweep(folder / "checkpoints")
            return find_resume_point(values, fingerprint)

        stack.callback(lock.release)
        start, content = ranks.from_first(open_run_dir)
        ranks.raise_on_all_ranks(start.problems(seed, fingerprint))
        ended = None
        if config.validation.patience > 0:
            ended = ranks.from_first(lambda: validation.history(start.steps).ended)
            validation.has_ended = ended is not None
        last = start.steps if validation.has_ended else total
        if last == start.steps and not ranks.from_first(
            lambda: validation.is_missing(start.steps) or is_test_missing(config.validation, records, start.steps)
        ):
            info(f"{folder}: finished already, {start.steps} steps are done" + (f"; {ended}" if ended else ""))
            if ranks.rank == 0:
                status.finish_earlier(start.steps)
                print_end(folder, config)
            close_process_group(ranks)
            return "finished"

        if last > start.steps:  # before the model is built, which takes a second
            start_drawing(loader, start.steps, stop, ranks)
        module, optimizer = build_module(config, content, ranks, fabric)
        origin, machines = describe_origin(), ranks.gather(describe_machine(device))
        device_name = machines[0]["gpu"] or platform.machine()
        begins = content is None
        facts = {"real_tables": start.real_tables, "ranks": ranks.size, "device": device_name, **origin}
        checkpoints = Checkpoints(folder / "checkpoints", files, curriculum, values, facts, callbacks, ranks.rank)
        if content is not None:
            checkpoints.load_callbacks(content)
        del content  # hundreds of megabytes
        if ranks.rank == 0:
            records.loggers = build_loggers(config.wandb, config.tensorboard, values, start.steps)
            status.values |= {"step": start.steps, "saved": start.steps}
            status.write()
            clear(records) if begins else rewind(records, start.steps)
            if last > start.steps:
                records.replace("config.yaml", yaml.safe_dump(values, sort_keys=False))
                record_start(records, start.steps, origin, machines)
                introduce(config, prior, module, start.steps, ranks.size, loader.drawers)

        try:
            step = fit(fabric, module, optimizer, loader, checkpoints, validation, ranks, stop, start.steps, last)
            unavailable = ranks.any(loader.unavailable)
            is_whole = (validation.has_ended or step >= total) and not ranks.any(validation.postponed)
            if is_whole:
                streams = final_test_streams(config.validation, parts, model)
                test = FinalTest(config.validation, streams, choose(config.trainer), device, records, ranks, stop)
                is_whole = test.run(step)
        except BaseException as error:
            fabric.call("on_exception", error=error, module=module)
            if ranks.rank == 0:
                with contextlib.suppress(OSError):  # on a full disk, which is then the error that is raised
                    status.write(status="failed", cause=f"{type(error).__name__}: {first_line(error)}")
            records.close_loggers(1)
            raise
        records.close_loggers()
        outcome = "finished" if is_whole else "preempted"
        if ranks.rank == 0:
            status.write(status=outcome, step=step)
            if outcome == "preempted":
                path = folder / "checkpoints" / f"step-{step:08d}.ckpt"
                cause = "no tables can be drawn" if unavailable else stop.cause
                command = start_command()
                info(f"preempted at step {step} ({cause}): saved to {path}; the same command continues{command}")
                if step > start.steps or not unavailable:
                    requeue(config.trainer)
            else:
                info(f"finished  {step} steps")
                print_end(folder, config)
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
    """Train until the last step, or until a rank is asked to stop."""
    fabric.call("on_train_start", step=step, module=module, optimizer=optimizer)
    validation.warn_of_range(module)
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
        if checkpoints.files.is_due(step):
            checkpoints.save(step, module, optimizer)
        validation.validate_if_due(step, module)
    fabric.call("on_train_end", step=step, module=module)
    if checkpoints.saved_step != step:
        checkpoints.save(step, module, optimizer)
    checkpoints.files.wait()
    return step


def print_end(folder: Path, config: RunConfig) -> None:
    for line in end_lines(folder, family_of(config.model).predicts_real_tables):
        info(line)


def start_drawing(loader: Loader, step: int, stop: Stop, ranks: Ranks) -> None:
    """Start drawing tables at this step; raise ConfigError on all ranks if a rank cannot."""
    problems: list[str] = []
    try:
        loader.start(step, stop)
    except ConfigError as error:
        problems = error.problems
    ranks.raise_on_all_ranks(problems)


def open_fabric(settings: TrainerConfig, launch: Launch, ranks: Ranks, callbacks: list[Any]) -> Fabric:
    """Open Fabric with a process group, if there are several ranks, and the groups of `ranks`."""
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


def build_module(
    config: RunConfig, content: dict | None, ranks: Ranks, fabric: Fabric
) -> tuple[Pretraining, MuonAdamW]:
    """Build module and optimizer, equal on all ranks: from a checkpoint, from initial weights or from random ones."""
    torch.manual_seed(config.seed)
    module = Pretraining(config.model, config.curriculum, config.optimizer, choose(config.trainer), config.seed)
    fabric.to_device(module)
    module.on_fit_start()
    if config.trainer.compile:
        compiling.compile_blocks(module.model)
    if config.trainer.triton and not compiling.use_triton(module.model):
        info("warning   trainer.triton has no effect: no layer of the network has the query-aware scalable softmax")
    optimizer = module.configure_optimizers()
    if content is not None:
        load_training(content, module, optimizer)
    elif (source := config.init_weights) is not None:
        start = ranks.from_first(lambda: initial_weights(source, config.model))
        module.model.load_state_dict(start.tensors)
        module.inherited_range = None if start.trained_range is None else start.trained_range.recorded()
    broadcast_weights(module)
    return module, optimizer


def broadcast_weights(module: Pretraining) -> None:
    """Give all ranks the weights of rank 0."""
    if dist.is_initialized():
        for value in module.state_dict().values():
            dist.broadcast(value, 0)


def device_of(settings: TrainerConfig, launch: Launch) -> torch.device:
    return torch.device("cuda", launch.local_rank) if uses_cuda(settings) else torch.device("cpu")


ROWS = ("metrics.csv", "scaling.csv", "incidents.jsonl")


def clear(records: Records) -> None:
    """Remove the records of an earlier start that ended before its first checkpoint; its settings may have differed."""
    for name in (*ROWS, "validation.csv", TEST, START, BEST):
        (records.folder / name).unlink(missing_ok=True)


def rewind(records: Records, step: int) -> None:
    """Drop the rows of steps that will be repeated."""
    for name in ROWS:
        records.rewind(name, step)
    records.rewind("validation.csv", step or -1)  # at step 0 also the row of the initial weights


def build_callbacks(
    profile: ProfileConfig,
    guard: Guard,
    metrics: Metrics,
    seen: list[TablesSeen],
    averages: list[Averages],
    status: RunStatus,
) -> list[Any]:
    """Return the callbacks in the order of their calls: the guard is first, since it may change the weights."""
    if guard.ranks.rank > 0:
        return [guard, metrics, *seen]
    traced = [Profile(profile, guard.records.folder)] if profile.step is not None else []
    return [guard, metrics, *seen, Diagnostics(guard.records, guard.logged), *traced, *averages, status]


def build_loggers(wandb: WandbConfig, tensorboard: bool, values: dict[str, Any], step: int) -> list[Any]:
    """Build the loggers for other programs."""
    folder, loggers = Path(values["run_dir"]), list[Any]()
    if wandb.mode != "disabled":
        loggers.append(WandbLogger(wandb, folder, values))
    return loggers + ([TensorBoardLogger(folder, step)] if tensorboard else [])


def build_loader(
    stream: StepStream, config: StreamConfig, device: torch.device, local_size: int, has_steps: bool = True
) -> Loader:
    """Build the loader of tables, idle; no workers are started for a run without steps."""
    if not has_steps:
        return Loader(stream, StreamConfig(num_workers=0))
    if config.name == "ray":
        from tabicl_train.distributed.ray_actors import RayLoader

        return RayLoader(stream, config, device)
    local = config.local(local_size)
    if config.num_workers is not None and local.workers < config.num_workers:
        info(f"warning   stream.num_workers is {config.num_workers}; limited to {local.workers} by the number of cores")
    return Loader(stream, local, device)


def set_up_process(trainer: TrainerConfig) -> None:
    """Set up torch and Lightning in a process that trains."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # start-up lines
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # torchrun and plain starts are fine
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # a deprecation in torch 2.13 that lightning 2.6 uses
    # With a second thread that shares its core with a busy worker, a step took 30 times as long (0.13 s -> 4 s on two
    # cores); and sums are rounded differently for another number of threads.
    torch.set_num_threads(1)
    set_up_gpu(trainer)
    # cuDNN attention makes a plan for each new shape, and crashed on some; flash and memory-efficient attention remain.
    torch.backends.cuda.enable_cudnn_sdp(False)


def introduce(config: RunConfig, prior: Prior, module: Pretraining, step: int, ranks: int, drawers: int) -> None:
    """Print the settings in force; each rank has `drawers` processes that draw tables."""
    info(f"run       {config.run_dir}" + (f", resumed at step {step}" if step else ""))
    workers = counted(drawers, "Ray actor" if config.stream.name == "ray" else "worker")
    info(f"prior     {config.prior['name']}, seed {config.seed}, {workers}")
    described = real.describe() if (real := real_tables(prior)) else []
    for line in [*described, *config.curriculum.eligible_tables(prior, config.model.is_regression)]:
        info(f"          {line}")
    has_compiled = config.trainer.compile and next(module.model.blocks(), None) is not None
    compiled = ", compiled blocks (the first steps take long)" if has_compiled else ""
    info(f"device    {ranks} x {module.device.type}{compiled}")
    if config.trainer.compile and not has_compiled:
        info("warning   trainer.compile has no effect: a network of this family has no blocks to compile")
    if shares_store():
        info("warning   restarts by torchrun may fail; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (launch/README.md)")
    for line in [*policy(config.trainer), *run_plan(config)]:
        info(line)
