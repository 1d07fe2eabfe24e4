"""What a run on real tables has drawn so far: counts that its checkpoints keep, and a line about them."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable

import torch

from priors.table import Source


class TablesSeen:
    """Counts the tables that all ranks draw; without real tables it counts nothing.

    sizes: rows of each real table by its source; 0 of a component of synthetic tables
    """

    def __init__(self, sizes: dict[Source, int]) -> None:
        self.sizes = sizes
        self.numbers = {source: number for number, source in enumerate(sizes)}
        # of all ranks up to the last call of `merge`, and of this rank since then: draws and rows (sources, 2)
        self.merged = torch.zeros(len(sizes), 2, dtype=torch.int64)
        self.own = torch.zeros_like(self.merged)

    def add(self, draws: Counter[tuple[Source, int]]) -> None:
        """Count the tables of this rank; draws: how many of each source and number of rows."""
        if self.sizes:
            for (source, rows), count in draws.items():
                self.own[self.numbers[source]] += torch.tensor([count, count * rows])

    def merge(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add what the ranks have counted, which all of them do after the same step; add_up: sum over the ranks."""
        self.merged += add_up(self.own.clone())
        self.own.zero_()

    def text(self) -> str:
        """The counts for a checkpoint: a single text, since 30,000 entries would take long to copy."""
        return json.dumps([[*source, *counts] for source, counts in zip(self.sizes, self.merged.tolist(), strict=True)])

    def load(self, text: str) -> None:
        """Go on from the counts in a checkpoint; those of tables that are gone are dropped."""
        self.merged.zero_()
        self.own.zero_()
        for component, table, *counts in json.loads(text):
            if (number := self.numbers.get((component, table))) is not None:
                self.merged[number] = torch.tensor(counts)

    def line(self) -> str | None:
        """The share of real tables, and the epochs over them; None if nothing has been drawn."""
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
