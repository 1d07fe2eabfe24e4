"""The protocol of callbacks: what watches, keeps or ends a run, called by `fit` in training/loop.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from priors import Prior
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError, wrong_records
from tabicl_train.run.records import Records
from tabicl_train.run.status import RunStatus
from tabicl_train.signals import Stop
from tabicl_train.stream.curriculum import largest_tables
from tabicl_train.stream.steps import StepItem, StepStream
from tabicl_train.stream.workers import Loader
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.weights.choice import BEST_FILE, START_FILE

if TYPE_CHECKING:
    from tabicl_train.training.state import TrainState

__all__ = ["Callback", "LoggedSteps", "Reason", "RunContext"]

C = TypeVar("C")


class Reason(Enum):
    """Why training ends."""

    DONE = "all steps are done"
    NO_GAIN = "scores no longer improve"
    STOPPED = "the run was asked to stop"
    NO_TABLES = "no tables can be drawn"

    @property
    def is_end(self) -> bool:
        """Whether the run has ended; otherwise the same command continues it."""
        return self in (Reason.DONE, Reason.NO_GAIN)


@dataclass(frozen=True)
class LoggedSteps:
    """The steps after which rows are written, tested by ``step in logged``.

    Parameters
    ----------
    every : int
        `trainer.log_every`.
    last : int
        Optimizer steps of the run.
    """

    every: int
    last: int

    def __contains__(self, step: int) -> bool:
        """Whether rows are written after this step."""
        return step % self.every == 0 or step == self.last


@dataclass
class RunContext:
    """What the callbacks of a run can use: its configuration and prior, its records, and the other ranks.

    Parameters
    ----------
    config : RunConfig
        The run.
    values : dict
        The same in plain values, as checkpoints keep it.
    prior : Prior
        The prior that tables are drawn from.
    stream : StepStream
        The tables of this rank.
    loader : Loader
        The processes that draw these tables.
    device : torch.device
        Where this rank computes.
    records : Records
        The small files in the run directory. Only rank 0 writes.
    status : RunStatus
        The file status.json.
    ranks : Ranks
        Collectives of all ranks.
    stop : Stop
        Whether this process was asked to stop.
    resumed : bool
        Whether this start of the run continues from a checkpoint.
    facts : dict
        What checkpoints record about this start of the run: origin of the code, number of ranks, device.
    callbacks : list
        The callbacks of this rank, in the order of their calls.
    """

    config: RunConfig
    values: dict[str, Any]
    prior: Prior
    stream: StepStream
    loader: Loader
    device: torch.device
    records: Records
    status: RunStatus
    ranks: Ranks
    stop: Stop
    resumed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)

    @property
    def logged(self) -> LoggedSteps:
        """The steps after which rows are written."""
        return LoggedSteps(self.config.trainer.log_every, self.config.total_steps)

    @cached_property
    def largest_tables(self) -> dict[str, dict[str, int]]:
        """Limits of the sizes of tables within those of the stages; checkpoints keep them for the trained range."""
        return largest_tables(self.config.curriculum, self.prior, self.config.model.is_regression)

    @property
    def start_file(self) -> Path:
        """The file of the weights that the run started from, which validation writes if they were given."""
        return self.records.folder / START_FILE

    @property
    def best_file(self) -> Path:
        """The file of the best weights by validation."""
        return self.records.folder / BEST_FILE

    def find(self, cls: type[C]) -> C | None:
        """Return the callback of a class, if the run has one on this rank."""
        for callback in self.callbacks:
            if isinstance(callback, cls):
                return callback
        return None


class Callback:
    """Something that watches, keeps or ends a run.

    All methods are optional. A callback may also have the methods `state_dict` and `load_state_dict`. What the first
    returns, plain values and tensors, is part of every checkpoint. The second gets it when the run is resumed, before
    `start`, and when the guard goes back to an earlier checkpoint. `context` is set before any other call. The built-in
    callbacks are built without arguments and find their options in `context.config`.

    Attributes
    ----------
    files : tuple of str
        CSV and JSON lines files that it writes in the run directory. When a run is resumed, the rows of steps that
        will be repeated are removed.
    on_all_ranks : bool
        Whether every rank has the callback; otherwise only rank 0 has it. Collectives need all ranks.
    state_name : str
        The unique name of its state in checkpoints. Default: NAME if the callback is configured as `+callbacks.NAME`,
        otherwise the name of the class.
    context : RunContext
        The run.
    """

    state_name: str
    files: ClassVar[tuple[str, ...]] = ()
    on_all_ranks: ClassVar[bool] = False
    context: RunContext

    def start(self, state: TrainState) -> None:
        """Run before the first step of this start of the run; `state.step` steps are done."""

    def before_step(self, state: TrainState, item: StepItem) -> None:
        """Run before each step.

        Parameters
        ----------
        state : TrainState
            Weights and optimizer; `state.step` steps are done.
        item : StepItem
            This rank's tables, on its device.
        """

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Run after each step.

        Parameters
        ----------
        state : TrainState
            Weights and optimizer; `state.step` counts the step, and `state.module` has its loss and gradient norm.
        item : StepItem
            This rank's tables, on its device.
        """

    def reason_to_end(self, state: TrainState) -> Reason | None:
        """Return why the run ends before the next step, or None. All ranks must return the same."""

    def end(self, state: TrainState, reason: Reason) -> Reason | None:
        """Run after the last step of this start of the run.

        Parameters
        ----------
        state : TrainState
            Weights and optimizer.
        reason : Reason
            Why training ends.

        Returns
        -------
        Reason or None
            What replaces `reason` in the calls that follow; None to keep it.
        """

    def on_exception(self, state: TrainState, error: BaseException) -> None:
        """Run when training fails."""


