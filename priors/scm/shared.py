"""What mlp_scm and tree_scm, the priors of TabICL v1 (arXiv 2502.05564, appendix), share.

Hyper-parameters are drawn once per micro-batch group, from distributions that are drawn themselves. Causes feed the
model; its real-valued target becomes classes, and some of its columns become categories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from priors.finish import Rejected, standardise
from priors.random import Seed, as_seed, normals, rng_at
from priors.table import TableSpec

CAUSE_SAMPLINGS = ("normal", "mixed", "uniform")
CATEGORICAL_SHARE = 0.2  # of the tables turn some columns into categories
ORDERED_SHARE = 0.3  # of those columns keep the order of the values in their codes
ATTEMPTS = 100


def lasting_rng(address: Seed, name: str, seed: tuple[int, ...]) -> np.random.Generator:
    """Generator at an address that is the same for 100 attempts at a table; `seed` is the one Prior.plan gets.

    A rejected table is drawn again with the same hyper-parameters and number of classes, as in tabicl 2.2.0: else
    what is rejected often would be rare. But some hyper-parameters make dead tables only, and end after 100.
    """
    return rng_at(address, name, seed[-1] // ATTEMPTS)


def group_rng(spec: TableSpec, seed: tuple[int, ...]) -> np.random.Generator:
    """Generator of the hyper-parameters of a group; a table without a group is its own."""
    return lasting_rng(seed[:-1] if spec.group_seed is None else as_seed(spec.group_seed), "group", seed)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def scaled_normal(rng: np.random.Generator, max_mean: float, min_mean: float) -> float:
    """Normal truncated to positive values, its mean log-uniform, its standard deviation 1 % to 100 % of the mean."""
    mean = log_uniform(rng, min_mean, max_mean)
    std = mean * log_uniform(rng, 0.01, 1.0)
    while (draw := rng.normal(mean, std)) < 0:
        pass
    return float(draw)


def scaled_count(rng: np.random.Generator, max_mean: float, min_mean: float, lower: int) -> int:
    """`lower` plus a rounded scaled_normal."""
    return lower + round(scaled_normal(rng, max_mean, min_mean))


def choice_weights(rng: np.random.Generator, num_options: int) -> np.ndarray:
    """Probabilities of a choice: the softmax of 1 for the first option and U(-3, 5) for each of the others."""
    logits = np.append(1.0, rng.uniform(-3, 5, num_options - 1))
    weights = np.exp(logits)
    return weights / weights.sum()


def choose(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """One of the options, with choice_weights."""
    return options[rng.choice(len(options), p=choice_weights(rng, len(options)))]


@dataclass(frozen=True)
class Causes:
    """Independent root variables: one of CAUSE kinds each, the normal ones with a mean and a standard deviation."""

    kinds: tuple[str, ...]
    means: np.ndarray
    stds: np.ndarray

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds).items())
        return f"{len(self.kinds)} causes: {kinds}"


def plan_causes(rng: np.random.Generator, number: int, sampling: str, random_moments: bool) -> Causes:
    """`sampling`: one of CAUSE_SAMPLINGS; `random_moments`: normal causes have a mean m ~ N(0,1), std |m N(0,1)|."""
    if sampling == "mixed":
        # each of the first three kinds passes a cause on to the next with its own probability of the table
        normal, categorical, zipf = rng.uniform(0, 0.66, 3)
        draws = rng.random((3, number))
        kinds = np.select(
            [draws[0] > normal, draws[1] > categorical, draws[2] > zipf], ["normal", "categorical", "zipf"], "uniform"
        ).tolist()
    else:
        kinds = [sampling] * number
    means, stds = np.zeros(number), np.ones(number)
    if random_moments:
        means = rng.standard_normal(number)
        stds = np.abs(means * rng.standard_normal(number))
    return Causes(tuple(kinds), means, stds)


def sample_causes(causes: Causes, num_rows: int, rng: np.random.Generator) -> torch.Tensor:
    """Causes, float32 (num_rows, number)."""
    columns = normals(rng, num_rows, len(causes.kinds))
    columns *= torch.from_numpy(causes.stds.astype(np.float32))
    columns += torch.from_numpy(causes.means.astype(np.float32))
    for j, kind in enumerate(causes.kinds):
        if kind != "normal":
            columns[:, j] = torch.from_numpy(ROOT_SAMPLERS[kind](rng, num_rows))
    return columns


def sample_categorical(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """2 to 20 equidistant values with probabilities proportional to U(0,1), standardised."""
    weights = rng.random(rng.integers(2, 21))
    codes = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(num_rows))
    return (codes - codes.mean()) / max(codes.std(ddof=1), 1e-6)


def sample_zipf(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Zipf with an exponent in 2..4, clipped at 10, centred."""
    values = np.minimum(rng.zipf(rng.uniform(2, 4), num_rows), 10)
    return values - values.mean()


def sample_uniform(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    return rng.random(num_rows, dtype=np.float32)


ROOT_SAMPLERS = {"categorical": sample_categorical, "zipf": sample_zipf, "uniform": sample_uniform}


@dataclass(frozen=True)
class Category:
    """A column that becomes categorical; order is "ascending", "descending" or "shuffled"."""

    column: int
    levels: int
    order: str


@dataclass(frozen=True)
class Discretisation:
    """How a real target becomes classes, and which columns become categories.

    boundaries: "rank", the target's values in random rows, or "value", standard normal draws against the
        standardised target
    """

    boundaries: str
    num_classes: int
    categories: tuple[Category, ...]

    def __str__(self) -> str:
        text = f"target cut into {self.num_classes} classes by {self.boundaries}"
        if self.categories:
            text += "; columns cut into categories: " + ", ".join(
                f"{category.column} ({category.levels} {category.order})" for category in self.categories
            )
        return text


def plan_discretisation(spec: TableSpec, seed: tuple[int, ...], boundaries: str) -> Discretisation:
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
    return Discretisation(boundaries, num_classes, tuple(categories))


def discretise(
    columns: torch.Tensor, target: torch.Tensor, plan: Discretisation, seed: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Columns (num_rows, M) with categories in place, labels of the target (num_rows,), number of classes found.

    Neither classes nor shuffled categories that no row falls into count, while the codes of ordered categories keep
    the gap, as in tabicl 2.2.0. Raises Rejected where a single one is left.
    """
    rng = rng_at(seed, "categories")
    for category in plan.categories:
        values = columns[:, category.column]
        codes = cut(values, random_rows(values, category.levels - 1, rng))
        if category.order == "shuffled":
            found, codes = codes.unique(return_inverse=True)
            codes = torch.from_numpy(rng.permutation(len(found)))[codes]
        elif category.order == "descending":
            codes = category.levels - 1 - codes
        columns[:, category.column] = codes.to(columns.dtype)

    rng = rng_at(seed, "classes")
    target = standardise(target[:, None])[:, 0]
    if target.isnan().any():
        raise Rejected("nan")
    if plan.boundaries == "rank":
        boundaries = random_rows(target, plan.num_classes - 1, rng)
    else:
        boundaries = normals(rng, plan.num_classes - 1)
    found, labels = cut(target, boundaries).unique(return_inverse=True)
    if len(found) < 2:
        raise Rejected("one_class")
    return columns, labels, len(found)


def random_rows(values: torch.Tensor, number: int, rng: np.random.Generator) -> torch.Tensor:
    """The values of random rows, drawn with replacement."""
    return values[torch.from_numpy(rng.integers(len(values), size=number))]


def cut(values: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """How many boundaries each value exceeds."""
    return torch.searchsorted(boundaries.sort().values, values.contiguous())
