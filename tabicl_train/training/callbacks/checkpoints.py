"""Checkpoints of a run: what they hold, when they are saved, and the thread that writes them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from priors.random import STREAM_VERSION
from tabicl_train.config.schema import CheckpointConfig, CurriculumConfig
from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError, Diverged
from tabicl_train.outputs import save_atomically
from tabicl_train.run.checkpoint import FORMAT_VERSION, checksums, how_to_begin_again, non_finite, saved, step_of
from tabicl_train.stream.curriculum import last_of_stage, stage_at
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback, Reason, stateful
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.state import TrainState


class SaveFailed(Exception):
    """Raised if a checkpoint cannot be written."""


class CheckpointFiles:
    """Write copies of checkpoints in a thread, one at a time, and remove old ones once a new one is on disk.

    Parameters
    ----------
    config : CheckpointConfig
        When to save, and what to keep.
    curriculum : CurriculumConfig
        The stages, each of which ends with a checkpoint.
    on_saved : callable
        Called by the thread with the step of a checkpoint that is on disk.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        curriculum: CurriculumConfig,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.config = config
        self.curriculum = curriculum
        self.on_saved = on_saved
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the schedule saves a checkpoint after `step` steps."""
        if step == 0:
            return False
        ends_stage = last_of_stage(self.curriculum, step - 1) is not None
        return ends_stage or step % self.config.every == 0

    def save(self, content: dict[str, Any], path: Path, second_name: Path | None = None) -> None:
        """Copy the content to host memory, and write it in the thread, also under a second name if one is given."""
        self.wait()
        self.pending = self.thread.submit(self.write, to_host(content), path, second_name)

    def write(self, content: dict, path: Path, second_name: Path | None) -> None:
        """Write a checkpoint, and remove older ones that are no longer needed; called in the thread."""
        try:
            # The file of the stage comes first, so that it exists even if the process is killed in between.
            if second_name is not None:
                save_atomically(content, second_name)
            save_atomically(content, path)
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise SaveFailed(
                f"{path} could not be written: {reason}. Earlier checkpoints are intact, and the same "
                "command continues from the newest one"
            ) from None
        self.on_saved(step_of(path))
        self.remove_old(path)

    def remove_old(self, newest: Path) -> None:
        """Remove all checkpoints except the permanent ones and the last `checkpoint.keep` of the others."""
        permanent_every = self.config.permanent_every
        passing = []
        for path in saved(newest.parent):
            step = step_of(path)
            # A later checkpoint is damaged: otherwise the run would have continued from it.
            if step > step_of(newest):
                continue
            if permanent_every is None or step % permanent_every:
                passing.append(path)
        # A checkpoint that is not due was saved at a preemption, and is removed first.
        passing.sort(key=lambda path: (self.is_due(step_of(path)), step_of(path)))
        for path in passing[: -self.config.keep]:
            if path != newest:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise SaveFailed if the last save has failed, without waiting for it."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk; raises SaveFailed if it has failed."""
        pending = self.pending
        self.pending = None
        if pending is not None:
            pending.result()


