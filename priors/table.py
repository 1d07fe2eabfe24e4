"""What is asked of a prior, and the table it returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from priors.errors import MIN_ROWS, PriorError
from priors.random import Seed

__all__ = ["MAX_CLASSES", "MIN_ROWS", "Largest", "PriorError", "Source", "Table", "TableSpec"]

MAX_CLASSES = 10


Source: TypeAlias = tuple[str, str]  # name of the prior in a mixture or alone, and path of the real table, or ""


@dataclass(frozen=True)
class TableSpec:
    """A request to a prior: sizes, classes and split of the table to draw.

    Attributes
    ----------
    num_rows : int
        Labeled and query rows together, at least 10.
    train_size : int
        Labeled rows, which come first.
    num_features : int
        Columns to draw; constant ones are dropped afterward.
    max_classes : int
        The number of classes is drawn from 2..max_classes, at most 10; 0 for a numeric target (regression).
    group_seed : int, tuple of int, or None
        Address of the hyperparameters that the tables of a group of a step share, in priors that have them (mlp_scm,
        tree_scm, mix_scm); by default the table's own address.
    mix : tuple
        Shares of the components of a mixture, as (name, share) in the order of their names; () for its own weights.
    keeps_missing : bool
        Whether missing cells are NaN, instead of the mean of their column over the labeled rows.
    """

    num_rows: int
    train_size: int
    num_features: int
    max_classes: int = MAX_CLASSES
    group_seed: Seed | None = None
    mix: tuple[tuple[str, float], ...] = ()
    keeps_missing: bool = False

    def problems(self) -> list[str]:
        """Return everything that makes the table impossible."""
        problems = []
        if self.num_rows < MIN_ROWS:
            problems.append(f"num_rows is {self.num_rows}; at least {MIN_ROWS} are needed")
        if not 1 <= self.train_size < self.num_rows:
            problems.append(f"train_size is {self.train_size}; it must lie in 1..num_rows-1 = 1..{self.num_rows - 1}")
        if self.num_features < 1:
            problems.append(f"num_features is {self.num_features}; at least 1 is needed")
        if self.max_classes != 0 and not 2 <= self.max_classes <= MAX_CLASSES:
            problems.append(
                f"max_classes is {self.max_classes}; it must lie in 2..{MAX_CLASSES}, or be 0 for a numeric target"
            )
        elif self.max_classes > min(self.train_size, self.num_rows - self.train_size):
            problems.append(
                f"max_classes is {self.max_classes}, but each class needs a labeled and a query row "
                f"({self.train_size} labeled, {self.num_rows - self.train_size} query rows)"
            )
        return problems

    def check_sizes(self, X: torch.Tensor, y: torch.Tensor, train_size: int, prior: object) -> None:
        """Raise PriorError if what a prior has drawn has other sizes: the network would read other rows or labels."""
        N, n, M = self.num_rows, self.train_size, self.num_features
        if len(X) == N and X.ndim == 2 and 1 <= X.shape[1] <= M and y.shape == (N,) and train_size == n:
            return
        found = f"features {tuple(X.shape)}, a target {tuple(y.shape)} and {train_size} labeled rows"
        asked = f"it was asked for features ({N}, {M}), some of which may be missing, and {n} labeled rows"
        raise PriorError(f"the prior {type(prior).__name__} has drawn {found}; {asked}")

    def check(self) -> None:
        """Raise PriorError with all problems."""
        if problems := self.problems():
            raise PriorError("impossible table: " + "; ".join(problems))


class Largest(NamedTuple):
    """The largest sizes of the tables that a prior can draw; None where it draws as large ones as it is asked for."""

    rows: int | None = None
    features: int | None = None
    classes: int | None = None


@dataclass
class Table:
    """A finished table: standardized features, target, split.

    Attributes
    ----------
    X : torch.Tensor
        Float32 (num_rows, M) with M <= num_features, since constant columns are dropped; NaN in missing cells if the
        spec asks for it.
    y : torch.Tensor
        Int64 (num_rows,), labels in 0..num_classes-1; some may be absent, the same ones among labeled and query rows.
        With a numeric target, float32 (num_rows,) of mean 0 and variance 1 over all rows.
    train_size : int
        Labeled rows, which come first.
    num_classes : int
        Cardinality drawn for the target; 0 if it is numeric.
    plan : Any
        The prior's description of the table; ``str(plan)`` is its text.
    rejections : Counter
        Number of rejected draws before this one, by reason.
    source : tuple or None
        Where it comes from, if it is a real table or of a mixture.
    missing : float
        Share of the cells that are missing, or were and are filled.
    """

    X: torch.Tensor
    y: torch.Tensor
    train_size: int
    num_classes: int
    plan: Any = None
    rejections: Counter[str] = field(default_factory=Counter)
    source: Source | None = None
    missing: float = 0.0
