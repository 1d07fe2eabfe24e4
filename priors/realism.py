"""Missing values of synthetic tables, which real ones have; off by default."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from priors.options import option
from priors.random import lasting_rng, rng_at
from priors.table import Table

TIES = 1e-6  # values closer than this, in standard deviations, have random ranks
RATES = (0.02, 0.5)  # mean share of missing cells, by strength, in a column that lacks some; in blocks, at most
MECHANISMS = ("at random", "by its own value", "by another value", "in blocks")
STEEPEST = 4.0  # exponent of the rank at which the chance of a missing value rises
MOST_BLOCKS = 3


@dataclass
class Realism:
    """What synthetic tables may have in common with real ones; priors/README.md explains and shows it."""

    missing: float = option(0.0, at_least=0, at_most=1)
    """Probability that cells of a table are missing: at random, by value, or in blocks."""
    strength: float | None = option(None, at_least=0, at_most=1)
    """How many are missing, from 0 (few) to 1. Default: drawn for each table."""

    def draw_strength(self, seed: tuple[int, ...]) -> float | None:
        """Draw how strong the change of a table is; None if its cells are all there."""
        if not self.missing:
            return None
        rng = lasting_rng(seed[:-1], "realism missing", seed)
        if rng.random() >= self.missing:
            return None
        return rng.random() if self.strength is None else self.strength


def fill_missing(table: Table, strength: float, seed: tuple[int, ...]) -> tuple[np.ndarray, str]:
    """Give missing cells of a finished table the mean of their column; return bool (N, M), and a text about them."""
    X = table.X.numpy()
    missing, text = draw_missing(X, table.train_size, strength, rng_at(seed, "realism missing"))
    fill_with_means(X, missing, table.train_size)
    table.missing = float(missing.mean())
    return missing, text


def draw_missing(X: np.ndarray, train_size: int, strength: float, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Draw which cells of a table are missing.

    Parameters
    ----------
    X : ndarray
        float32 (N, M), standardized.
    train_size : int
        The first rows are labeled. Each column keeps a value among them.
    strength : float
        From 0, few cells, to 1.
    rng : numpy.random.Generator
        The source of randomness.

    Returns
    -------
    missing : ndarray
        bool (N, M).
    text : str
        How many cells are missing, and by which mechanism.
    """
    rate = between(RATES, strength)
    mechanism = MECHANISMS[rng.integers(len(MECHANISMS))]
    column_share = rng.uniform(0.2, 1.0)
    missing = np.zeros(X.shape, bool)
    if mechanism == "in blocks":
        # Adjacent rows, of some columns each.
        blocks = rng.integers(1, MOST_BLOCKS + 1)
        for _ in range(blocks):
            length = max(1, round(len(X) * rate / blocks * rng.uniform(0.5, 1.5)))
            start = rng.integers(len(X) - length + 1)
            columns = pick_columns(X.shape[1], column_share, rng)
            missing[start : start + length, columns] = True
    else:
        # Single cells of some columns, all as likely, or by the rank of their own value or of another one in their row.
        columns = pick_columns(X.shape[1], column_share, rng)
        rates = (rate * rng.uniform(0.5, 1.5, (len(columns), 1))).astype(np.float32)
        if mechanism == "by its own value":
            rates = chances(X[:, columns].T, rates, rng)
        elif mechanism == "by another value":
            drivers = rng.integers(X.shape[1], size=len(columns))
            rates = chances(X[:, drivers].T, rates, rng)
        missing[:, columns] = (rng.random((len(columns), len(X)), dtype=np.float32) < rates).T

    # A column keeps one labeled value at least.
    for column in np.flatnonzero(missing[:train_size].all(0)):
        missing[rng.integers(train_size), column] = False
    return missing, f"{missing.mean():.1%} of the cells missing {mechanism}"


def chances(values: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the chance that a value is missing, which rises or falls with the rank of another value.

    Parameters
    ----------
    values : ndarray
        float32 (K, N), those that decide, of K columns.
    rates : ndarray
        float32 (K, 1), the mean chances of the columns.
    rng : numpy.random.Generator
        The source of randomness.

    Returns
    -------
    ndarray
        float32 (K, N), rate (1 + a) rank^a, whose mean over ranks in 0..1 is the rate; at most 1, as a <= 1 / rate - 1.
    """
    places: np.ndarray = uniform_ranks(values, rng)
    falls = rng.random(rates.shape) < 0.5
    places = np.where(falls, 1 - places, places)
    exponent = np.minimum(STEEPEST, 1 / rates - 1)
    return rates * (1 + exponent) * places**exponent


def fill_with_means(X: np.ndarray, missing: np.ndarray, train_size: int) -> None:
    """Give missing cells of X (N, M), in place, the mean of the labeled rows of their column that are not missing."""
    present = ~missing[:train_size]
    sums = np.where(present, X[:train_size], 0.0).sum(0, dtype=np.float64)
    means = sums / present.sum(0)
    np.copyto(X, means.astype(X.dtype), where=missing)


def pick_columns(number: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw the indices of about this share of the columns, at least one."""
    picked = np.flatnonzero(rng.random(number) < share)
    if len(picked) == 0:
        return rng.integers(number, size=1)
    return picked


def uniform_ranks(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranks in (0, 1), float32 (K, N), within each row of standardized values (K, N); ties are broken at random."""
    order = np.argsort(values + TIES * rng.random(values.shape), axis=1)
    ranks = np.empty(values.shape, np.float32)
    places = (np.arange(values.shape[1], dtype=np.float32) + 0.5) / values.shape[1]
    np.put_along_axis(ranks, order, np.broadcast_to(places, values.shape), 1)
    return ranks


def between(bounds: tuple[float, float], strength: float) -> float:
    """The geometric interpolation between two positive numbers."""
    weak, strong = bounds
    return weak * (strong / weak) ** strength
