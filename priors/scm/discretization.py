"""The real target becomes classes, unless it is to stay numeric, and some columns become categories.

Shared by mlp_scm and tree_scm (TabICL, arXiv 2502.05564, appendix).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.finish import Rejected, clamp_and_standardize
from priors.random import lasting_rng, normals, rng_at
from priors.table import TableSpec

CATEGORICAL_SHARE = 0.2  # share of the tables in which some columns become categories
ORDERED_SHARE = 0.3  # share of those columns whose codes keep the order of the values


@dataclass(frozen=True)
class Category:
    """A column that gets at most so many levels, "ascending", "descending" or "shuffled" with its values."""

    column: int
    levels: int
    order: str


@dataclass(frozen=True)
class Discretization:
    """How the real target becomes classes, and which columns become categories.

    boundaries: between classes: "rank", the target's values in random rows, or "value", standard normal draws with
        which the standardized target is compared
    num_classes: 0 for a target that stays numeric
    """

    boundaries: str
    num_classes: int
    categories: tuple[Category, ...]

    def __str__(self) -> str:
        text = "numeric target"
        if self.num_classes:
            text = f"target cut into {self.num_classes} classes by {self.boundaries}"
        if self.categories:
            text += "; columns cut into categories: " + ", ".join(
                f"{category.column} ({category.levels} {category.order})" for category in self.categories
            )
        return text


def plan_discretization(spec: TableSpec, seed: tuple[int, ...], boundaries: str) -> Discretization:
    num_classes = 0
    if spec.max_classes:
        rng = lasting_rng(seed[:-1], "classes", seed)
        num_classes = 2 if rng.random() < 0.5 else int(rng.integers(2, spec.max_classes + 1))
    rng = rng_at(seed, "discretisation")
    categories = []
    if rng.random() < CATEGORICAL_SHARE:
        share = rng.random()
        for column in np.flatnonzero(rng.random(spec.num_features) < share):
            levels = max(2, round(rng.gamma(1, 10)))
            order = ("ascending", "descending")[rng.integers(2)] if rng.random() < ORDERED_SHARE else "shuffled"
            categories.append(Category(int(column), levels, order))
    return Discretization(boundaries, num_classes, tuple(categories))


def discretize(
    columns: torch.Tensor, target: torch.Tensor, plan: Discretization, seed: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Columns (num_rows, M) with codes in the categorical ones, labels int64 (num_rows,), number of non-empty classes.

    Columns are changed in place. Classes and shuffled categories without rows are left out of the numbering; the codes
    of ordered categories keep the gaps, as in tabicl 2.2.0.
    """
    rng = rng_at(seed, "categories")
    for category in plan.categories:
        values = columns[:, category.column]
        codes = cut(values, random_rows(values, category.levels - 1, rng))
        if category.order == "shuffled":
            present, codes = codes.unique(return_inverse=True)
            codes = torch.from_numpy(rng.permutation(len(present)))[codes]
        elif category.order == "descending":
            codes = category.levels - 1 - codes
        columns[:, category.column] = codes.to(columns.dtype)

    if plan.num_classes == 0:
        return columns, target, 0
    rng = rng_at(seed, "classes")
    target = clamp_and_standardize(target[:, None])[:, 0]
    if target.isnan().any():
        raise Rejected("nan")
    if plan.boundaries == "rank":
        boundaries = random_rows(target, plan.num_classes - 1, rng)
    else:
        boundaries = normals(rng, plan.num_classes - 1)
    present, labels = cut(target, boundaries).unique(return_inverse=True)
    if len(present) < 2:
        raise Rejected("one_class")
    return columns, labels, len(present)


def random_rows(values: torch.Tensor, number: int, rng: np.random.Generator) -> torch.Tensor:
    """The values in `number` random rows, drawn with replacement."""
    return values[torch.from_numpy(rng.integers(len(values), size=number))]


def cut(values: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """The number of boundaries below each value, int64 (num_rows,)."""
    return torch.searchsorted(boundaries.sort().values, values.contiguous())
