"""CUDA graphs: a function of tensors that stay where they are is captured once, and then replayed by one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tabicl_train.console import print_line

__all__ = ["Replay"]

EAGER_CALLS = 2  # before a capture: memory, state and libraries are set up by then


class Replay:
    """Calls a function, and on a GPU replays it from the third call on.

    What the function reads and writes must stay at the same addresses, and its numbers must not change, unless
    `made_for` does: then it is captured anew. Where a capture fails, a line says why, and the function is called as
    before.

    Attributes
    ----------
    enabled : bool
        Whether to capture anything; `on_fit_start` of the module sets it on a GPU.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.made_for: tuple[Any, ...] = ()
        self.calls = 0  # since `made_for` has changed
        self.graph: torch.cuda.CUDAGraph | None = None
        self.results: tuple[Tensor, ...] = ()

    def __call__(self, function: Callable[[], tuple[Tensor, ...]], made_for: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the results of the function, new tensors each time."""
        if not self.enabled:
            return function()
        if made_for != self.made_for:
            self.made_for = made_for
            self.calls = 0
            self.graph = None
            self.results = ()
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            return function()
        if self.graph is None:
            try:
                self.graph = self.capture(function)
            except RuntimeError as error:
                self.enabled = False
                print_line(f"warning   the optimizer's step is not replayed as a CUDA graph: {error}")
                return function()
        self.graph.replay()
        return tuple(x.clone() for x in self.results)

    def capture(self, function: Callable[[], tuple[Tensor, ...]]) -> torch.cuda.CUDAGraph:
        """Record what a function launches, without running it."""
        graph = torch.cuda.CUDAGraph()
        # Another thread pins memory meanwhile, which a capture of all threads would not allow.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.results = function()
        return graph
