"""What mlp_scm and tree_scm, the priors of TabICL v1, have in common (arXiv 2502.05564, appendix).

Both draw the hyperparameters of a group from random distributions, and independent causes as the roots of their layers,
which add noise. Then the target is cut into classes, except for regression, and some columns into categories.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from priors.finish import Rejected, clamp_and_standardize_rows
from priors.random import as_seed, lasting_rng, normal_array, rng_at
from priors.table import TableSpec

CAUSE_SAMPLINGS = ("normal", "mixed", "uniform")
GROUP_ATTEMPTS = 8  # at a table with the same hyperparameters: with min_skill 0.2, 100 take 1.7 times as long
CATEGORICAL_SHARE = 0.2  # share of the tables in which some columns become categories
ORDERED_SHARE = 0.3  # share of those columns whose codes keep the order of the values
CUTS = 10  # of a target into classes, before it is rejected because a class has a single row


def group_rng(spec: TableSpec, seed: tuple[int, ...]) -> np.random.Generator:
    """Generator of the hyperparameters of a group; a table without a group is a group of its own."""
    address = seed[:-1] if spec.group_seed is None else as_seed(spec.group_seed)
    return lasting_rng(address, "group", seed, GROUP_ATTEMPTS)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def scaled_normal(rng: np.random.Generator, max_mean: float, min_mean: float) -> float:
    """Draw from a normal truncated to positive values.

    Its mean is log-uniform in min_mean..max_mean, its standard deviation log-uniform in 1 % to 100 % of the mean.
    """
    mean = log_uniform(rng, min_mean, max_mean)
    std = mean * log_uniform(rng, 0.01, 1.0)
    while True:
        draw = rng.normal(mean, std)
        if draw >= 0:
            return float(draw)


def scaled_count(rng: np.random.Generator, max_mean: float, min_mean: float, lower: int) -> int:
    """Draw `lower` plus a rounded scaled_normal."""
    return lower + round(scaled_normal(rng, max_mean, min_mean))


def choice_weights(rng: np.random.Generator, num_options: int) -> np.ndarray:
    """Draw probabilities of options: the softmax of 1 for the first one and U(-3, 5) for each of the others."""
    logits = rng.uniform(-3, 5, num_options)
    logits[0] = 1.0
    weights = np.exp(logits)
    return weights / weights.sum()


def choose(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """Draw one of the options, with choice_weights as probabilities."""
    return options[draw_index(rng, choice_weights(rng, len(options)))]


def draw_index(rng: np.random.Generator, probabilities: np.ndarray) -> int:
    """Draw an index; rng.choice takes four times as long."""
    return min(int(probabilities.cumsum().searchsorted(rng.random(), side="right")), len(probabilities) - 1)


@dataclass(frozen=True)
class Causes:
    """Independent root variables."""

    kinds: tuple[str, ...]  # "normal" or a name from SAMPLERS
    means: np.ndarray  # of normal ones
    stds: np.ndarray

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds).items())
        return f"{len(self.kinds)} causes: {kinds}"


def plan_causes(rng: np.random.Generator, number: int, sampling: str, random_moments: bool) -> Causes:
    """Draw causes; with random_moments, normal ones have a mean m ~ N(0,1) and a standard deviation |m N(0,1)|."""
    if sampling == "mixed":
        # Kinds are tried in this order; each leaves a cause to the next one with a probability of its own.
        tried = ["normal", "categorical", "zipf"]
        leave_to_next = rng.uniform(0, 0.66, 3)
        takes_cause = rng.random((3, number)) > leave_to_next[:, None]
        kinds = np.select(list(takes_cause), tried, default="uniform").tolist()
    else:
        kinds = [sampling] * number
    if random_moments:
        means = rng.standard_normal(number)
        stds = np.abs(means * rng.standard_normal(number))
    else:
        means = np.zeros(number)
        stds = np.ones(number)
    return Causes(tuple(kinds), means, stds)


def sample_causes(causes: Causes, num_rows: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw the values of causes, float32 (num_rows, number)."""
    columns = normal_array(rng, num_rows, len(causes.kinds))
    columns *= causes.stds.astype(np.float32)
    columns += causes.means.astype(np.float32)
    for j, kind in enumerate(causes.kinds):
        if kind != "normal":
            columns[:, j] = SAMPLERS[kind](rng, num_rows)
    return torch.from_numpy(columns)


def sample_categorical(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """float64 (num_rows,): 2 to 20 equidistant values with probabilities proportional to U(0,1), standardized."""
    weights = rng.random(rng.integers(2, 21))
    codes = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(num_rows))
    return (codes - codes.mean()) / max(codes.std(ddof=1), 1e-6)


