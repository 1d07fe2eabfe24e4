"""What a run on real tables has drawn so far: counts that its checkpoints keep, and a line about them."""

from __future__ import annotations

import json
import statistics

import torch

from priors.table import Source
from tabicl_train.console import info
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.stream import StepItem


class TablesSeen:
    """Counts the tables that all ranks draw.

    sizes: rows of each real table by its source; 0 of a component of synthetic tables
    """

    def __init__(self, sizes: dict[Source, int], ranks: Ranks) -> None:
        self.sizes, self.ranks = sizes, ranks
        self.numbers = {source: number for number, source in enumerate(sizes)}
        # of all ranks up to the last call of `merge`, and of this rank since then: draws and rows (sources, 2)
        self.merged = torch.zeros(len(sizes), 2, dtype=torch.int64)
        self.own = torch.zeros_like(self.merged)

    def on_train_batch_start(self, item: StepItem, **_) -> None:
        """Count the tables of a step; the guard, after the step, may go back to earlier counts."""
        for (source, rows), count in item.sources.items():
            self.own[self.numbers[source]] += torch.tensor([count, count * rows])

    def merge(self) -> None:
        """Add what the ranks have counted, which all of them do after the same step."""
        self.merged += self.ranks.sum(self.own.clone())
        self.own.zero_()

    def state_dict(self) -> dict:
        """Return the counts of all ranks as a single text, since 30,000 entries would take long to copy."""
        self.merge()
        counts = zip(self.sizes, self.merged.tolist(), strict=True)
        return {"counts": json.dumps([[*source, *numbers] for source, numbers in counts])}

    def load_state_dict(self, state: dict) -> None:
        """Go on from the counts in a checkpoint, or from none; those of tables that are gone are dropped."""
        self.merged.zero_()
        self.own.zero_()
        for component, table, *counts in json.loads(state.get("counts", "[]")):
            if (number := self.numbers.get((component, table))) is not None:
                self.merged[number] = torch.tensor(counts)

    def on_train_end(self, **_) -> None:
        """Print which tables were seen."""
        self.merge()
        if self.ranks.rank == 0 and (line := self.line()):
            info(f"seen      {line}")

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
