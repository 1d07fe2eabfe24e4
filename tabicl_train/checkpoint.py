"""Checkpoints of a run: written beside training, aside, flushed and renamed; verified when they are read.

A file is torch.save's zip archive, whose records carry a CRC-32 each. Beside Lightning's own entries it holds
`config` (the whole run configuration) and `run` (step, stage, address of the next step, and where it comes from).
"""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tabicl_train.config import CheckpointConfig, ConfigError, RunConfig
from tabicl_train.curriculum import last_of_stage, stage_at
from tabicl_train.messages import first_line, tell
from tabicl_train.weights import save_atomically

# Of a full or failing disk. torch reports some of them as RuntimeError; anything else is an error of the program.
DISK_ERRORS = (OSError, RuntimeError)


class DamagedCheckpoint(Exception):
    """A file that is truncated, altered, or no checkpoint."""


class CheckpointFiles(TorchCheckpointIO):
    """Writes copies of checkpoints in a thread, one at a time, and removes old ones once a new one is there.

    loaded: the checkpoint that the run continues from, verified and read already
    """

    def __init__(self, config: CheckpointConfig, loaded: dict | None = None) -> None:
        self.config, self.loaded = config, loaded
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None
        self.failed: Exception | None = None  # of the last save

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options: Path | None = None) -> None:
        """Returns once the tensors are copied to host memory. `storage_options` is a second name of the file."""
        self.wait()
        self.pending = self.thread.submit(self.write, to_host(checkpoint), Path(path), storage_options)

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict[str, Any]:
        content, self.loaded = self.loaded, None
        return read(Path(path)) if content is None else content

    def write(self, content: dict, path: Path, second_name: Path | None) -> None:
        self.failed = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomically(content, path)
            if second_name is not None:
                give_name(content, path, second_name)
        except DISK_ERRORS as error:
            self.failed = error
            tell(f"warning   {path.name} could not be written ({first_line(error)}); older checkpoints are untouched")
            return
        old = [p for p in saved(path.parent) if not self.is_permanent(p)]
        for p in old[: -self.config.keep]:
            p.unlink()

    def is_permanent(self, path: Path) -> bool:
        return self.config.permanent_every is not None and step_of(path) % self.config.permanent_every == 0

    def wait(self) -> None:
        """Until the last save is on disk, or has failed; raises what was no fault of the disk."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


class Checkpoints(L.Callback):
    """Saves every few steps, at the end of a stage under its name too, and at the end of the run."""

    def __init__(self, folder: Path, files: CheckpointFiles, config: RunConfig, origin: dict) -> None:
        self.folder, self.files, self.config, self.origin = folder, files, config, origin
        self.saved_step: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        step = trainer.global_step
        if step % self.config.checkpoint.every == 0 or last_of_stage(self.config.curriculum, step - 1):
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, module) -> None:
        if self.saved_step != trainer.global_step:
            self.save(trainer)
        self.files.wait()
        if self.files.failed:
            raise OSError(f"the last checkpoint could not be written: {first_line(self.files.failed)}")

    def save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        stage = last_of_stage(self.config.curriculum, step - 1) if step else None
        second_name = self.folder / f"stage-{stage}.ckpt" if stage else None
        trainer.save_checkpoint(self.folder / f"step-{step:08d}.ckpt", storage_options=second_name)
        self.saved_step = step

    def on_save_checkpoint(self, trainer: L.Trainer, module, checkpoint: dict) -> None:
        step = trainer.global_step
        stage, _, stage_step = stage_at(self.config.curriculum, min(step, self.config.total_steps - 1))
        checkpoint["config"] = dataclasses.asdict(self.config)
        checkpoint["run"] = {
            "step": step,
            "stage": stage,
            "stage_step": stage_step,
            "address": [self.config.seed, step],  # of the next step's tables
            "ranks": trainer.world_size,
            "device": device_name(trainer.strategy.root_device),
            **self.origin,
        }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def to_host(value: Any) -> Any:
    """A copy in host memory that shares nothing with the original."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: to_host(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(v) for v in value)
    return copy.deepcopy(value)


def give_name(content: dict, path: Path, name: Path) -> None:
    """A second name for a file; a second copy where the file system has no hard links."""
    aside = name.with_name(f".{name.name}.tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        save_atomically(content, name)
    else:
        os.replace(aside, name)


def read(path: Path) -> dict:
    """The content of a checkpoint, tensors on the CPU; raises DamagedCheckpoint."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
            if (record := archive.testzip()) is not None:
                raise DamagedCheckpoint(f"{path}: the checksum of {record} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (DamagedCheckpoint, FileNotFoundError):
        raise
    except Exception as error:  # zipfile and torch raise many kinds for a damaged file
        raise DamagedCheckpoint(f"{path} is damaged: {first_line(error)}") from None


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def newest_valid(folder: Path, among: list[Path] | None = None) -> tuple[Path, dict] | None:
    """The newest checkpoint that is whole, and its content. Damaged ones are told; raises ConfigError if all are."""
    found = saved(folder) if among is None else among
    for path in reversed(found):
        try:
            return path, read(path)
        except DamagedCheckpoint as error:
            tell(f"warning   {error}; the checkpoint before it is used")
    if found:
        raise ConfigError([f"{folder} holds damaged checkpoints only; move it away to start anew"])
    return None


def sweep(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def resolve(checkpoint: str) -> Path:
    """The checkpoint file that a path means: the file itself, or the newest whole one of a run directory."""
    path = Path(checkpoint)
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError([f"checkpoint is {checkpoint!r}; there is no such file or run directory"])
    if (found := newest_valid(path / "checkpoints")) is None:
        raise ConfigError([f"checkpoint is {checkpoint!r}; the run directory holds no checkpoint yet"])
    return found[0]
