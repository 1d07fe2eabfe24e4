"""From raw columns and target to a training table: steps that priors share (TabICLv2, arXiv 2602.11139)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from priors.table import Table

OUTLIER_STDS = 4.0  # values farther from the mean are clamped, in standard deviations
MIN_STD = 1e-6  # a smaller standard deviation counts as this
CLIP = 100.0  # bound of the standardized values
SPLIT_ATTEMPTS = 10  # permutations of the rows


class Rejected(Exception):
    """A draw that cannot become a table; reason: one word, under which the draw is counted."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def finish(
    columns: torch.Tensor, target: torch.Tensor, num_classes: int, train_size: int, rng: np.random.Generator
) -> Table:
    """Make a table of raw columns and a raw target.

    Features and numeric targets are clamped and standardized over all rows, and constant features are dropped. Features
    and classes are permuted; rows are permuted only if labeled and query rows would otherwise hold different classes.

    Raises
    ------
    Rejected
        - "split": no permutation of the rows helps,
        - "target": a numeric target is constant or not finite,
        - "nan": a feature is not finite,
        - "constant": all features are constant.
    """
    feature_order = rng.permutation(columns.shape[1])
    # The target and the order of the rows first, since many tables are rejected for their labels.
    rows = None
    if num_classes == 0:
        y = standardize_target(target)
    else:
        labels = target.numpy()
        class_order = rng.permutation(num_classes)
        rows = split_rows(labels, num_classes, train_size, rng)
        y = torch.from_numpy(class_order[labels])

    # The features. A column with a value that is not finite is NaN throughout.
    features = clamp_and_standardize_rows(columns.T.numpy())  # (M, N)
    if np.isnan(features[:, 0]).any():
        raise Rejected("nan")
    varies = (features != features[:, :1]).any(1)
    kept = feature_order[varies[feature_order]]
    if len(kept) == 0:
        raise Rejected("constant")

    # The table.
    X = torch.from_numpy(features[kept].T.copy())  # (N, M)
    if rows is not None:
        row_order = torch.from_numpy(rows)
        X = X[row_order]
        y = y[row_order]
    return Table(X=X, y=y, train_size=train_size, num_classes=num_classes)


def split_rows(labels: np.ndarray, num_classes: int, train_size: int, rng: np.random.Generator) -> np.ndarray | None:
    """Find an order of the rows in which labeled and query rows hold the same classes, at least two of them."""
    # Returns None if the rows can stay in order. Raises Rejected("split") if none of 10 permutations is valid.
    counts = np.bincount(labels)
    # The class of a single row cannot be on both sides, so no permutation needs to be tried.
    if (counts == 1).any() or np.count_nonzero(counts) < 2:
        raise Rejected("split")
    if is_valid_split(labels, num_classes, train_size):
        return None
    rows = other_split(labels, num_classes, train_size, rng)
    if rows is None:
        raise Rejected("split")
    return rows


def is_valid_split(labels: np.ndarray, num_classes: int, train_size: int) -> bool:
    """Whether the first train_size labels and the others hold the same classes, at least two of them."""
    in_train = np.bincount(labels[:train_size], minlength=num_classes) > 0
    in_query = np.bincount(labels[train_size:], minlength=num_classes) > 0
    return bool(np.array_equal(in_train, in_query) and np.count_nonzero(in_train) >= 2)


def standardize_target(target: torch.Tensor) -> torch.Tensor:
    """Clamp outliers of numbers (N,), and standardize them to mean 0 and variance 1 (ddof 1), float32."""
    # They are standardized before clamping too, since some targets of graph_scm have a standard deviation below
    # MIN_STD, and after it, since clamping changes the variance if one value is very common. Raises Rejected("target")
    # if the numbers are constant or not finite.
    clamped = clamp_and_standardize(unit_variance(target.double()).float()[:, None])[:, 0]
    y = unit_variance(clamped.double()).float()
    # The variance of a constant is 0.
    if not y.isfinite().all():
        raise Rejected("target")
    return y


def unit_variance(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / x.std()


def clamp_and_standardize(columns: torch.Tensor) -> torch.Tensor:
    """Clamp outliers of columns float32 (N, M), and standardize them to mean 0 and variance 1, within +-100."""
    return torch.from_numpy(clamp_and_standardize_rows(columns.T.numpy())).T


def clamp_and_standardize_rows(rows: np.ndarray) -> np.ndarray:
    """Do the same with the columns of a table as rows, float32 (M, N); they are copied."""
    # A column with a value that is not finite becomes NaN. Moments are computed in float64: raw columns reach 1e30,
    # whose squares overflow float32, and a standard deviation that is small beside the mean would be lost to rounding.
    from priors.floats import clamp_and_standardize_columns

    return clamp_and_standardize_columns(np.ascontiguousarray(rows), OUTLIER_STDS, MIN_STD, CLIP)


def use_again(table: Table, rng: np.random.Generator) -> Table:
    """Return a table with other permutations of its columns, rows and classes, for another pass of stored tables."""
    # Rows are permuted as a whole, so that others are labeled, unless no permutation leaves the same classes in both
    # parts, or cells that were missing hold the mean of the labeled rows.
    columns = torch.from_numpy(rng.permutation(table.X.shape[1]))
    y = table.y
    if table.num_classes:
        y = torch.from_numpy(rng.permutation(table.num_classes))[y]
    is_filled = table.missing > 0 and not table.X.isnan().any()
    rows = None if is_filled else other_split(y.numpy(), table.num_classes, table.train_size, rng)
    if rows is None:
        queries = len(y) - table.train_size
        rows = np.concatenate([rng.permutation(table.train_size), table.train_size + rng.permutation(queries)])
    order = torch.from_numpy(rows)
    return replace(table, X=table.X[order][:, columns].contiguous(), y=y[order])


def other_split(labels: np.ndarray, num_classes: int, train_size: int, rng: np.random.Generator) -> np.ndarray | None:
    """Find a permutation of the rows that is a valid split, as any is of numbers; None if none of 10 is."""
    for _ in range(SPLIT_ATTEMPTS):
        rows = rng.permutation(len(labels))
        if num_classes == 0 or is_valid_split(labels[rows], num_classes, train_size):
            return rows
    return None
