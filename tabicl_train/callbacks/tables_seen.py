"""Counts of the real tables that a run has drawn, kept in its checkpoints, and a summary line."""

from __future__ import annotations

import json
import statistics
from functools import cached_property

import torch
from torch import Tensor

from priors.real import real_tables
from tabicl_train.callbacks.callback import Callback, Reason
from tabicl_train.console import info
from tabicl_train.state import TrainState
from tabicl_train.stream import StepItem


class TablesSeen(Callback):
    """Counts the tables that all ranks draw; `sizes` are the rows of each, 0 for synthetic components."""

    on_all_ranks = True

    @cached_property
    def sizes(self) -> dict:
        """The rows of the tables."""
        real = real_tables(self.context.prior)
        assert real is not None  # `build_callbacks` asks
        return real.sources()

    @cached_property
    def numbers(self) -> dict:
        """The places of the tables in the counts."""
        return {source: number for number, source in enumerate(self.sizes)}

    @cached_property
    def merged(self) -> Tensor:
        """Draws and rows (sources, 2), of all ranks up to the last call of `merge`."""
        return torch.zeros(len(self.sizes), 2, dtype=torch.int64)

    @cached_property
    def own(self) -> Tensor:
        """Those of this rank since then."""
        return torch.zeros_like(self.merged)

    def before_step(self, state: TrainState, item: StepItem) -> None:
        """Count the tables of a step; the guard, after the step, may go back to earlier counts."""
        for (source, rows), count in item.sources.items():
            self.own[self.numbers[source]] += torch.tensor([count, count * rows])

    def merge(self) -> None:
        """Add the counts of all ranks; all ranks call this after the same step."""
        self.merged += self.context.ranks.sum(self.own.clone())
        self.own.zero_()

    def state_dict(self) -> dict:
        """Return the counts of all ranks as one text, since copying 30,000 entries is slow."""
        self.merge()
        counts = zip(self.sizes, self.merged.tolist(), strict=True)
        return {"counts": json.dumps([[*source, *numbers] for source, numbers in counts])}

    def load_state_dict(self, state: dict) -> None:
        """Continue from the counts in a checkpoint, if any; those of missing tables are dropped."""
        self.merged.zero_()
        self.own.zero_()
        for component, table, *counts in json.loads(state.get("counts", "[]")):
            if (number := self.numbers.get((component, table))) is not None:
                self.merged[number] = torch.tensor(counts)

    def end(self, state: TrainState, reason: Reason) -> None:
        """Print which tables were seen."""
        self.merge()
        if self.context.ranks.rank == 0 and (line := self.line()):
            info(f"seen      {line}")

    def line(self) -> str | None:
        """Describe the share of real tables, and the epochs over them; None before the first draw."""
        draws, rows = self.merged.T.tolist()
        if not any(draws):
            return None
        sources = list(zip(self.sizes.items(), draws, rows, strict=True))
        epochs = {table: drawn / size for ((_, table), size), _, drawn in sources if table}
        real = sum(count for ((_, table), _), count, _ in sources if table)
        most = max(epochs, key=epochs.__getitem__)
        text = (
            f"{real / sum(draws):.0%} real tables, {statistics.median(epochs.values()):.3g} epochs over the median one"
        )
        return f"{text}, {epochs[most]:.3g} over the most drawn: {most}"
