"""Saves the run every few steps and at the end of each stage and of the run; files are written in a thread."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from priors.random import STREAM_VERSION
from tabicl_train.config.schema import CheckpointConfig, RunConfig, build_prior
from tabicl_train.console import first_line, tell
from tabicl_train.curriculum import last_of_stage, stage_at
from tabicl_train.run_dir.atomic import save_atomically, sync_folder
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, DamagedCheckpoint, read, saved, step_of, verify


class SaveFailed(OSError):
    """A run has ended without its last checkpoint."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes copies of checkpoints in a thread, one at a time, and removes old ones once a new one is on disk.

    loaded: content of the checkpoint from which the run continues, already verified
    check: called before anything is written; raises if this process may no longer write
    """

    def __init__(
        self, config: CheckpointConfig, loaded: dict | None = None, check: Callable[[], None] = lambda: None
    ) -> None:
        self.config, self.loaded, self.check = config, loaded, check
        self.whole: set[tuple[str, int]] = set()  # name and modification time of files known to be intact
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None
        self.failed: Exception | None = None  # why the last save failed

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options: Path | None = None) -> None:
        """Returns once the tensors are copied to host memory. `storage_options`: a second name for the file."""
        self.wait()
        self.pending = self.thread.submit(self.write, to_host(checkpoint), Path(path), storage_options)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict[str, Any]:
        content, self.loaded = self.loaded, None
        return read(Path(path)) if content is None else content

    def write(self, content: dict, path: Path, second_name: Path | None) -> None:
        self.failed = None
        self.check()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if second_name is None:
                save_atomically(content, path)
            else:  # the stage's name first, so that a kill in between leaves no stage without its file
                save_atomically(content, second_name)
                give_name(content, second_name, path)
        except OSError as error:
            self.failed = error
            tell(f"warning   {path.name} could not be written ({first_line(error)}); older checkpoints are kept")
            return
        self.prune(path)

    def prune(self, written: Path) -> None:
        """Remove files older than the newest `keep` intact ones, of which `written` is one."""
        kept = 1
        for path in reversed(saved(written.parent)):
            if path == written or self.is_permanent(path) or not self.is_whole(path):
                continue
            kept += 1
            if kept > self.config.keep and step_of(path) < step_of(written):
                path.unlink(missing_ok=True)

    def is_whole(self, path: Path) -> bool:
        """Whether a file is undamaged; verified once."""
        try:
            key = path.name, path.stat().st_mtime_ns
            if key not in self.whole:
                verify(path)
                self.whole.add(key)
        except (DamagedCheckpoint, OSError):
            return False
        return True

    def is_permanent(self, path: Path) -> bool:
        return self.config.permanent_every is not None and step_of(path) % self.config.permanent_every == 0

    def wait(self) -> None:
        """Wait until the last save is on disk or has failed; raises errors other than those of the disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


class Checkpoints(L.Callback):
    """Saves every few steps, at the end of each stage (under its name too) and at the end of the run."""

    def __init__(self, folder: Path, files: CheckpointFiles, config: RunConfig, origin: dict) -> None:
        self.folder, self.files, self.config, self.origin = folder, files, config, origin
        self.saved_step: int | None = None
        self.real_tables = build_prior(config).fingerprint()

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        step = trainer.global_step
        if step % self.config.checkpoint.every == 0 or last_of_stage(self.config.curriculum, step - 1):
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, module) -> None:
        if self.saved_step != trainer.global_step:
            self.save(trainer)
        self.files.wait()
        if self.files.failed:
            raise SaveFailed(
                f"the last checkpoint could not be written: {first_line(self.files.failed)}. The same command repeats "
                "the steps since the previous checkpoint"
            )

    def save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        stage = last_of_stage(self.config.curriculum, step - 1) if step else None
        second_name = self.folder / f"stage-{stage}.ckpt" if stage else None
        trainer.save_checkpoint(self.folder / f"step-{step:08d}.ckpt", storage_options=second_name)
        self.saved_step = step

    def on_save_checkpoint(self, trainer: L.Trainer, module, checkpoint: dict) -> None:
        step = trainer.global_step
        stage, _, stage_step = stage_at(self.config.curriculum, min(step, self.config.total_steps - 1))
        checkpoint["format_version"] = FORMAT_VERSION
        checkpoint["config"] = dataclasses.asdict(self.config)
        checkpoint["run"] = {
            "step": step,
            "stage": stage,
            "stage_step": stage_step,
            "address": [self.config.seed, step],  # of the next step's tables
            "stream_version": STREAM_VERSION,
            "real_tables": self.real_tables,
            "ranks": trainer.world_size,
            "device": device_name(trainer.strategy.root_device),
            **self.origin,
        }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def to_host(value: Any) -> Any:
    """A deep copy with all tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: to_host(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(v) for v in value)
    return copy.deepcopy(value)


def give_name(content: dict, path: Path, name: Path) -> None:
    """Give a file a second name, or write a second copy where the file system has no hard links."""
    aside = name.with_name(f".{name.name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        save_atomically(content, name)
    else:
        os.replace(aside, name)
        sync_folder(name.parent)
