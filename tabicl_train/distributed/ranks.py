"""Decisions that all ranks of a run make together, over CPU process groups, so that no rank waits for its GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tabicl_train.distributed.processes import Launch
from tabicl_train.errors import ConfigError, picklable

PATIENT = timedelta(hours=24)  # for what rank 0 does alone: reading a checkpoint, validation, evaluation

Value = TypeVar("Value")


class Ranks:
    """The ranks of a run, as one of them sees them.

    A rank that hangs while rank 0 works alone is noticed after 24 hours, else after the timeout of `connect`.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        launch = launch or Launch()
        self.rank, self.size = launch.rank, launch.size

    def connect(self, timeout: float) -> None:
        """Open the process groups, once torch's default one is open."""
        if self.size > 1:
            self.prompt = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self.patient = dist.new_group(backend="gloo", timeout=PATIENT)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks call this after the same steps."""
        return self._maximum([flag], self.prompt)[0] if self.size > 1 else flag

    def wait_for_first(self, asked: Callable[[], bool]) -> bool:
        """Wait, on the other ranks, while rank 0 works alone and calls `still_working` now and then, then `finish`."""
        while True:
            _, done, result = self._maximum([asked(), False, False], self.patient)
            if done:
                return result

    def still_working(self, asked: bool) -> bool:
        """Return, on rank 0, whether any rank was asked to stop."""
        return self._maximum([asked, False, False], self.patient)[0] if self.size > 1 else asked

    def finish(self, result: bool = False) -> bool:
        """Release the other ranks, on rank 0, and return the result."""
        return self._maximum([False, True, result], self.patient)[2] if self.size > 1 else result

    def from_first(self, function: Callable[[], Value]) -> Value:
        """Call `function` on rank 0 and return its result on all ranks; an exception is raised on all of them."""
        if self.size == 1:
            return function()
        value = error = None
        if self.rank == 0:
            try:
                value = function()
            except Exception as raised:
                error = raised
        content = [(value, None if error is None else picklable(error))]
        dist.broadcast_object_list(content, 0, group=self.patient)
        value, sent = content[0]
        if sent is not None:
            raise error or sent
        return value

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks in their order, on all ranks; they must be picklable."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.patient)
        return values

    def raise_on_all_ranks(self, problems: list[str]) -> None:
        """Raise the same ConfigError on all ranks if any rank has problems, naming the ranks concerned."""
        ranks: dict[str, list[int]] = {}
        for rank, texts in enumerate(self.gather(problems)):
            for text in texts:
                ranks.setdefault(text, []).append(rank)
        if ranks:
            raise ConfigError([text if len(r) == self.size else text + listed(r) for text, r in ranks.items()])

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the CPU over all ranks, in place."""
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


def listed(ranks: list[int]) -> str:
    return f" ({'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))})"
