"""A pretraining run, from its configuration to its last checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import yaml
from lightning.pytorch.plugins.environments import SLURMEnvironment

from tabicl_train import checkpoint
from tabicl_train.averages import Averages
from tabicl_train.config import ConfigError, RunConfig, build_prior, flatten
from tabicl_train.curriculum import stage_at
from tabicl_train.export import load_checkpoint
from tabicl_train.files import replace_text
from tabicl_train.guard import Guard
from tabicl_train.lengths import Lengths
from tabicl_train.messages import tell
from tabicl_train.metrics import Metrics
from tabicl_train.module import Pretraining
from tabicl_train.precision import choose, uses_cuda
from tabicl_train.preemption import Preemption
from tabicl_train.profile import Profile
from tabicl_train.provenance import describe_origin
from tabicl_train.replicas import Replicas
from tabicl_train.run_plan import run_plan
from tabicl_train.signals import Stop, watch_signals
from tabicl_train.stream import StepStream
from tabicl_train.validation import Validation
from tabicl_train.wandb_log import WandbLog
from tabicl_train.workers import Loader


def train(config: RunConfig) -> str:
    """Run, or continue, the run in config.run_dir. Returns its status: finished or preempted."""
    with watch_signals() as stop:
        return train_watched(config, stop)


def train_watched(config: RunConfig, stop: Stop) -> str:
    run_dir = Path(config.run_dir)
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    resumed, content = checkpoint.newest_valid(checkpoints) or (None, None)
    first_step = 0 if resumed is None else checkpoint.step_of(resumed)
    if first_step >= config.total_steps:
        tell(f"{run_dir}: finished already, {first_step} steps are done")
        return "finished"
    refuse_changes(config, content, first_step)

    begin(config)
    files = checkpoint.CheckpointFiles(config.checkpoint, content)
    del content
    origin = describe_origin()
    callbacks, validation = run_callbacks(config, run_dir, files, origin, stop), Validation(config, run_dir)
    trainer = build_trainer(config, [*callbacks, validation], files)
    stream = StepStream(
        build_prior(config),
        config.curriculum,
        config.model,
        config.seed,
        range(first_step, config.total_steps),
        trainer.global_rank,
        trainer.world_size,
    )
    # Workers draw while the model is made, and are forked before this process has threads or a CUDA context; forked
    # late, workers of a released trainer took 13 s instead of 0.1 s a batch.
    with (
        Loader(stream, config.stream, trainer.strategy.root_device) as loader,
        validation.drawing(trainer.is_global_zero),
    ):
        module = build_module(config)
        if trainer.is_global_zero:
            checkpoint.sweep(checkpoints)
            (run_dir / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
            with open(run_dir / "provenance.jsonl", "a") as file:
                file.write(json.dumps({"step": first_step, **origin}) + "\n")
            introduce(config, trainer, first_step)
        status = RunStatus(run_dir / "status.json", trainer)
        status.write("running", first_step)
        try:
            trainer.fit(module, loader, ckpt_path=resumed, weights_only=True)
        except BaseException:
            status.write("failed", trainer.global_step)
            raise
        finally:
            files.wait()
    preempted = any(isinstance(c, Preemption) and c.asked for c in callbacks)
    outcome = "preempted" if preempted and trainer.global_step < config.total_steps else "finished"
    status.write(outcome, trainer.global_step)
    return outcome


def run_steps(config: RunConfig, start: tuple[Path, dict] | None, until: int, watch: L.Callback) -> None:
    """Train up to a step in this process, from a checkpoint or from the beginning, for somebody to watch; nothing is
    written."""
    begin(config)
    config = dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, max_steps=until, devices=1, nodes=1)
    )
    path, content = start or (None, None)
    trainer = build_trainer(config, [watch], checkpoint.CheckpointFiles(config.checkpoint, content))
    steps = range(0 if path is None else checkpoint.step_of(path), until)
    stream = StepStream(build_prior(config), config.curriculum, config.model, config.seed, steps)
    with Loader(stream, config.stream, trainer.strategy.root_device) as loader:
        module = build_module(config)
        trainer.fit(module, loader, ckpt_path=path, weights_only=True)


def begin(config: RunConfig) -> None:
    """What a process that trains sets for itself."""
    quiet_lightning()
    torch.set_num_threads(config.trainer.cpu_threads)
    torch.manual_seed(config.seed)


def build_module(config: RunConfig) -> Pretraining:
    module = Pretraining(config)
    if config.init_weights is not None:
        load_weights(module, config)
    return module


def build_trainer(config: RunConfig, callbacks: list[L.Callback], files: checkpoint.CheckpointFiles) -> L.Trainer:
    settings = config.trainer
    ranks = settings.devices * settings.nodes
    on_cuda = uses_cuda(settings)
    # cuDNN attention plans for every new shape and crashed for others; flash and memory-efficient attention remain.
    torch.backends.cuda.enable_cudnn_sdp(False)
    backend = "nccl" if on_cuda else "gloo"
    plugins: list = [files]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # Lightning's would save in the middle of a step
    trainer = L.Trainer(
        accelerator="cuda" if on_cuda else "cpu",
        devices=settings.devices,
        num_nodes=settings.nodes,
        strategy=Replicas(process_group_backend=backend, timeout=timedelta(seconds=settings.timeout))
        if ranks > 1
        else "auto",
        max_steps=config.total_steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=plugins,
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
    config: RunConfig, run_dir: Path, files: checkpoint.CheckpointFiles, origin: dict, stop: Stop
) -> list[L.Callback]:
    metrics, lengths = Metrics(config, run_dir / "metrics.csv"), Lengths(run_dir)
    wanted: list[L.Callback] = []
    if config.wandb.mode != "disabled":
        wanted.append(WandbLog(config, run_dir, metrics, lengths))
    if config.profile.step is not None:
        wanted.append(Profile(config.profile, run_dir))
    return [  # the guard may change the weights, and everything is changed when it is saved
        Guard(config, run_dir, files),
        metrics,
        lengths,
        *wanted,
        Averages(config.averages),
        checkpoint.Checkpoints(run_dir / "checkpoints", files, config, origin),
        Preemption(stop, config.trainer),
    ]


class RunStatus:
    """status.json: running, finished, preempted or failed, and the steps done; exit codes cannot tell."""

    def __init__(self, path: Path, trainer: L.Trainer) -> None:
        self.path, self.writes = path, trainer.is_global_zero

    def write(self, status: str, step: int) -> None:
        if self.writes:
            replace_text(self.path, json.dumps({"status": status, "step": step, "pid": os.getpid()}) + "\n")


def refuse_changes(config: RunConfig, saved: dict | None, first_step: int) -> None:
    """Say what is configured otherwise than in the checkpoint; refuse what would make another run of it."""
    if saved is None:
        return
    before = flatten(saved["config"])
    now = flatten(dataclasses.asdict(config))
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key not in HARMLESS]
    stage, _, _ = stage_at(config.curriculum, min(first_step, config.total_steps - 1))
    stages = list(config.curriculum.stages)
    started = [f"curriculum.stages.{name}." for name in stages[: stages.index(stage) + 1]]
    breaking = ("model.", "prior.", "seed", "optimizer.name", *started)
    order = [key.split(".")[2] for key in before if key.startswith("curriculum.stages.")]
    found = [f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed if key.startswith(breaking)]
    unfit = [key for key in changed if key.startswith("model.") and key.removeprefix("model.") not in FREE_TO_CHANGE]
    if list(dict.fromkeys(order))[: len(started)] != stages[: len(started)]:
        found.append(f"the stages were {list(dict.fromkeys(order))}, are {stages}")
    if found and (unfit or not config.resume.allow_changes):
        advice = "choose a new run_dir" + ("" if unfit else ", or say resume.allow_changes=true")
        raise ConfigError([f"{config.run_dir} is another run: {line}; {advice}" for line in found])
    for key in changed:
        tell(f"changed   {key} was {before.get(key)}, is {now.get(key)}")


HARMLESS = ("run_dir", "resume.allow_changes", "trainer.max_steps", "preflight", "preflight_steps")


FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # weights load all the same


def load_weights(module: Pretraining, config: RunConfig) -> None:
    """Start from a run, a checkpoint or a file in the public format; its model must be the configured one."""
    try:
        file_config, weights = load_checkpoint(config.init_weights)
    except ConfigError as error:
        raise ConfigError([f"init_weights: {problem}" for problem in error.problems]) from None
    changed = [
        f"init_weights: the file's model has {key}={value}, the configuration model.{key}={configured}"
        for key, value in dataclasses.asdict(file_config).items()
        if (configured := getattr(config.model, key)) != value and key not in FREE_TO_CHANGE
    ]
    if changed:
        raise ConfigError(changed)
    module.model.load_state_dict(weights)


def introduce(config: RunConfig, trainer: L.Trainer, first_step: int) -> None:
    """What is about to run, as it really is."""
    tell(f"run       {config.run_dir}" + (f", resumed at step {first_step}" if first_step else ""))
    tell(f"prior     {config.prior['name']}, seed {config.seed}, {config.stream.num_workers} workers")
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
