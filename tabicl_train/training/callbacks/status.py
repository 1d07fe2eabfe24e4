"""Keeps status.json up to date while a run trains."""

from __future__ import annotations

from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback
from tabicl_train.training.state import TrainState


class Status(Callback):
    """Write the number of steps done to status.json, at most every ten seconds."""

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Count a step."""
        self.context.status.update(state.step)