def sample_zipf(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """float64 (num_rows,): Zipf with an exponent in 2..4, clipped at 10, centered."""
    values = np.minimum(rng.zipf(rng.uniform(2, 4), num_rows), 10)
    return values - values.mean()


SAMPLERS = {
    "categorical": sample_categorical,
    "zipf": sample_zipf,
    "uniform": lambda rng, num_rows: rng.random(num_rows, dtype=np.float32),
}


@dataclass(frozen=True)
class LayerNoise:
    """Gaussian noise on the outputs of a layer; if it varies, an output's standard deviation is std |N(0,1)|."""

    std: float
    varies: bool

    def __str__(self) -> str:
        if self.varies:
            return f"noise up to about {self.std:.2g}"
        return f"noise {self.std:.2g}"

    def draw_stds(self, rng: np.random.Generator, num_outputs: int) -> np.ndarray:
        """Draw the standard deviation of each output's noise, float32 (num_outputs,)."""
        stds = np.full(num_outputs, self.std, np.float32)
        if self.varies:
            stds *= np.abs(normal_array(rng, num_outputs))
        return stds


@dataclass(frozen=True)
class Category:
    """A column that becomes categories."""

    column: int
    levels: int  # at most
    order: str  # of the codes compared with the values: "ascending", "descending" or "shuffled"


@dataclass(frozen=True)
class Discretization:
    """How the numeric target becomes classes, and which columns become categories."""

    # Between classes: "rank", values of the target in random rows; "value", standard normals, for a standardized target
    boundaries: str
    num_classes: int  # 0 for a target that stays numeric
    categories: tuple[Category, ...]

    def __str__(self) -> str:
        text = "numeric target"
        if self.num_classes:
            text = f"target cut into {self.num_classes} classes by {self.boundaries}"
        if self.categories:
            columns = [f"{category.column} ({category.levels} {category.order})" for category in self.categories]
            text += f"; columns cut into categories: {', '.join(columns)}"
        return text


def plan_discretization(spec: TableSpec, seed: tuple[int, ...], boundaries: str) -> Discretization:
    """Draw the number of classes, and which columns become categories."""
    num_classes = 0
    if spec.max_classes:
        rng = lasting_rng(seed[:-1], "classes", seed)
        is_binary = rng.random() < 0.5
        num_classes = 2 if is_binary else int(rng.integers(2, spec.max_classes + 1))

    rng = rng_at(seed, "discretisation")
    categories = []
    if rng.random() < CATEGORICAL_SHARE:
        share = rng.random()
        for column in np.flatnonzero(rng.random(spec.num_features) < share):
            levels = max(2, round(rng.gamma(1, 10)))
            order = "shuffled"
            if rng.random() < ORDERED_SHARE:
                order = ("ascending", "descending")[rng.integers(2)]
            categories.append(Category(int(column), levels, order))
    return Discretization(boundaries, num_classes, tuple(categories))


def discretize(
    columns: torch.Tensor, target: torch.Tensor, plan: Discretization, seed: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cut a numeric target into classes, and some columns into categories.

    Parameters
    ----------
    columns : Tensor
        float32 (num_rows, M), which is not changed.
    target : Tensor
        float32 (num_rows,).
    plan : Discretization
        Which columns, and how.
    seed : tuple of int
        The address of the draws.

    Returns
    -------
    columns : Tensor
        float32 (num_rows, M), some as codes 0, 1, ... Shuffled ones are numbered without categories that have no rows,
        ordered ones with them, as in tabicl 2.2.0.
    target : Tensor
        int64 (num_rows,), labels 0, 1, ... of classes that have rows; or the numbers.
    num_classes : int
        How many classes there are; 0 for numbers.

    Raises
    ------
    Rejected
        See `cut_target`.
    """
    if plan.num_classes:
        labels, num_classes = cut_target(target, plan, rng_at(seed, "classes"))
        target = torch.from_numpy(labels)
    else:
        num_classes = 0
        target = target.clone()

    # Other attempts read the same values, which neither categories nor the `execute` of a plug-in may change.
    columns = columns.clone()
    if plan.categories:
        rng = rng_at(seed, "categories")
    for category in plan.categories:
        values = columns[:, category.column].numpy()
        codes = bins_of(values, random_rows(values, category.levels - 1, rng))
        if category.order == "shuffled":
            codes, present = renumber(codes, np.bincount(codes))
            codes = rng.permutation(present)[codes]
        elif category.order == "descending":
            codes = category.levels - 1 - codes
        values[:] = codes
    return columns, target, num_classes


def cut_target(target: torch.Tensor, plan: Discretization, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Cut a target (num_rows,) into labels, int64 (num_rows,), of so many classes.

    Raises
    ------
    Rejected
        - "nan": the target is not finite,
        - "one_class": it has one class only,
        - "split": a class has a single row, which cannot be on both sides of the split, however often it is cut.
    """
    values = clamp_and_standardize_rows(target.numpy()[None])[0]
    if np.isnan(values[0]):  # and so are all others
        raise Rejected("nan")
    # Of the tables with 60 to 256 rows a quarter have a class of a single row. Another cut takes a hundredth of the
    # time of another network.
    for _ in range(CUTS):
        if plan.boundaries == "rank":
            boundaries = random_rows(values, plan.num_classes - 1, rng)
        else:
            boundaries = rng.standard_normal(plan.num_classes - 1, dtype=np.float32)
        codes = bins_of(values, boundaries)
        counts = np.bincount(codes)
        if (counts == 1).any():
            continue
        labels, num_classes = renumber(codes, counts)
        if num_classes < 2:
            raise Rejected("one_class")
        return labels, num_classes
    raise Rejected("split")


def renumber(codes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, int]:
    """Number codes (num_rows,) without those that have no rows, and return how many there are; counts: their rows."""
    numbers = (counts > 0).cumsum() - 1
    return numbers[codes], int(numbers[-1]) + 1


def random_rows(values: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the values of `number` random rows, with replacement."""
    return values[rng.integers(len(values), size=number)]


def bins_of(values: np.ndarray, boundaries: np.ndarray) -> np.ndarray:
    """Count the boundaries below each value, int64 (num_rows,)."""
    return np.sort(boundaries).searchsorted(values)
