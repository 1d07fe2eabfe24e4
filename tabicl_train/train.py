"""A pretraining run, from its configuration to its last checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import yaml

from tabicl_train.callbacks.averages import Averages
from tabicl_train.callbacks.checkpoints import CheckpointFiles, Checkpoints
from tabicl_train.callbacks.diagnostics import Lengths
from tabicl_train.callbacks.guard import Guard
from tabicl_train.callbacks.metrics import Metrics
from tabicl_train.callbacks.preemption import Preemption
from tabicl_train.callbacks.profile import Profile
from tabicl_train.callbacks.validation import Validation
from tabicl_train.callbacks.wandb_log import WandbLog
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.errors import ConfigError
from tabicl_train.gradients import Joined, Replicas
from tabicl_train.module import Pretraining
from tabicl_train.planning.run_plan import run_plan
from tabicl_train.precision import choose, uses_cuda
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.processes.processes import Processes, Stopped, join, one_process
from tabicl_train.processes.signals import Stop, watch_signals
from tabicl_train.resume import Start, find_start, follow
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import FREE_TO_CHANGE
from tabicl_train.run_dir.console import tell
from tabicl_train.run_dir.lock import LostLock, RunLock
from tabicl_train.run_dir.outputs import make_folder
from tabicl_train.run_dir.provenance import describe_origin
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import RunStatus, read_status
from tabicl_train.stream import StepStream
from tabicl_train.workers import Loader


def train(config: RunConfig) -> str:
    """Run, or continue, the run in config.run_dir. Returns its status: finished or preempted."""
    folder = Path(config.run_dir)
    lock = RunLock(folder)
    with watch_signals() as stop:
        try:
            with join(config.trainer, stop, folder) as processes:
                stop.limit = math.inf if config.trainer.max_hours is None else 3600 * config.trainer.max_hours
                processes.agree(next(iter(config.too_few_tables(processes.size)), None))
                start, content = open_run(config, lock, processes)
                if start.steps < config.total_steps:
                    return train_from(start, content, config, lock, processes, stop)
                return processes.from_first(lambda: complete(start, content, config, lock, processes, stop))
        except Stopped:
            return "preempted"
        finally:
            lock.release()


def open_run(config: RunConfig, lock: RunLock, processes: Processes) -> tuple[Start, dict | None]:
    """The first process locks the run's folder and chooses where the run begins; returns that, and the content of the
    checkpoint, on all processes."""
    content = None

    def choose() -> Start:
        nonlocal content
        make_folder("run_dir", Path(config.run_dir, "checkpoints"))
        lock.acquire()
        for folder in (lock.path.parent, lock.path.parent / "checkpoints"):
            checkpoint.sweep(folder)
        start, content = find_start(config)
        return start

    start = processes.from_first(choose)
    copy = follow(start, config, processes)
    return start, content if processes.rank == 0 else copy


def complete(start: Start, content: dict, config: RunConfig, lock: RunLock, processes: Processes, stop: Stop) -> str:
    """A run whose steps are all done: the first process makes up for what a kill left undone. Returns its status."""
    tell(f"{config.run_dir}: finished already, {start.steps} steps are done")
    records = Records(Path(config.run_dir), lock.check)
    status = RunStatus(records, lambda: start.steps)
    validation = Validation(config, records, processes, stop)
    if validation.is_missing(start.steps):
        begin(config)
        status.write("running")
        lock.on_beat = status.beat
        validation.finish(content, torch.device("cuda" if uses_cuda(config.trainer) else "cpu"))
    if config.wandb.mode != "disabled":
        WandbLog(config, records).complete()
    outcome = "preempted" if validation.postponed else "finished"
    if (read_status(records.folder) or {}).get("status") != outcome:
        status.write(outcome)
    return outcome


def train_from(
    start: Start, content: dict | None, config: RunConfig, lock: RunLock, processes: Processes, stop: Stop
) -> str:
    begin(config)
    records = Records(Path(config.run_dir), lock.check)
    files = CheckpointFiles(config.checkpoint, content, lock.check)
    del content
    origin = describe_origin()
    validation = Validation(config, records, processes, stop)
    trainer = build_trainer(config, run_callbacks(config, records, files, origin, stop, validation), files, processes)
    steps = range(start.steps, config.total_steps)
    stream = StepStream(
        build_prior(config), config.curriculum, config.model, config.seed, steps, processes.rank, processes.size
    )
    # Workers draw while the model is made, and are forked before this process has threads or a CUDA context; forked
    # late, workers of a released trainer took 13 s instead of 0.1 s a batch.
    with Loader(stream, config.stream, trainer.strategy.root_device) as loader, validation.drawing():
        module = Pretraining(config)
        if config.init_weights is not None and start.checkpoint is None:
            load_weights(module, config, processes)
        status = RunStatus(records, lambda: trainer.global_step, writes=processes.rank == 0)
        if processes.rank == 0:
            records.replace("config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
            records.append_line("provenance.jsonl", {"step": start.steps, **origin})
            introduce(config, trainer, start.steps)
            lock.on_beat = status.beat
        status.write("running")
        try:
            trainer.fit(module, loader, ckpt_path=start.checkpoint, weights_only=True)
        except LostLock:
            raise
        except BaseException:
            status.write("failed")
            raise
        finally:
            files.wait()
    postponed = processes.from_first(lambda: validation.postponed)
    outcome = "finished" if trainer.global_step >= config.total_steps and not postponed else "preempted"
    status.write(outcome)
    return outcome


def run_steps(config: RunConfig, start: tuple[Path, dict] | None, until: int, watch: L.Callback) -> None:
    """Train up to a step in this process, from a checkpoint or from the beginning, for somebody to watch; nothing is
    written."""
    begin(config)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=until))
    path, content = start or (None, None)
    trainer = build_trainer(config, [watch], CheckpointFiles(config.checkpoint, content), one_process())
    steps = range(0 if path is None else checkpoint.step_of(path), until)
    stream = StepStream(build_prior(config), config.curriculum, config.model, config.seed, steps)
    with Loader(stream, config.stream, trainer.strategy.root_device) as loader:
        module = Pretraining(config)
        if config.init_weights is not None and path is None:
            load_weights(module, config, one_process())
        trainer.fit(module, loader, ckpt_path=path, weights_only=True)


def begin(config: RunConfig) -> None:
    """What a process that trains sets for itself."""
    quiet_lightning()
    torch.set_num_threads(config.trainer.cpu_threads)
    # cuDNN attention plans for every new shape and crashed for others; flash and memory-efficient attention remain.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(config.seed)


def build_trainer(
    config: RunConfig, callbacks: list[L.Callback], files: CheckpointFiles, processes: Processes
) -> L.Trainer:
    settings = config.trainer
    on_cuda = uses_cuda(settings)
    backend = "nccl" if on_cuda else "gloo"
    trainer = L.Trainer(
        accelerator="cuda" if on_cuda else "cpu",
        devices=processes.local_size,
        num_nodes=processes.nodes,
        strategy=Replicas(process_group_backend=backend, timeout=timedelta(seconds=settings.timeout))
        if processes.size > 1
        else "auto",
        max_steps=config.total_steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=[files, Joined(processes)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning's handler of SIGTERM talks to other ranks in the middle of whatever they do, and every step of several
    # ranks waits for the device to hear whether there was one. `Preemption` does both without.
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def run_callbacks(
    config: RunConfig,
    records: Records,
    files: CheckpointFiles,
    origin: dict,
    stop: Stop,
    validation: Validation,
) -> list[L.Callback]:
    wanted: list[L.Callback] = []
    if config.wandb.mode != "disabled":
        wanted.append(WandbLog(config, records))
    if config.profile.step is not None:
        wanted.append(Profile(config.profile, records.folder))
    return [  # the guard may change the weights, and everything is changed when it is saved
        Guard(config, records, files),
        Metrics(config, records),
        Lengths(records),
        *wanted,
        Averages(config.averages),
        Checkpoints(records.folder / "checkpoints", files, config, origin),
        validation,  # before the ranks agree to stop: one that a signal cuts short is the beginning of the next start
        Preemption(stop, config.trainer),
    ]


def load_weights(module: Pretraining, config: RunConfig, processes: Processes) -> None:
    """Start from a run, a checkpoint or a file in the public format; its model must be the configured one. Raises
    ConfigError on all processes."""
    try:
        weights, problem = fitting_weights(config), None
    except ConfigError as error:
        problem = f"init_weights: {'; '.join(error.problems)}"
    processes.agree(problem)
    module.model.load_state_dict(weights)


def fitting_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    file_config, weights = load_checkpoint(config.init_weights)
    changed = [
        f"the file's model has {key}={value}, the configuration model.{key}={configured}"
        for key, value in dataclasses.asdict(file_config).items()
        if (configured := getattr(config.model, key)) != value and key not in FREE_TO_CHANGE
    ]
    if changed:
        raise ConfigError(changed)
    return weights


def introduce(config: RunConfig, trainer: L.Trainer, first_step: int) -> None:
    """What is about to run, as it really is."""
    tell(f"run       {config.run_dir}" + (f", resumed at step {first_step}" if first_step else ""))
    workers = config.stream.num_workers
    tell(f"prior     {config.prior['name']}, seed {config.seed}, {workers} worker{'' if workers == 1 else 's'}")
    device = trainer.strategy.root_device.type
    tell(f"device    {trainer.world_size} x {device}")
    tell(f"precision {choose(config.trainer)}")
    for line in run_plan(config):
        tell(line)


def quiet_lightning() -> None:
    """Its start-up lines and tips are about settings that are made here on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # torch 2.13 about lightning 2.6
