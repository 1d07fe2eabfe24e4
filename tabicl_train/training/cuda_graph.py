"""CUDA graphs: functions of tensors at fixed addresses, captured once and then replayed by one launch.

A kernel launch costs the host 45 to 65 us, so a step of `mini` or `base` with 64 tables took 100 ms on an H100 whatever
the sizes of its tables. Two functions are captured, each by a `Replay`: in all runs on a GPU the optimizer's step, and
for a small network the whole step, whose packs are padded to a few sizes (`model/padding.py`).
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

EAGER_CALLS = 2  # calls before a capture; by then memory, optimizer state and libraries are set up


class Captured(NamedTuple):
    """A captured function, and the tensors that hold its results after each replay."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, ...]


class Replay:
    """Calls a function, and on a GPU replays it as a CUDA graph from its third call on.

    The function must read and write tensors at fixed addresses, and Python numbers that it uses must not change. If
    they do, `made_for` must change too, and the function is captured again. A function whose inputs have several sizes
    is captured for each size. Only one of these graphs runs at a time, so they share the memory of temporary values. If
    a capture fails, a warning says why, and the function is called eagerly from then on.

    Parameters
    ----------
    what : str
        The function in words, for the warning.

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
        """Call or replay the function.

        Parameters
        ----------
        function : callable
            The function, without arguments.
        made_for : tuple
            What its Python values and addresses depend on; compared with `==`.
        size : hashable, optional
            The size of its inputs.

        Returns
        -------
        tuple of Tensor
            The results, new tensors each time.
        """
        if not self.enabled:
            return function()
        # Forget the graphs if they no longer compute the function.
        if made_for != self.made_for:
            self.made_for = made_for
            self.calls.clear()
            self.captured.clear()
        self.calls[size] += 1
        if self.calls[size] <= EAGER_CALLS:
            return function()
        # Capture, without running anything, then replay.
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
        # Meanwhile another thread pins memory, which is an error unless only this thread is captured.
        with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            results = function()
        return Captured(graph, results)


def step_problem(config: RunConfig, ranks: int) -> str | None:
    """Decide whether a run replays whole steps as CUDA graphs, according to `trainer.cuda_graphs`.

    Parameters
    ----------
    config : RunConfig
        The run.
    ranks : int
        The number of ranks.

    Returns
    -------
    str or None
        Why it does not; None if it does. The result depends on the arguments and the machine only, since the stream
        pads its packs accordingly.
    """
    model = config.model
    # The machine and the ranks: the collectives of several ranks are not captured.
    if config.trainer.cuda_graphs == "never":
        return "trainer.cuda_graphs is never"
    if not uses_cuda(config.trainer):
        return "it does not train on a GPU"
    if ranks > 1:
        return f"{ranks} ranks exchange gradients"
    # The network: small, since a large one does not wait for launches, eager, and without dropout.
    one_table = [[(2, 1, 1)]]
    if family_of(model).typical_size(model, one_table, 2, 1) is None:
        return "its network cannot be padded"
    if config.trainer.compile:
        return "trainer.compile is true"
    if count_parameters(model) > LEAST_PARAMETERS:
        return f"its network has more than {LEAST_PARAMETERS:,} parameters"
    if model.dropout:
        return f"model.dropout is {model.dropout}"
    # What is known to be a function of tensors: the built-in optimizers and objectives.
    if register.optimizer[config.optimizer.name].optimizer not in REPLAYED:
        return f"optimizer={config.optimizer.name} is a plug-in's"
    objective = build_objective(config.objective)
    if type(objective) not in (type(None), CrossEntropy, Pinball):
        return "its objective is a plug-in's"
    if getattr(objective, "class_weights", "none") != "none":
        return "objective.class_weights depend on the classes of each table"
    return None
