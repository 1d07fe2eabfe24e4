"""Mean losses over groups of tables: by rows, in powers of two, or by classes (0 of regression, not a group)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def bucket_of(rows: int) -> int:
    """The exponent of the largest power of two that is at most the number of rows."""
    return rows.bit_length() - 1


def bucket_name(bucket: int) -> str:
    return f"{2**bucket:,}..{2 ** (bucket + 1) - 1:,}"


# By column of batches.csv: a function for the group of a table (a number), and one for the name of a group.
GROUPS: dict[str, tuple[Callable[[int], int], Callable[[int], str]]] = {
    "rows": (bucket_of, bucket_name),
    "classes": (int, str),
}


def weighted_means(keys: np.ndarray, values: np.ndarray, weights: np.ndarray) -> dict[int, float]:
    """The weighted mean of the values of each key, in ascending order of the keys; all arguments are (n,)."""
    return {int(k): float(np.average(values[keys == k], weights=weights[keys == k])) for k in np.unique(keys)}
