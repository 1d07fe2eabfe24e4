"""The stream of optimiser steps: one item is everything a rank computes in one step.

A worker delivers whole steps; worker w of W makes the steps start + w, start + w + W, ... so that they arrive in
order. The items depend on (seed, step) alone, so they are the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from priors import Prior, Table
from tabicl_train.config import CurriculumConfig, StreamConfig
from tabicl_train.curriculum import MicroBatch, plan_step
from tabicl_train.model.config import TabICLConfig


@dataclass
class TableBatch:
    """Tables with the same rows, split and width.

    X: float32 (B, N, M)
    y: int64 (B, N); the first train_size labels of a table are its context, the rest are to be predicted
    """

    X: Tensor
    y: Tensor
    train_size: int

    def to(self, device: torch.device) -> TableBatch:
        return TableBatch(
            self.X.to(device, non_blocking=True), self.y.to(device, non_blocking=True), self.train_size
        )

    def pin_memory(self) -> TableBatch:
        return TableBatch(self.X.pin_memory(), self.y.pin_memory(), self.train_size)


@dataclass
class StepItem:
    """One rank's share of one optimiser step.

    tables: number of tables of the step over all ranks, by which the loss is averaged
    rejections: draws that the prior threw away, by reason
    """

    step: int
    stage: str
    tables: int
    batches: list[TableBatch]
    rejections: Counter[str] = field(default_factory=Counter)

    def to(self, device: torch.device) -> StepItem:
        return StepItem(self.step, self.stage, self.tables, [b.to(device) for b in self.batches], self.rejections)

    def pin_memory(self) -> StepItem:
        batches = [b.pin_memory() for b in self.batches]
        return StepItem(self.step, self.stage, self.tables, batches, self.rejections)


class StepStream(IterableDataset):
    """The items of one rank, from a step on, to the end of the run."""

    def __init__(
        self,
        prior: Prior,
        curriculum: CurriculumConfig,
        model: TabICLConfig,
        seed: int,
        steps: range,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.prior, self.curriculum, self.model, self.seed = prior, curriculum, model, seed
        self.steps, self.rank, self.ranks = steps, rank, ranks

    def __iter__(self) -> Iterator[StepItem]:
        worker = get_worker_info()
        mine = self.steps[worker.id :: worker.num_workers] if worker else self.steps
        for step in mine:
            yield self.draw(step)

    def draw(self, step: int) -> StepItem:
        plan = plan_step(self.curriculum, self.model, self.seed, step)
        item = StepItem(step, plan.stage, plan.tables, [])
        with one_thread():
            for micro_batch in plan.of_rank(self.rank, self.ranks):
                tables = [draw_table(self.prior, micro_batch, self.seed, step, i) for i in micro_batch.tables]
                for table in tables:
                    item.rejections.update(table.rejections)
                item.batches += stack(tables)
        return item


def draw_table(prior: Prior, batch: MicroBatch, seed: int, step: int, index: int) -> Table:
    """Table `index` of a step. An error of the prior names the address that shows it again."""
    try:
        return prior.sample(batch.spec, (seed, step, index))
    except Exception as error:
        error.add_note(f"while drawing table {index} of step {step}, seed {seed}: {batch.spec}")
        raise


def stack(tables: list[Table]) -> list[TableBatch]:
    """The tables as batches of equal width: dropped constant columns leave some tables narrower."""
    by_width = defaultdict(list)
    for table in tables:
        by_width[table.X.shape[1]].append(table)
    return [
        TableBatch(torch.stack([t.X for t in same]), torch.stack([t.y for t in same]), same[0].train_size)
        for same in by_width.values()
    ]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums and decompositions round differently with two threads; a table must not depend on who draws it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def start_worker(_: int) -> None:
    """Stop signals reach the whole process group; the training process decides when its workers end."""
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)


def end_workers() -> None:
    """Kill the workers of this process: they ignore the SIGTERM by which the interpreter would end them, and it
    would wait for them forever after an exception, whose traceback keeps their loader alive."""
    for worker in multiprocessing.active_children():
        worker.kill()


def load(stream: StepStream, config: StreamConfig, pin: bool) -> DataLoader:
    """Iterates over the stream, in order, with worker processes ahead of the consumer."""
    workers = config.num_workers
    return DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=config.prefetch if workers else None,
        worker_init_fn=start_worker,
        pin_memory=pin,
    )
