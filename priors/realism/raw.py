"""A raw table, which the changes of this folder alter in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TIES = 1e-6  # values closer than this, in standard deviations, have random ranks


@dataclass
class Raw:
    """Columns and target as a prior computes them, and what the finished table needs.

    columns: float32 (N, M)
    target: (N,), labels int64 in 0..num_classes-1, or numbers float32 if num_classes is 0
    num_rows: of the finished table, N or fewer
    train_size: of them, the labeled ones, which come first
    """

    columns: np.ndarray
    target: np.ndarray
    num_classes: int
    num_rows: int
    train_size: int

    def take(self, rows: np.ndarray) -> None:
        """Keep these rows, in this order."""
        self.columns, self.target = self.columns[rows], self.target[rows]


def some_columns(number: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Indices of about this share of the columns, at least one."""
    picked = np.flatnonzero(rng.random(number) < share)
    return picked if len(picked) else rng.integers(number, size=1)


def ranks(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranks in (0, 1), float32 (K, N), within each row of standardized values (K, N); ties are broken at random."""
    order = np.argsort(values + TIES * rng.random(values.shape), axis=1)
    ranks = np.empty(values.shape, np.float32)
    places = (np.arange(values.shape[1], dtype=np.float32) + 0.5) / values.shape[1]
    np.put_along_axis(ranks, order, np.broadcast_to(places, values.shape), 1)
    return ranks
