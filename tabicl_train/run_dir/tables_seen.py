"""tables_seen.csv: what a run on real tables has drawn so far, from which component of a mixture and from which table.

component  name of the prior
table      path of the real table; empty for a component as a whole
draws      tables drawn
rows       rows drawn
epochs     rows drawn by the rows of the table; empty for a component
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable

import torch

from priors.mix_scm import MixSCM
from priors.real import real_tables
from priors.table import Source
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.run_dir.records import Records, csv_text

FILE = "tables_seen.csv"
COLUMNS = ("component", "table", "draws", "rows", "epochs")

Entry = tuple[str, str, int, int, int]  # component, table, rows of the table, draws, rows drawn


class TablesSeen:
    """Counts the tables that all ranks draw; of a prior without real tables it counts nothing, and `sizes` is empty.

    sizes: rows of each real table by its source; 0 of a component of synthetic tables
    """

    def __init__(self, config: RunConfig, records: Records) -> None:
        self.config, self.records, self.prior = config, records, build_prior(config.prior)
        self.load("[]")

    def load(self, text: str) -> None:
        """Go on from the counts in a checkpoint, as `text` returns them."""
        entries: list[Entry] = json.loads(text)
        real = real_tables(self.prior)
        self.sizes = {} if real is None else real.sources()
        if self.sizes:  # tables that are gone, as resume.allow_changes allows, still count
            self.sizes = {(component, table): size for component, table, size, _, _ in entries} | self.sizes
        counted = {(component, table): counts for component, table, _, *counts in entries}
        self.numbers = {source: number for number, source in enumerate(self.sizes)}
        # of all ranks up to the last call of `merge`, and of this rank since then: draws and rows (sources, 2)
        self.merged = torch.tensor([counted.get(source, [0, 0]) for source in self.sizes], dtype=torch.int64)
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
        return json.dumps(self.entries())

    def entries(self) -> list[Entry]:
        counts = self.merged.tolist()
        return [(*source, size, *counts[self.numbers[source]]) for source, size in self.sizes.items()]

    def write(self) -> None:
        entries = self.entries()
        rows: list[tuple] = [COLUMNS]
        for name in dict.fromkeys(component for component, *_ in entries):
            own = [entry for entry in entries if entry[0] == name]
            rows.append((name, "", sum(draws for *_, draws, _ in own), sum(drawn for *_, drawn in own), ""))
            rows += [(name, table, draws, drawn, drawn / size) for _, table, size, draws, drawn in own if table]
        self.records.replace(FILE, csv_text(rows))

    def line(self, steps: int) -> str | None:
        """The share of real tables, and the epochs over them; None if nothing has been drawn."""
        entries = self.entries()
        drawn = sum(draws for *_, draws, _ in entries)
        if drawn == 0:
            return None
        epochs = {table: rows / size for _, table, size, _, rows in entries if table}
        most = max(epochs, key=epochs.__getitem__)
        text = f"{epochs[most]:.3g} epochs over {most}"
        if len(epochs) > 1:
            text = f"{statistics.median(epochs.values()):.3g} epochs over the median table"
            text += f", {epochs[most]:.3g} over the most drawn: {most}"
        if isinstance(self.prior, MixSCM):
            share = sum(draws for _, table, _, draws, _ in entries if table) / drawn
            text = f"{share:.0%} real tables (asked for {self.asked(self.prior, steps):.0%}), {text}"
        return text

    def asked(self, prior: MixSCM, steps: int) -> float:
        """The expected share of real tables in the first steps."""
        real = {component for (component, table) in self.sizes if table}
        expected = total = 0.0
        for stage in self.config.curriculum.stages.values():
            tables = min(steps, stage.steps) * stage.tables
            steps -= min(steps, stage.steps)
            shares = prior.mixed(stage.mix).shares
            expected += tables * sum(share for name, share in shares.items() if name in real)
            total += tables
        return expected / total
