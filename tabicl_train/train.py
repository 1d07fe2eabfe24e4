"""A pretraining run, from its configuration to its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
import warnings
from pathlib import Path

import lightning as L
import torch
import yaml

from tabicl_train import compiling
from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles, Checkpoints
from tabicl_train.callbacks.diagnostics import Diagnostics
from tabicl_train.callbacks.guard import Guard
from tabicl_train.callbacks.held_out.answer import Answer
from tabicl_train.callbacks.held_out.selection import out_of_patience
from tabicl_train.callbacks.loggers import Logger, Loggers
from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.callbacks.preemption import Preemption
from tabicl_train.callbacks.profile import Profile
from tabicl_train.callbacks.tensorboard_logger import TensorBoardLogger
from tabicl_train.callbacks.validation import Validation
from tabicl_train.callbacks.wandb_logger import WandbLogger
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.console import counted, is_first, tell
from tabicl_train.model.kernels import memory
from tabicl_train.module import Pretraining
from tabicl_train.planning.run_plan import run_plan
from tabicl_train.precision import policy, set_up_gpu, uses_cuda
from tabicl_train.processes.failures import Stopped
from tabicl_train.processes.join import join
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.requeue import requeue
from tabicl_train.processes.signals import Stop, watch_signals
from tabicl_train.processes.trainer_plugins import JoinedProcesses, Replicas, disable_sigterm_handling
from tabicl_train.remote.loader import RayLoader
from tabicl_train.resume import Start, find_start, initial_weights
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.lock import LostLock, RunLock
from tabicl_train.run_dir.outputs import make_folder
from tabicl_train.run_dir.provenance import describe_machine, describe_origin, record_start
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunStatus, read_status
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader


def train(config: RunConfig) -> str:
    """Start or continue the run in config.run_dir. Returns its status: finished or preempted."""
    folder = Path(config.run_dir)
    lock = RunLock(folder)
    with watch_signals() as stop:
        try:
            with join(config.trainer, stop, folder) as processes:
                stop.limit = math.inf if config.trainer.max_hours is None else 3600 * config.trainer.max_hours
                processes.agree(next(iter(config.too_few_tables(processes.size)), None))
                processes.agree(compiling.problem(config.trainer))
                start, content = open_run(config, lock, processes)
                if start.steps < config.total_steps and not processes.from_first(lambda: has_ended(config, start)):
                    outcome = train_from(start, content, config, lock, processes, stop)
                else:
                    outcome = processes.from_first(lambda: complete(start, content, config, lock, processes, stop))
                if outcome == "preempted":
                    processes.from_first(lambda: requeue(config.trainer))
                return outcome
        except Stopped:
            if is_first(config.trainer.nodes):
                requeue(config.trainer)
            return "preempted"
        finally:
            lock.release()


def open_run(config: RunConfig, lock: RunLock, processes: Processes) -> tuple[Start, dict | None]:
    """Lock the run's folder and choose where the run begins, on rank 0.

    Returns where it begins and, on rank 0, the content of the checkpoint there. Raises ConfigError on all processes.
    """
    content = None

    def choose_start() -> Start:
        nonlocal content
        make_folder("run_dir", Path(config.run_dir, "checkpoints"))
        lock.acquire()
        for folder in (lock.path.parent, lock.path.parent / "checkpoints"):
            checkpoint.sweep(folder)
        start, content = find_start(config)
        return start

    start = processes.from_first(choose_start)
    processes.agree(start.problem(config))
    return start, content


def has_ended(config: RunConfig, start: Start) -> bool:
    """Whether the validations of the run so far have ended it; see validation.patience."""
    rows = Records(Path(config.run_dir)).rows("validation.csv")
    return start.steps > 0 and out_of_patience(config.validation, rows, start.steps) is not None


def complete(
    start: Start, content: dict | None, config: RunConfig, lock: RunLock, processes: Processes, stop: Stop
) -> str:
    """Make up for what a kill after the last step has prevented, on rank 0. Returns the run's status."""
    tell(f"{config.run_dir}: finished already, {start.steps} steps are done")
    records = Records(Path(config.run_dir), lock.check)
    status = RunStatus(records, lambda: start.steps)
    loggers = build_loggers(config, start.steps)
    validation = Validation(config, records, processes, stop, loggers.log_metrics)
    answer = Answer(config, records, torch.device("cuda" if uses_cuda(config.trainer) else "cpu"), stop)
    if (lacks_scores := validation.is_missing(start.steps)) or answer.is_missing(start.steps):
        set_up_process(config)
        status.write("running")
        lock.on_beat = status.beat
    if lacks_scores:
        assert content is not None  # steps have been done, so there is a checkpoint
        validation.finish(content, answer.device)
    loggers.close()
    is_whole = not validation.postponed
    if is_whole and (lacks_scores or answer.is_missing(start.steps)):
        is_whole = answer.give(start.steps)
    outcome = "finished" if is_whole else "preempted"
    if (read_status(records.folder) or {}).get("status") != outcome:
        status.write(outcome)
    return outcome


