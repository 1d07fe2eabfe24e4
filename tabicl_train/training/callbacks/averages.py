"""An exponential moving average (EMA) of the weights over a run."""

from __future__ import annotations

import torch
from torch import Tensor

from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback
from tabicl_train.training.state import TrainState


class Averages(Callback):
    """Average the weights on rank 0, and keep the average in checkpoints, so that it is resumed bit for bit.

    After t steps, ``ema <- d * ema + (1 - d) * weights`` with ``d = min(averages.ema, (1 + t) / (10 + t))``. The
    smaller decay of the first steps reduces the influence of the initial weights, as in TensorFlow's
    ExponentialMovingAverage.
    """

    def __init__(self) -> None:
        self.ema: dict[str, Tensor] = {}
        self.since = 0  # optimizer steps done before the first one that is averaged

    def state_dict(self) -> dict:
        return {"ema": self.ema, "since": self.since}

    def load_state_dict(self, state: dict) -> None:
        """Load the average; without one, it starts with the next step."""
        self.ema = state.get("ema", {})
        self.since = state.get("since", 0)

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Add the weights after a step to the average."""
        weights = state.module.model.state_dict()
        if not self.ema:
            self.ema = {name: tensor.clone() for name, tensor in weights.items()}
            self.since = state.step - 1
        # After loading from a checkpoint, the average is in host memory.
        self.ema = {name: tensor.to(state.module.device) for name, tensor in self.ema.items()}
        steps = state.step - self.since
        decay = min(self.context.config.averages.ema, (1 + steps) / (10 + steps))
        averaged = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.ema[name] for name in averaged], [weights[name] for name in averaged], 1 - decay)
        # Integers, such as a buffer of indices, have no average.
        for name in weights.keys() - averaged:
            self.ema[name].copy_(weights[name])
