"""What the two TabICL v1 priors share (arXiv 2502.05564): group draws, causes, and the way from numbers to classes.

Here columns are numpy arrays, float32 (num_rows, columns), and a group is the tables of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from scipy.special import ndtr, ndtri

from priors.finish import Rejected
from priors.table import TableSpec, rng_at

Value = TypeVar("Value")

SAMPLINGS = ("normal", "mixed", "uniform")
BOUNDARIES = ("value", "rank")
ATTEMPTS_PER_GROUP_DRAW = 20
CATEGORICAL_TABLES = 0.2  # probability that a table turns some of its columns into categories
ORDERED_CATEGORIES = 0.3  # probability that the categories of such a column keep the order of its values


def group_rng(spec: TableSpec, seed: tuple[int, ...]) -> np.random.Generator:
    """Generator of what the tables of a group share; that of the attempt itself where the spec names no group.

    Some draws for a group make dead tables only (all values infinite, say), so that a table which was rejected
    20 times goes on with the next draw for its group.
    """
    if spec.group_seed is None:
        return rng_at(seed, "group")
    return rng_at(spec.group_seed, "group", seed[-1] // ATTEMPTS_PER_GROUP_DRAW)


def draw_positive(
    rng: np.random.Generator, max_mean: float, min_mean: float, lower: float = 0, integer: bool = False
) -> float | int:
    """TNLS: lower + a normal truncated at 0, of log-uniform mean and relative deviation log-uniform in 0.01..1."""
    mean = np.exp(rng.uniform(np.log(min_mean), np.log(max_mean)))
    std = mean * np.exp(rng.uniform(np.log(0.01), 0))
    below = ndtr(-mean / std)
    value = max(0.0, mean + std * ndtri(below + (1 - below) * rng.random()))
    return int(lower) + round(value) if integer else float(lower + value)


def draw_choice(rng: np.random.Generator, values: Sequence[Value]) -> Value:
    """CHOICE: one of the values by softmax probabilities, of the logit 1 for the first and U(-3, 5) for the others."""
    weights = np.exp(np.append(1.0, rng.uniform(-3, 5, len(values) - 1)))
    return values[np.searchsorted(weights.cumsum() / weights.sum(), rng.random(), side="right")]


def draw_num_classes(rng: np.random.Generator, max_classes: int) -> int:
    """2 half of the time, else uniform in 2..max_classes."""
    return 2 if rng.random() < 0.5 else int(rng.integers(2, max_classes + 1))


def draw_causes(
    rng: np.random.Generator, num_rows: int, num_causes: int, sampling: str, own_moments: bool
) -> np.ndarray:
    """Independent columns (num_rows, num_causes).

    sampling: "normal", "uniform" in [0, 1), or "mixed", where each column is normal, categorical, Zipf or uniform
    own_moments: each normal column has a mean m ~ N(0, 1) and a deviation |m z|, z ~ N(0, 1), instead of 0 and 1
    """
    if sampling == "uniform":
        return rng.random((num_rows, num_causes), dtype=np.float32)
    causes = np.empty((num_rows, num_causes), np.float32)
    kinds = np.zeros(num_causes, int) if sampling == "normal" else draw_kinds(rng, num_causes)
    normal = np.flatnonzero(kinds == 0)
    columns = rng.standard_normal((num_rows, len(normal)), dtype=np.float32)
    if own_moments:
        means = rng.standard_normal(len(normal), dtype=np.float32)
        columns = columns * np.abs(means * rng.standard_normal(len(normal), dtype=np.float32)) + means
    causes[:, normal] = columns
    for column in np.flatnonzero(kinds == 1):
        causes[:, column] = draw_categorical(rng, num_rows)
    for column in np.flatnonzero(kinds == 2):
        causes[:, column] = draw_zipf(rng, num_rows)
    uniform = np.flatnonzero(kinds == 3)
    causes[:, uniform] = rng.random((num_rows, len(uniform)), dtype=np.float32)
    return causes


def draw_kinds(rng: np.random.Generator, num_causes: int) -> np.ndarray:
    """Kinds of mixed causes: 0 normal, 1 categorical, 2 Zipf, 3 uniform, by a table's own thresholds.

    Each kind in turn takes a column that the kinds before it left, with probability 1 - t, t ~ U(0, 0.66) per table;
    uniform is left.
    """
    thresholds = rng.uniform(0, 0.66, 3)
    taken = rng.random((num_causes, 4)) > np.append(thresholds, 0)
    return taken.argmax(1)


def draw_categorical(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """2 to 20 category indices with random probabilities, standardised; float32 (num_rows,)."""
    edges = rng.random(rng.integers(2, 21)).cumsum()
    values = np.searchsorted(edges / edges[-1], rng.random(num_rows), side="right").astype(np.float32)
    return (values - values.mean()) / (values.std() + 1e-6)


def draw_zipf(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Zipf of exponent U(2, 4), clipped at 10, centred; float32 (num_rows,)."""
    values = np.minimum(rng.zipf(rng.uniform(2, 4), num_rows), 10).astype(np.float32)
    return values - values.mean()


def classes_of(target: np.ndarray, num_classes: int, boundaries: str, rng: np.random.Generator) -> np.ndarray:
    """Labels int64 (num_rows,): how many of num_classes - 1 random boundaries lie below the target, then permuted.

    boundaries: "rank" for the values of random rows, "value" for N(0, 1) draws against the standardised target
    Raises Rejected("nan") for a target that is not finite.
    """
    if not np.isfinite(target).all():
        raise Rejected("nan")
    if boundaries == "rank":
        edges = target[rng.integers(0, len(target), num_classes - 1)]
    else:
        target = target.astype(np.float64)
        target = (target - target.mean()) / (target.std() + 1e-6)
        edges = rng.standard_normal(num_classes - 1)
    return rng.permutation(num_classes)[np.searchsorted(np.sort(edges), target, side="left")]


def categorise_columns(columns: np.ndarray, rng: np.random.Generator) -> None:
    """In one table of five, turn a share U(0, 1) of the columns (num_rows, M) into categories, in place.

    A column of K categories, K = max(2, round(Gamma(1, 10))), counts which of the values of K - 1 random rows lie
    below a value; seven columns out of ten then permute these numbers.
    """
    if rng.random() >= CATEGORICAL_TABLES:
        return
    for column in np.flatnonzero(rng.random(columns.shape[1]) < rng.random()):
        values = columns[:, column]
        num_categories = max(2, round(rng.gamma(1, 10)))
        edges = np.sort(values[rng.integers(0, len(values), num_categories - 1)])
        categories = np.searchsorted(edges, values, side="left")
        if rng.random() >= ORDERED_CATEGORIES:
            categories = rng.permutation(num_categories)[categories]
        columns[:, column] = categories