def train_from(
    start: Start, content: dict | None, config: RunConfig, lock: RunLock, processes: Processes, stop: Stop
) -> str:
    """Train until the last step or a stop signal. Returns the run's status."""
    set_up_process(config)
    records = Records(Path(config.run_dir), lock.check)
    files = CheckpointFiles(config.checkpoint, content, lock.check)
    del content  # hundreds of megabytes, which `files` lets go once they are loaded
    origin = describe_origin()
    loggers = build_loggers(config, start.steps) if processes.rank == 0 else Loggers()
    validation = Validation(config, records, processes, stop, loggers.log_metrics)
    callbacks = run_callbacks(config, records, files, origin, stop, validation)
    trainer = build_trainer(config, callbacks, files, processes)
    steps = range(start.steps, config.total_steps)
    stream = build_stream(config, steps, processes)
    # Workers draw while the model is built, and are forked before this process has threads or a CUDA context; forked
    # late, workers of a released trainer took 13 s instead of 0.1 s a batch.
    device = trainer.strategy.root_device
    with build_loader(stream, config, device, processes) as loader, validation.drawing():
        processes.agree(loader.problem(stop))
        module = build_module(config, start.checkpoint, processes)
        if device.type == "cpu":
            memory.keep_freed_memory()
        status = RunStatus(records, lambda: trainer.global_step, writes=processes.rank == 0)
        ranks = processes.gather(describe_machine(device))
        if processes.rank == 0:
            records.replace("config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
            restart = start.restart.facts(processes.size) if start.restart else None
            record_start(records, start.steps, {"restart": restart, **origin}, ranks)
            introduce(config, trainer, module, start, loader.drawers)
            lock.on_beat = status.beat
        status.write("running")
        try:
            trainer.fit(module, loader, ckpt_path=start.checkpoint, weights_only=True)
        except LostLock:
            raise
        except BaseException as error:
            if processes.rank == 0:
                status.write("failed", processes.cause(error))
            loggers.close(exit_code=1)
            raise
        finally:
            files.wait()
    loggers.close()
    step = trainer.global_step
    postponed = processes.from_first(lambda: validation.postponed)
    is_whole = not postponed and (validation.has_ended or step >= config.total_steps)
    answer = Answer(config, records, device, stop)
    # A time limit does not prevent the answer; after a signal there may be only seconds left.
    is_stopped = answer.is_due and any(processes.gather(stop.first is not None))
    is_whole = processes.from_first(lambda: not is_stopped and answer.give(step)) and is_whole
    outcome = "finished" if is_whole else "preempted"
    status.write(outcome)
    return outcome


def run_callbacks(
    config: RunConfig, records: Records, files: CheckpointFiles, origin: dict, stop: Stop, validation: Validation
) -> list[L.Callback]:
    """What watches and keeps a run, in the order in which it is called."""
    profile = [Profile(config.profile, records.folder)] if config.profile.step is not None else []
    return [  # in this order: the guard may change the weights, and all states must be up to date for a checkpoint
        Guard(config, records, files),
        Metrics(config, records, validation.log_values),
        Diagnostics(records, validation.log_values),
        *profile,
        Averages(config.averages),
        Checkpoints(records.folder / "checkpoints", files, config, origin),
        validation,  # before the ranks agree to stop: one that a signal cuts short comes first at the next start
        Preemption(stop, config.trainer),
    ]


def build_loggers(config: RunConfig, step: int) -> Loggers:
    """What logs the run outside its own files.

    step: at which the run is resumed
    """
    folder, loggers = Path(config.run_dir), list[Logger]()
    if config.wandb.mode != "disabled":
        loggers.append(WandbLogger(config.wandb, folder, dataclasses.asdict(config)))
    if config.tensorboard:
        loggers.append(TensorBoardLogger(folder, step))
    return Loggers(loggers)


def run_steps(
    config: RunConfig, start: tuple[Path, dict | None] | None, until: int, watch: L.Callback, processes: Processes
) -> None:
    """Train up to a step, watched by a callback; nothing is written.

    start: a checkpoint and, on rank 0, its content; or None for the beginning of the run
    """
    set_up_process(config)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=until))
    path, content = start or (None, None)
    trainer = build_trainer(config, [watch], CheckpointFiles(config.checkpoint, content), processes)
    stream = build_stream(config, range(0 if path is None else checkpoint.step_of(path), until), processes)
    workers = config.stream.local(sharing(processes))
    with Loader(stream, workers, trainer.strategy.root_device) as loader:
        module = build_module(config, path, processes)
        trainer.fit(module, loader, ckpt_path=path, weights_only=True)


