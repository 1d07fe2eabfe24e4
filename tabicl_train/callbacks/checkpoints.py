"""Checkpoints of a run: what they hold, when they are saved, and their files, which a thread writes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from priors.random import STREAM_VERSION
from tabicl_train.config.monitoring import CheckpointConfig
from tabicl_train.config.stages import CurriculumConfig
from tabicl_train.console import first_line
from tabicl_train.curriculum import last_of_stage, stage_at
from tabicl_train.module import Pretraining
from tabicl_train.optimizer import MuonAdamW
from tabicl_train.run_dir.atomic import save_atomically, sync_folder
from tabicl_train.run_dir.checkpoint import FORMAT_VERSION, DamagedCheckpoint, saved, step_of, verify

__all__ = ["CheckpointFiles", "Checkpoints", "SaveFailed"]


class SaveFailed(Exception):
    """Raised if a checkpoint could not be written."""


class CheckpointFiles:
    """Write copies of checkpoints in a thread, one at a time, and remove old ones once a new one is on disk.

    Parameters
    ----------
    config : CheckpointConfig
        Which checkpoints are kept.
    on_saved : callable
        Called in the thread with the step of a checkpoint that is on disk.
    """

    def __init__(self, config: CheckpointConfig, on_saved: Callable[[int], None] = lambda step: None) -> None:
        self.config, self.on_saved = config, on_saved
        self.whole: set[tuple[str, int]] = set()  # name and modification time of files known to be intact
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None

    def save(self, content: dict[str, Any], path: Path, second_name: Path | None = None) -> None:
        """Returns once the tensors are copied to host memory. `second_name`: of the same file."""
        self.wait()
        self.pending = self.thread.submit(self.write, to_host(content), path, second_name)

    def write(self, content: dict, path: Path, second_name: Path | None) -> None:
        try:
            if second_name is None:
                save_atomically(content, path)
            else:  # the stage's name first, so that a kill in between leaves no stage without its file
                save_atomically(content, second_name)
                give_name(content, second_name, path)
        except OSError as error:
            raise SaveFailed(
                f"{path} could not be written: {first_line(error)}. Earlier checkpoints are intact, and the same "
                "command continues from the newest one"
            ) from None
        self.on_saved(step_of(path))
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

    def check(self) -> None:
        """Raise SaveFailed if the last save has failed; does not wait for it."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk; raises SaveFailed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


class Checkpoints:
    """Make and load what a checkpoint of a run holds: one dictionary.

    Parameters
    ----------
    folder : Path
        Where checkpoints are saved, by rank 0.
    files : CheckpointFiles
        Writes them.
    curriculum : CurriculumConfig
        The stages, at whose ends the run is saved too.
    config : dict
        The whole configuration, which is saved with each checkpoint.
    facts : dict
        Also saved: the origin of the run's code, its world size and device, and the hash of its real tables.
    callbacks : list
        Those with a `state_dict` are part of a checkpoint.
    rank : int
        All ranks call `save`, since states may be added up over the ranks; rank 0 writes.
    """

    def __init__(
        self,
        folder: Path,
        files: CheckpointFiles,
        curriculum: CurriculumConfig,
        config: dict[str, Any],
        facts: dict[str, Any],
        callbacks: list[Any],
        rank: int,
    ) -> None:
        self.folder, self.files, self.curriculum, self.config = folder, files, curriculum, config
        self.facts, self.rank = facts, rank
        self.stateful = {type(callback).__name__: callback for callback in callbacks if hasattr(callback, "state_dict")}
        self.saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the run is saved after this many steps."""
        return step % self.files.config.every == 0 or last_of_stage(self.curriculum, step - 1) is not None

    def save(self, step: int, module: Pretraining, optimizer: MuonAdamW) -> None:
        """Save the run after `step` steps, at the end of a stage under its name too."""
        content = self.content(step, module, optimizer)
        self.saved_step = step
        if self.rank == 0:
            stage = last_of_stage(self.curriculum, step - 1) if step else None
            second_name = self.folder / f"stage-{stage}.ckpt" if stage else None
            self.files.save(content, self.folder / f"step-{step:08d}.ckpt", second_name)

    def content(self, step: int, module: Pretraining, optimizer: MuonAdamW) -> dict[str, Any]:
        """The dictionary after `step` steps."""
        steps = sum(stage.steps for stage in self.curriculum.stages.values())
        stage, _, stage_step = stage_at(self.curriculum, min(step, steps - 1))
        run = {
            "step": step,
            "stage": stage,
            "stage_step": stage_step,
            "address": [self.config["seed"], step],  # of the next step's tables
            "stream_version": STREAM_VERSION,
            **self.facts,
        }
        content = {
            "format_version": FORMAT_VERSION,
            "global_step": step,
            "state_dict": module.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "callbacks": {name: callback.state_dict() for name, callback in self.stateful.items()},
            "config": self.config,
            "run": run,
        }
        module.on_save_checkpoint(content)
        return content

    def load(self, content: dict[str, Any], module: Pretraining, optimizer: MuonAdamW) -> None:
        """Restore module, optimizer and callbacks from a checkpoint's dictionary."""
        load_training(content, module, optimizer)
        for name, callback in self.stateful.items():
            if name in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][name])
        self.saved_step = content["global_step"]


def load_training(content: dict[str, Any], module: Pretraining, optimizer: MuonAdamW) -> None:
    """Restore module and optimizer alone, from a checkpoint's dictionary."""
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"])
    for state in content["optimizer_states"]:
        optimizer.load_state_dict(state)


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
