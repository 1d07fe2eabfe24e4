"""The stream of optimiser steps: one item is everything that a rank computes in one step.

The items depend on (seed, step) only, so they are the same whether this process draws them or a worker does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from priors import Prior, Table
from tabicl_train.config.schema import CurriculumConfig
from tabicl_train.curriculum import MicroBatch, plan_step
from tabicl_train.model.config import TabICLConfig


@dataclass
class TableBatch:
    """Tables with the same rows, split and width.

    X: float32 (B, N, M)
    y: int64 (B, N); the first train_size labels of a table are its context, the rest are to be predicted. The type is
        the one that the prior drew, and `Network.losses` decides which types a network learns
    """

    X: Tensor
    y: Tensor
    train_size: int

    def to(self, device: torch.device) -> TableBatch:
        return TableBatch(self.X.to(device, non_blocking=True), self.y.to(device, non_blocking=True), self.train_size)


@dataclass
class StepItem:
    """One rank's share of one optimiser step.

    tables: number of tables of the step over all ranks, over which the loss is averaged
    rejections: number of draws that the prior rejected, by reason
    """

    step: int
    stage: str
    tables: int
    batches: list[TableBatch]
    rejections: Counter[str] = field(default_factory=Counter)

    def to(self, device: torch.device) -> StepItem:
        return StepItem(self.step, self.stage, self.tables, [b.to(device) for b in self.batches], self.rejections)


@dataclass
class StepStream:
    """The items of one rank: `steps` of a run."""

    prior: Prior
    curriculum: CurriculumConfig
    model: TabICLConfig
    seed: int
    steps: range
    rank: int = 0
    ranks: int = 1

    def __iter__(self) -> Iterator[StepItem]:
        return map(self.draw, self.steps)

    def draw(self, step: int, drawing: Callable[[int], None] = lambda table: None) -> StepItem:
        """The item of a step; `drawing` is called with the number of each table before it is drawn."""
        plan = plan_step(self.curriculum, self.model, self.seed, step)
        item = StepItem(step, plan.stage, plan.tables, [])
        for micro_batch in plan.of_rank(self.rank, self.ranks):
            tables = []
            for index in micro_batch.tables:
                drawing(index)
                tables.append(draw_table(self.prior, micro_batch, self.seed, step, index))
                item.rejections.update(tables[-1].rejections)
            item.batches += stack(tables)
        return item

    def size(self, step: int) -> int:
        """Upper bound of the bytes of a step's item: float32 features and int64 labels."""
        plan = plan_step(self.curriculum, self.model, self.seed, step)
        shares = ((len(b.tables), b.spec) for b in plan.of_rank(self.rank, self.ranks))
        return sum(tables * spec.num_rows * (4 * spec.num_features + 8) for tables, spec in shares)

    def describe(self, step: int, table: int) -> str:
        """A table's address and specification, and the command that shows it."""
        plan = plan_step(self.curriculum, self.model, self.seed, step)
        spec = next(batch.spec for batch in plan.micro_batches if table in batch.tables)
        command = f"tabicl-prior show seed={self.seed} step={step} table={table}"
        address = f"table {table} of step {step}, seed {self.seed}"
        return f"{address}: {spec} (`{command}`, with the run's settings, draws it)"


def draw_table(prior: Prior, batch: MicroBatch, seed: int, step: int, index: int) -> Table:
    """Table `index` of a step. An error of the prior gets a note with the table's address."""
    try:
        return prior.sample(batch.spec, (seed, step, index))
    except Exception as error:
        error.add_note(f"while drawing table {index} of step {step}, seed {seed}: {batch.spec}")
        raise


def stack(tables: list[Table]) -> list[TableBatch]:
    """The tables as batches of equal width: some are narrower, since constant columns are dropped."""
    by_width = defaultdict(list)
    for table in tables:
        by_width[table.X.shape[1]].append(table)
    return [
        TableBatch(torch.stack([t.X for t in group]), torch.stack([t.y for t in group]), group[0].train_size)
        for group in by_width.values()
    ]