def build_stream(config: RunConfig, steps: range, processes: Processes) -> StepStream:
    """This process's share of the steps."""
    prior = build_prior(config)
    return StepStream(prior, config.curriculum, config.model, config.seed, steps, processes.rank, processes.size)


def build_loader(stream: StepStream, config: RunConfig, device: torch.device, processes: Processes) -> Loader:
    if config.stream.name == "ray":
        return RayLoader(stream, config.stream, device, sharing(processes))
    return Loader(stream, config.stream.local(sharing(processes)), device)


def sharing(processes: Processes) -> int:
    """How many training processes of this machine share the cores of this one, itself included: all of them, unless
    each is bound to cores of its own, as SLURM binds them."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    host, own = socket.gethostname(), sorted(cores)
    return sum(name == host and not cores.isdisjoint(others) for name, others in processes.gather((host, own)))


def build_module(config: RunConfig, checkpoint: Path | None, processes: Processes) -> Pretraining:
    """The module, with the initial weights of a run that does not continue from a checkpoint.

    Rank 0 alone reads `init_weights`; `Replicas` gives its weights to all ranks when the training begins. Raises
    ConfigError on all processes.
    """
    module = Pretraining(config)
    if config.trainer.compile:
        compiling.compile_blocks(module.model)
    if config.init_weights is not None and checkpoint is None:

        def load() -> None:
            module.model.load_state_dict(initial_weights(config))

        processes.from_first(load)
    return module


def build_trainer(
    config: RunConfig, callbacks: list[L.Callback], files: CheckpointFiles, processes: Processes
) -> L.Trainer:
    on_cuda = uses_cuda(config.trainer)
    backend = "nccl" if on_cuda else "gloo"
    trainer = L.Trainer(
        accelerator="cuda" if on_cuda else "cpu",
        devices=processes.local_size,
        num_nodes=processes.nodes,
        strategy=Replicas(processes, backend, config.trainer.timeout) if processes.size > 1 else "auto",
        max_steps=config.total_steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=[files, JoinedProcesses(processes)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    disable_sigterm_handling(trainer)
    return trainer


def set_up_process(config: RunConfig) -> None:
    """Settings of torch and Lightning in a process that trains."""
    silence_lightning()
    torch.set_num_threads(config.trainer.cpu_threads)
    set_up_gpu(config.trainer)
    # cuDNN attention plans for every new shape and crashed for others; flash and memory-efficient attention remain.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(config.seed)


def silence_lightning() -> None:
    """Hide start-up lines and tips about settings that are made here on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
    warnings.filterwarnings("ignore", message=".*`srun` command is available.*")  # torchrun and plain starts are fine
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch 2.13 about lightning 2.6


def introduce(config: RunConfig, trainer: L.Trainer, module: Pretraining, start: Start, drawers: int) -> None:
    """Print what is about to run, as it is in force; drawers: processes that draw its tables for each rank."""
    tell(f"run       {config.run_dir}" + (f", resumed at step {start.steps}" if start.steps else ""))
    if start.restart:
        tell(start.restart.line(trainer.world_size))
    workers = counted(drawers, "Ray actor" if config.stream.name == "ray" else "worker")
    tell(f"prior     {config.prior['name']}, seed {config.seed}, {workers}")
    prior = build_prior(config)
    for line in [*prior.about(), *config.curriculum.usable_tables(prior, config.model.is_regression)]:
        tell(f"          {line}")
    has_compiled = config.trainer.compile and next(module.model.blocks(), None) is not None
    compiled = ", compiled blocks (the first steps take long)" if has_compiled else ""
    tell(f"device    {trainer.world_size} x {trainer.strategy.root_device.type}{compiled}")
    if config.trainer.compile and not has_compiled:
        tell("warning   trainer.compile has no effect: a network of this family has no blocks to compile")
    for line in [*policy(config), *run_plan(config)]:
        tell(line)
