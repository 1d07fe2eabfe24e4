"""Checkpoints of a run: written aside and renamed, so that a file that is there is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tabicl_train.config import CheckpointConfig, ConfigError, CurriculumConfig
from tabicl_train.curriculum import last_of_stage
from tabicl_train.weights import save_atomically


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own writer copies across file systems and leaves half a file when killed there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options=None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_atomically(checkpoint, Path(path))


class Checkpoints(L.Callback):
    """Saves every few steps and at the end, and keeps the newest ones; the end of a stage is kept for good."""

    def __init__(self, folder: Path, config: CheckpointConfig, curriculum: CurriculumConfig) -> None:
        self.folder, self.config, self.curriculum = folder, config, curriculum

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        if trainer.global_step % self.config.every == 0:
            self.save(trainer)
        if stage := last_of_stage(self.curriculum, trainer.global_step - 1):
            trainer.save_checkpoint(self.folder / f"stage-{stage}.ckpt")

    def on_train_end(self, trainer: L.Trainer, module) -> None:
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        path = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        if path.exists():  # the end of the run fell on a multiple
            return
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            for old in saved(self.folder)[: -self.config.keep]:
                old.unlink()


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob("step-*.ckpt"))


def sweep(folder: Path) -> None:
    """Remove what a killed save left behind."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink()


def resolve(checkpoint: str) -> Path:
    """The checkpoint file that a path means: the file itself, or the newest one of a run directory."""
    path = Path(checkpoint)
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError([f"checkpoint is {checkpoint!r}; there is no such file or run directory"])
    found = saved(path / "checkpoints")
    if not found:
        raise ConfigError([f"checkpoint is {checkpoint!r}; the run directory holds no checkpoint yet"])
    return found[-1]
