"""CUDA graphs: functions of tensors that stay where they are, captured once and then replayed by one launch.

A launch costs 45 to 65 us of the host, so that a step of `mini` or `base` with 64 tables took 100 ms on an H100
whatever its tables. Two functions are captured, each by a `Replay`: the optimizer's step, in all runs on a GPU; and the
whole step of a small network, whose packs are padded to a few sizes for it (`model/padding.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tabicl_train.config.schema import RunConfig
from tabicl_train.console import print_line
from tabicl_train.doors import register
from tabicl_train.model.config import family_of
from tabicl_train.training.compiling import LEAST_PARAMETERS
from tabicl_train.training.objectives import CrossEntropy, Pinball, build_objective
from tabicl_train.training.optimizer import REPLAYED
from tabicl_train.training.planning import count_parameters
from tabicl_train.training.precision import uses_cuda

__all__ = ["Replay"]

EAGER_CALLS = 2  # before a capture: memory, state and libraries are set up by then


class Captured(NamedTuple):
    """A function that was captured, and where its results are after each replay."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, ...]


class Replay:
    """Calls a function, and on a GPU replays it from its third call on.

    What the function reads and writes must stay at the same addresses, and its numbers must not change, unless
    `made_for` does: then it is captured anew. A function of inputs of several sizes is captured for each of them; as
    only one of these graphs runs at a time, they share the memory of their temporary values. Where a capture fails, a
    line says why, and the function is called as before.

    Parameters
    ----------
    what : str
        What the function is, for that line.

    Attributes
    ----------
    enabled : bool
        Whether to capture anything.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.enabled = False
        self.made_for: tuple[Any, ...] = ()
        self.calls: Counter[Hashable] = Counter()  # of each size since `made_for` has changed
        self.captured: dict[Hashable, Captured] = {}

    def __call__(
        self, function: Callable[[], tuple[Tensor, ...]], made_for: tuple[Any, ...], size: Hashable = None
    ) -> tuple[Tensor, ...]:
        """Return the results of the function, new tensors each time."""
        if not self.enabled:
            return function()
        if made_for != self.made_for:
            self.made_for = made_for
            self.calls.clear()
            self.captured.clear()
        self.calls[size] += 1
        if self.calls[size] <= EAGER_CALLS:
            return function()
        if size not in self.captured:
            try:
                self.captured[size] = self.capture(function)
            except RuntimeError as error:
                self.enabled = False
                print_line(f"warning   {self.what} is not replayed as a CUDA graph: {error}")
                return function()
        graph, results = self.captured[size]
        graph.replay()
        return tuple(x.clone() for x in results)

    def capture(self, function: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Record what a function launches, without running it."""
        graph = torch.cuda.CUDAGraph()
        shared = next((captured.graph.pool() for captured in self.captured.values()), None)
        # Another thread pins memory meanwhile, which a capture of all threads would not allow.
        with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            results = function()
        return Captured(graph, results)


def step_problem(config: RunConfig, ranks: int) -> str | None:
    """Find out whether a run replays its whole steps as CUDA graphs, as `trainer.cuda_graphs` says.

    Parameters
    ----------
    config : RunConfig
        The run.
    ranks : int
        Processes that train.

    Returns
    -------
    str or None
        Why it does not, None if it does. It depends on nothing else, as packs are padded accordingly.
    """
    model = config.model
    if config.trainer.cuda_graphs == "never":
        return "trainer.cuda_graphs is never"
    if not uses_cuda(config.trainer):
        return "it does not train on a GPU"
    if ranks > 1:
        return f"{ranks} ranks exchange gradients"
    one_table = [[(2, 1, 1)]]
    if family_of(model).typical_size(model, one_table, 2, 1) is None:
        return "its network cannot be padded"
    if config.trainer.compile:
        return "trainer.compile is true"
    if count_parameters(model) > LEAST_PARAMETERS:
        return f"its network has more than {LEAST_PARAMETERS:,} parameters"
    if model.dropout:
        return f"model.dropout is {model.dropout}"
    if register.optimizer[config.optimizer.name].optimizer not in REPLAYED:
        return f"optimizer={config.optimizer.name} is a plug-in's"
    objective = build_objective(config.objective)
    if type(objective) not in (type(None), CrossEntropy, Pinball):
        return "its objective is a plug-in's"
    if getattr(objective, "class_weights", "none") != "none":
        return "objective.class_weights depend on the classes of each table"
    return None
