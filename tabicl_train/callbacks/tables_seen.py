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
    def unmerged(self) -> Tensor:
        """Those of this rank since then."""
        return torch.zeros_like(self.merged)

    def before_step(self, state: TrainState, item: StepItem) -> None:
        """Count the tables of a step; the guard, after the step, may go back to earlier counts."""
        for (source, rows), count in item.sources.items():
            self.unmerged[self.numbers[source]] += torch.tensor([count, count * rows])

    def merge(self) -> None:
        """Add the counts of all ranks; all ranks call this after the same step."""
        self.merged += self.context.ranks.sum(self.unmerged.clone())
        self.unmerged.zero_()

    def state_dict(self) -> dict:
        """Return the counts of all ranks as one text, since copying 30,000 entries is slow."""
        self.merge()
        counts = []
        for (component, table), (draws, rows) in zip(self.sizes, self.merged.tolist(), strict=True):
            counts.append([component, table, draws, rows])
        return {"counts": json.dumps(counts)}

    def load_state_dict(self, state: dict) -> None:
        """Continue from the counts in a checkpoint, if any; those of missing tables are dropped."""
        self.merged.zero_()
        self.unmerged.zero_()
        for component, table, draws, rows in json.loads(state.get("counts", "[]")):
            number = self.numbers.get((component, table))
            if number is not None:
                self.merged[number] = torch.tensor([draws, rows])

    def end(self, state: TrainState, reason: Reason) -> None:
        """Print which tables were seen."""
        self.merge()
        if self.context.ranks.rank == 0:
            line = self.line()
            if line is not None:
                info(f"seen      {line}")

    def line(self) -> str | None:
        """Describe the share of real tables, and the epochs over them; None before the first draw."""
        draws = 0
        real_draws = 0
        epochs = {}  # rows drawn for each of its rows, by real table
        for ((_, table), size), (table_draws, rows) in zip(self.sizes.items(), self.merged.tolist(), strict=True):
            draws += table_draws
            if table:  # a real one
                real_draws += table_draws
                epochs[table] = rows / size
        if draws == 0:
            return None
        median = statistics.median(epochs.values())
        most_drawn = max(epochs, key=epochs.__getitem__)
        return (
            f"{real_draws / draws:.0%} real tables, {median:.3g} epochs over the median one, "
            f"{epochs[most_drawn]:.3g} over the most drawn: {most_drawn}"
        )