class Callbacks:
    """The callbacks of a run on this rank, called one after the other.

    Parameters
    ----------
    callbacks : list
        The callbacks, in the order of their calls.
    context : RunContext
        The run.

    Raises
    ------
    ConfigError
        If two callbacks would save their states under the same name.
    """

    def __init__(self, callbacks: list[Any], context: RunContext) -> None:
        self.callbacks = callbacks
        names = [state_name(callback) for callback in callbacks if hasattr(callback, "state_dict")]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError([f"two callbacks have the state_name {name!r}; give one of them another"])
        self.context = context
        context.callbacks = callbacks
        for callback in callbacks:
            callback.context = context

    def load(self, content: dict[str, Any]) -> None:
        """Load the states from the content of a checkpoint."""
        for callback, state in saved_states(content, self.callbacks):
            if state is not None:
                with wrong_records(f"the state of the callback {state_name(callback)} in the checkpoint"):
                    callback.load_state_dict(state)

    def start(self, state: TrainState) -> None:
        for method in self._methods("start"):
            method(state)

    def before_step(self, state: TrainState, item: StepItem) -> None:
        for method in self._methods("before_step"):
            method(state, item)

    def after_step(self, state: TrainState, item: StepItem) -> None:
        for method in self._methods("after_step"):
            method(state, item)

    def reason_to_end(self, state: TrainState) -> Reason | None:
        """Return why no further step is taken, or None: all steps are done, or the first reason of a callback."""
        if state.step >= state.last:
            return Reason.DONE
        for method in self._methods("reason_to_end"):
            reason = method(state)
            if reason is not None:
                return reason
        return None

    def agree_to_stop(self, item: StepItem | None) -> Reason | None:
        """Return why all ranks stop, or None unless a rank has no tables (`item` is None) or was asked to stop."""
        ranks = self.context.ranks
        if not ranks.any(item is None or self.context.stop.asked):
            return None
        if ranks.any(self.context.loader.unavailable):
            return Reason.NO_TABLES
        return Reason.STOPPED

    def end(self, state: TrainState, reason: Reason) -> Reason:
        for method in self._methods("end"):
            reason = method(state, reason) or reason
        return reason

    def on_exception(self, state: TrainState, error: BaseException) -> None:
        for method in self._methods("on_exception"):
            method(state, error)

    def _methods(self, name: str) -> Iterator[Any]:
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                yield method


def state_name(callback: Any) -> str:
    """Return the name of a callback's state in checkpoints."""
    return getattr(callback, "state_name", type(callback).__name__)


def stateful(callbacks: list[Any]) -> dict[str, Any]:
    """Return the callbacks whose state is part of checkpoints, by the names of the states."""
    return {state_name(callback): callback for callback in callbacks if hasattr(callback, "state_dict")}


def saved_states(content: dict[str, Any], callbacks: list[Any]) -> Iterator[tuple[Any, dict | None]]:
    """Yield the callbacks that have a state, each with its state in the content of a checkpoint, or None."""
    states = content["callbacks"]
    for name, callback in stateful(callbacks).items():
        yield callback, states.get(name)
