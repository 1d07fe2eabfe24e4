"""Which tables an optimiser step is made of, and who computes them.

Everything here is a pure function of the configuration, the run's seed and the step, so a step is the same for any
number of workers, ranks or machines, and a resumed run needs one integer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from priors import TableSpec
from priors.table import rng_at
from tabicl_train.config import CurriculumConfig, StageConfig

# Features a table may have, by its rows (spec/prior.md, part C): (more rows than, at most features).
FEATURE_CAPS = ((65_000, 10), (60_000, 15), (50_000, 20), (40_000, 30), (30_000, 40), (20_000, 60), (10_240, 80))


@dataclass(frozen=True)
class MicroBatch:
    """Tables of a step that share rows, split and width, and go through the model together.

    spec: what each of them is; `group_seed` is the address of the group
    tables: their numbers within the step; table i has the address (seed, step, i)
    """

    spec: TableSpec
    tables: tuple[int, ...]

    @property
    def cost(self) -> float:
        """Relative cost of a pass: cells go through the column and row stages, row pairs through the learner.

        The weights are the two leading terms of the matmul work of the 27.5 M-parameter model: 1.9 MFLOP a cell,
        and 4 * 512 * 12 = 25 kFLOP a (row, labelled row) pair, beside 53 MFLOP a row of the learner.
        """
        rows, cells = self.spec.num_rows, self.spec.num_rows * self.spec.num_features
        return len(self.tables) * (1.9e6 * cells + 53e6 * rows + 25e3 * rows * self.spec.train_size)


@dataclass(frozen=True)
class StepPlan:
    """An optimiser step: its stage, and the micro-batches of all ranks."""

    step: int
    stage: str
    tables: int
    micro_batches: tuple[MicroBatch, ...]

    def of_rank(self, rank: int, ranks: int) -> list[MicroBatch]:
        """The micro-batches of one rank: largest first, each to the rank with the least to do so far."""
        load = [0.0] * ranks
        mine = []
        spread = spread_over(self.micro_batches, ranks)
        for batch in sorted(spread, key=lambda b: (-b.cost, b.tables)):
            least = load.index(min(load))
            load[least] += batch.cost
            if least == rank:
                mine.append(batch)
        return mine


def spread_over(batches: tuple[MicroBatch, ...], ranks: int) -> list[MicroBatch]:
    """At least one micro-batch a rank: the largest ones are halved while there are too few."""
    batches = list(batches)
    while len(batches) < ranks:
        batches.sort(key=lambda b: (-len(b.tables), b.tables))
        largest = batches.pop(0)
        half = len(largest.tables) // 2
        batches += [replace(largest, tables=largest.tables[:half]), replace(largest, tables=largest.tables[half:])]
    return batches


def stage_at(curriculum: CurriculumConfig, step: int) -> tuple[str, StageConfig, int]:
    """Name and settings of the stage that a step (from 0) belongs to, and the step's number within it."""
    for name, stage in curriculum.stages.items():
        if step < stage.steps:
            return name, stage, step
        step -= stage.steps
    raise IndexError("the step lies beyond the last stage")


def plan_step(curriculum: CurriculumConfig, max_classes: int, seed: int, step: int) -> StepPlan:
    """The tables of a step, cut into micro-batches under the row budget."""
    name, stage, _ = stage_at(curriculum, step)
    rng = rng_at(seed, step, "step plan")
    batches = []
    for first in range(0, stage.tables, stage.group_size):
        tables = tuple(range(first, min(first + stage.group_size, stage.tables)))
        spec = replace(draw_spec(stage, max_classes, rng), group_seed=(seed, step, first))
        most = max(stage.micro_batch_rows // spec.num_rows, 1)
        for piece in np.array_split(tables, math.ceil(len(tables) / most)):  # even, no tiny remainder
            batches.append(MicroBatch(spec, tuple(int(i) for i in piece)))
    return StepPlan(step, name, stage.tables, tuple(batches))


def draw_spec(stage: StageConfig, max_classes: int, rng: np.random.Generator) -> TableSpec:
    """Rows, split and width of one group."""
    low, high = stage.rows
    if stage.row_distribution == "log_uniform":
        rows = math.floor(math.exp(rng.uniform(math.log(low), math.log(high + 1))))
    else:
        rows = int(rng.integers(low, high + 1))
    rows = min(max(rows, low), high)
    features = int(rng.integers(stage.features[0], stage.features[1] + 1))
    cap = next((cap for more_than, cap in FEATURE_CAPS if rows > more_than), features)
    train_size = min(max(round(rows * rng.uniform(*stage.train_share)), 2), rows - 2)
    # A class needs a labelled and a query row, so a small side of the split limits their number.
    return TableSpec(rows, train_size, min(features, cap), min(max_classes, train_size, rows - train_size))


def learning_rate(stage: StageConfig, step: int) -> float:
    """Learning rate of a step (from 0) within its stage: linear warm-up to the peak, then the schedule."""
    warmup = stage.warmup * stage.steps
    if step < warmup:
        return stage.learning_rate * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(stage.steps - 1 - warmup, 1)  # 0 after warm-up .. 1 at the last step
    peak, final = stage.learning_rate, stage.final_learning_rate
    match stage.schedule:
        case "cosine":
            return final + (peak - final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
        case "linear":
            return peak + (final - peak) * min(done, 1.0)
        case _:
            return peak
