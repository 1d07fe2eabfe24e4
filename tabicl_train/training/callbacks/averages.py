"""An exponential moving average (EMA) of the weights over a run."""

from __future__ import annotations

import torch
from torch import Tensor

from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback
from tabicl_train.training.state import TrainState


class Averages(Callback):
    """Average the weights on rank 0, and keep the average in its checkpoints, so that it is resumed bit for bit."""

    def __init__(self) -> None:
        self.ema: dict[str, Tensor] = {}
        self.since = 0  # optimizer steps done before the first one in the EMA

    def state_dict(self) -> dict:
        return {"ema": self.ema, "since": self.since}

    def load_state_dict(self, state: dict) -> None:
        """Load the average; a missing one starts with the next step."""
        self.ema = state.get("ema", {})
        self.since = state.get("since", 0)

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Add the weights after a step."""
        weights = state.module.model.state_dict()
        if not self.ema:
            self.ema = {name: tensor.clone() for name, tensor in weights.items()}
            self.since = state.step - 1
        # They are in host memory after loading from a checkpoint.
        self.ema = {name: tensor.to(state.module.device) for name, tensor in self.ema.items()}
        steps = state.step - self.since
        # A smaller decay in the first steps reduces the weight of the initial weights.
        decay = min(self.context.config.averages.ema, (1 + steps) / (10 + steps))
        averaged = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.ema[name] for name in averaged], [weights[name] for name in averaged], 1 - decay)
        for name in weights.keys() - averaged:  # such as a buffer of indices
            self.ema[name].copy_(weights[name])
