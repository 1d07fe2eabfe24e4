"""Collectives of the ranks of a run over CPU process groups, so that no rank waits for its GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tabicl_train.errors import ConfigError, picklable
from tabicl_train.training.distributed.processes import Launch

PATIENT = timedelta(hours=24)  # for what rank 0 does alone: reading a checkpoint, validation, evaluation

Value = TypeVar("Value")


class Ranks:
    """The ranks of a run, as seen by one of them.

    A rank that hangs is noticed after the timeout of `connect`, or after 24 hours while rank 0 works alone.

    Parameters
    ----------
    launch : Launch, optional
        The place of this process among the ranks. Default: a single process.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        launch = launch or Launch()
        self.rank = launch.rank
        self.size = launch.size

    def connect(self, timeout: float) -> None:
        """Open the process groups, after torch's default one; `timeout` is in seconds."""
        if self.size > 1:
            self.prompt = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self.patient = dist.new_group(backend="gloo", timeout=PATIENT)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks call this together."""
        if self.size == 1:
            return flag
        (is_set,) = self._maximum([flag], self.prompt)
        return is_set

    def wait_for_first(self, asked: Callable[[], bool]) -> bool:
        """Wait, on the other ranks, while rank 0 works alone.

        Meanwhile rank 0 calls `still_working` from time to time, and `finish` at the end. Each call is one collective
        of three flags: asked to stop, done, and the result.

        Parameters
        ----------
        asked : callable
            Returns whether this rank was asked to stop.

        Returns
        -------
        bool
            The result of rank 0.
        """
        while True:
            _, done, result = self._maximum([asked(), False, False], self.patient)
            if done:
                return result

    def still_working(self, asked: bool) -> bool:
        """On rank 0, while it works alone: return whether any rank was asked to stop."""
        if self.size == 1:
            return asked
        any_asked, _, _ = self._maximum([asked, False, False], self.patient)
        return any_asked

    def finish(self, result: bool = False) -> bool:
        """On rank 0, after it worked alone: release the other ranks, and return the result."""
        if self.size > 1:
            self._maximum([False, True, result], self.patient)
        return result

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Call a function on rank 0 and return its result on all ranks; an exception is raised on all of them."""
        if self.size == 1:
            return function()
        value = error = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as raised:
                error = raised
        # The result or the error of rank 0, in a form that can be sent.
        content = [(value, None if error is None else picklable(error))]
        dist.broadcast_object_list(content, 0, group=self.patient)
        value, sent = content[0]
        if sent is not None:
            # Rank 0 has the original, with its stack trace.
            raise error or sent
        return value

    def gather(self, value: Value) -> list[Value]:
        """Return on all ranks the values of all ranks, in order; the values must be picklable."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.patient)
        return values

    def raise_on_all_ranks(self, problems: list[str]) -> None:
        """Raise the same ConfigError on all ranks if any has problems; lines of some ranks only name them."""
        ranks: dict[str, list[int]] = {}
        for rank, texts in enumerate(self.gather(problems)):
            for text in dict.fromkeys(texts):  # each once
                ranks.setdefault(text, []).append(rank)
        lines = []
        for text, concerned in ranks.items():
            lines.append(text if len(concerned) == self.size else text + ranks_in_parentheses(concerned))
        if lines:
            raise ConfigError(lines)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor on the CPU over all ranks, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(values, group=self.prompt)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, before they exit."""
        if self.size > 1:
            dist.barrier(self.patient)

    @staticmethod
    def _maximum(flags: list[bool], group: dist.ProcessGroup) -> list[bool]:
        values = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return [bool(value) for value in values.tolist()]


def ranks_in_parentheses(ranks: list[int]) -> str:
    """Name ranks in parentheses, after a space."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f" ({noun} {', '.join(map(str, ranks))})"
