"""Missing cells of a finished table."""

from __future__ import annotations

import numpy as np

from priors.realism.raw import ranks, some_columns

LOWEST_RATE, HIGHEST_RATE = 0.02, 0.5  # mean share of missing cells in a column with gaps, by strength; blocks: at most
MECHANISMS = ("at random", "by its own value", "by another value", "in blocks")
STEEPEST = 4.0  # exponent of the rank at which the chance of a gap rises
MOST_BLOCKS = 3


def draw_gaps(X: np.ndarray, train_size: int, strength: float, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Which cells of X (N, M) are missing, bool (N, M), and a text about them.

    Each column has a labeled row, one of the first train_size, that is not missing.
    """
    rate = LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** strength
    mechanism = MECHANISMS[rng.integers(len(MECHANISMS))]
    column_share = rng.uniform(0.2, 1.0)
    gaps = np.zeros(X.shape, bool)
    if mechanism == "in blocks":
        blocks = rng.integers(1, MOST_BLOCKS + 1)
        for _ in range(blocks):
            length = max(1, round(len(X) * rate / blocks * rng.uniform(0.5, 1.5)))
            start = rng.integers(len(X) - length + 1)
            gaps[start : start + length, some_columns(X.shape[1], column_share, rng)] = True
    else:
        columns = some_columns(X.shape[1], column_share, rng)
        rates = (rate * rng.uniform(0.5, 1.5, (len(columns), 1))).astype(np.float32)
        if mechanism != "at random":
            drivers = columns if mechanism == "by its own value" else rng.integers(X.shape[1], size=len(columns))
            rates = chances(X[:, drivers].T, rates, rng)
        gaps[:, columns] = (rng.random((len(columns), len(X)), dtype=np.float32) < rates).T
    for column in np.flatnonzero(gaps[:train_size].all(0)):
        gaps[rng.integers(train_size), column] = False
    return gaps, f"{gaps.mean():.1%} of the cells missing {mechanism}"


def chances(values: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Chance of a gap (K, N) that rises, or falls, with the rank of values (K, N), and is rates (K, 1) on average."""
    places = ranks(values, rng)
    falls = rng.random(rates.shape) < 0.5
    places = np.where(falls, 1 - places, places)
    exponent = np.minimum(STEEPEST, 1 / rates - 1)
    return rates * (1 + exponent) * places**exponent


def fill(X: np.ndarray, gaps: np.ndarray, train_size: int) -> None:
    """Give missing cells of X (N, M), in place, the mean of the labeled rows of their column that are not missing."""
    known = ~gaps[:train_size]
    means = np.where(known, X[:train_size], 0.0).sum(0, dtype=np.float64) / known.sum(0)
    np.copyto(X, means.astype(X.dtype), where=gaps)