class Checkpoints(Callback):
    """Save the run on schedule and when it ends.

    All ranks make the content, since callbacks may sum their states over the ranks; rank 0 writes it.
    """

    on_all_ranks = True

    def __init__(self) -> None:
        self.saved_step: int | None = None

    @cached_property
    def writer(self) -> CheckpointFiles:
        """What writes the files."""
        config = self.context.config
        status = self.context.status
        return CheckpointFiles(config.checkpoint, config.curriculum, on_saved=lambda step: status.write(saved=step))

    def start(self, state: TrainState) -> None:
        """In a resumed run, remember that the checkpoint it continues from is on disk."""
        if self.context.resumed:
            self.saved_step = state.step

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Save if a checkpoint is due; raises SaveFailed if the last save has failed."""
        self.writer.check()
        if self.writer.is_due(state.step):
            self.save(state)

    def end(self, state: TrainState, reason: Reason) -> None:
        """Save, unless the last step is saved already, and wait until the checkpoint is on disk."""
        if self.saved_step != state.step:
            self.save(state)
        self.writer.wait()

    def save(self, state: TrainState) -> None:
        """Save the run, at the end of a stage also under the stage's name.

        Raises
        ------
        Diverged
            On all ranks, if their weights differ or are not finite.
        """
        # Weights that a run could not continue from are not saved.
        check_ranks(state, self.context.ranks)
        problem = non_finite(state.network.state_dict())
        if problem is not None:
            self.writer.wait()
            advice = how_to_begin_again(self.context.records.folder)
            raise Diverged(f"after step {state.step}, {problem}, so no checkpoint is written. {advice}")

        # All ranks make the content, and rank 0 writes it.
        content = self.content(state)
        self.saved_step = state.step
        if self.context.ranks.rank > 0:
            return
        folder = self.context.records.folder / "checkpoints"
        second_name = None
        if state.step > 0:
            stage = last_of_stage(self.context.config.curriculum, state.step - 1)
            if stage:
                second_name = folder / f"stage-{stage}.ckpt"
        self.writer.save(content, folder / f"step-{state.step:08d}.ckpt", second_name)

    def content(self, state: TrainState) -> dict[str, Any]:
        """Return the content of a checkpoint; all ranks call this."""
        # Where the run is. After the last step that is the last stage.
        step = state.step
        curriculum = self.context.config.curriculum
        total_steps = sum(stage.steps for stage in curriculum.stages.values())
        stage, _, stage_step = stage_at(curriculum, min(step, total_steps - 1))
        run = {
            "step": step,
            "stage": stage,
            "stage_step": stage_step,
            "address": [self.context.config.seed, step],  # of the next step's tables
            "stream_version": STREAM_VERSION,
            **self.context.facts,
        }

        # The states of callbacks, network and optimizer.
        states = {name: callback.state_dict() for name, callback in stateful(self.context.callbacks).items()}
        check_states(states)
        content = {
            "format_version": FORMAT_VERSION,
            "global_step": step,
            "state_dict": state.module.state_dict(),
            "optimizer_states": [state.optimizer.state_dict()],
            "callbacks": states,
            "config": self.context.values,
            "largest_tables": self.context.largest_tables,
            "run": run,
        }
        state.module.on_save_checkpoint(content)
        return content


def check_ranks(state: TrainState, ranks: Ranks) -> None:
    """Raise Diverged on all ranks if their weights differ, since a checkpoint holds the weights of one rank."""
    if ranks.size == 1:
        return
    first, *others = ranks.gather(checksums(state.network.state_dict()))
    for rank, sums in enumerate(others, start=1):
        differing = [name for name in first | sums if first.get(name) != sums.get(name)]
        if differing:
            raise Diverged(
                f"after step {state.step}, ranks 0 and {rank} have different weights ({differing[0]}), so no "
                "checkpoint is written. A callback that changes weights needs on_all_ranks = True and must do the "
                "same on each rank; fix it, and the same command continues from the previous checkpoint"
            )


def check_states(states: dict[str, Any]) -> None:
    """Raise ConfigError for states of callbacks that could not be loaded, since loading a file executes no code."""
    problems = []
    for name, state in states.items():
        reason = why_not_loadable(state)
        if reason is not None:
            advice = "state_dict must return tensors, numbers, text, None, and lists, tuples and dictionaries of them"
            problems.append(f"the state of the callback {name} cannot be loaded from a checkpoint ({reason}); {advice}")
    if problems:
        raise ConfigError(problems)


def why_not_loadable(state: Any) -> str | None:
    """Return why `torch.load(weights_only=True)` would not load a state, or None if it would."""
    # Save it, without the data of tensors, and try.
    file = io.BytesIO()
    try:
        torch.save(with_empty_tensors(state), file)
    except Exception as error:
        # A state may hold anything, whose pickling may raise any error.
        return first_line(error)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        file.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if unknown:
            return f"it holds {', '.join(unknown)}"
        return first_line(error)
    return None


def with_empty_tensors(value: Any) -> Any:
    """Replace the tensors in a state by empty ones of the same type, since only their types matter here."""
    if type(value) is torch.Tensor:
        return torch.empty(0, dtype=value.dtype)
    if type(value) is dict:
        return {key: with_empty_tensors(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_empty_tensors, value))
    return value


def to_host(value: Any) -> Any:
    """Copy deeply, with all tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):  # also the OrderedDict of the weights
        return {key: to_host(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_host, value))
    return copy.deepcopy(value)
