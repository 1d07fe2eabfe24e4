"""What a synthetic table is, and the address it is drawn from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from priors.random import Seed

MIN_ROWS = 10

MAX_CLASSES = 10


class PriorError(ValueError):
    """A request that a prior cannot serve; the message is for the person who made it."""


@dataclass(frozen=True)
class TableSpec:
    """What is asked of a prior.

    num_rows: rows of the table, labelled and query rows together
    train_size: labelled rows, the first ones
    num_features: columns drawn; constant ones are dropped afterwards
    max_classes: labels are drawn from 2..max_classes classes
    group_seed: address of the hyper-parameters that the tables of one micro-batch group share, in the priors
        that have such (mlp_scm, tree_scm); by default the table's own address
    """

    num_rows: int
    train_size: int
    num_features: int
    max_classes: int = MAX_CLASSES
    group_seed: Seed | None = None

    def problems(self) -> list[str]:
        found = []
        if self.num_rows < MIN_ROWS:
            found.append(f"num_rows is {self.num_rows}; at least {MIN_ROWS} are needed")
        if not 1 <= self.train_size < self.num_rows:
            found.append(f"train_size is {self.train_size}; it must lie in 1..num_rows-1 = 1..{self.num_rows - 1}")
        if self.num_features < 1:
            found.append(f"num_features is {self.num_features}; at least 1 is needed")
        if not 2 <= self.max_classes <= MAX_CLASSES:
            found.append(f"max_classes is {self.max_classes}; it must lie in 2..{MAX_CLASSES}")
        elif self.max_classes > min(self.train_size, self.num_rows - self.train_size):
            found.append(
                f"max_classes is {self.max_classes}, but each class needs a labelled and a query row "
                f"({self.train_size} labelled, {self.num_rows - self.train_size} query rows)"
            )
        return found

    def check(self) -> None:
        if found := self.problems():
            raise PriorError("impossible table: " + "; ".join(found))


@dataclass
class Table:
    """A finished table: standardised features, labels, split.

    X: float32 (num_rows, M) with M <= num_features, since constant columns are dropped
    y: int64 (num_rows,), labels in 0..num_classes-1; a label may be absent, the same ones in both parts
    train_size: the first rows, whose labels are the context
    num_classes: cardinality drawn for the target
    plan: the prior's description of the table; str(plan) reads as text
    rejections: draws thrown away before this one, by reason
    """

    X: torch.Tensor
    y: torch.Tensor
    train_size: int
    num_classes: int
    plan: Any = None
    rejections: Counter[str] = field(default_factory=Counter)
