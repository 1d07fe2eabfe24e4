"""From raw columns and labels to a training table: the steps that all priors share (TabICLv2, arXiv 2602.11139)."""

from __future__ import annotations

import numpy as np
import torch

from priors.table import Table

OUTLIER_STDS = 4.0
CLIP = 100.0
MIN_STD = 1e-6
SPLIT_ATTEMPTS = 10


class Rejected(Exception):
    """A draw that makes no table; `reason` is one word."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def finish(
    columns: torch.Tensor, labels: torch.Tensor, num_classes: int, train_size: int, rng: np.random.Generator
) -> Table:
    """The table made of raw columns float32 (num_rows, num_features) and labels int64 (num_rows,) in 0..num_classes-1.

    Outliers are clamped and features standardised over all rows, constant features dropped; features and classes
    are permuted; rows are permuted only where labelled and query rows would hold different classes.
    Raises Rejected: "split", "nan" (an infinity among the values is one too) or "constant".
    """
    feature_order = rng.permutation(columns.shape[1])
    class_order = torch.from_numpy(rng.permutation(num_classes)).to(labels.device)
    rows = split_rows(labels.cpu().numpy(), num_classes, train_size, rng)

    features = standardise(columns).T  # (M, N)
    if features.isnan().any():
        raise Rejected("nan")
    varies = (features != features[:, :1]).any(1).cpu().numpy()
    kept = feature_order[varies[feature_order]]
    if len(kept) == 0:
        raise Rejected("constant")
    X, y = features[torch.from_numpy(kept).to(features.device)].T.contiguous(), class_order[labels]  # (N, M), (N,)
    if rows is not None:
        rows = torch.from_numpy(rows).to(X.device)
        X, y = X[rows], y[rows]
    return Table(X=X, y=y, train_size=train_size, num_classes=num_classes)


def split_rows(labels: np.ndarray, num_classes: int, train_size: int, rng: np.random.Generator) -> np.ndarray | None:
    """An order of the rows in which labelled and query rows hold the same classes, at least two of them.

    None where the order as it is will do. Raises Rejected where none of 10 permutations does.
    """
    rows = None
    for _ in range(1 + SPLIT_ATTEMPTS):
        ordered = labels if rows is None else labels[rows]
        in_train = np.bincount(ordered[:train_size], minlength=num_classes) > 0
        in_query = np.bincount(ordered[train_size:], minlength=num_classes) > 0
        if in_train.sum() >= 2 and (in_train == in_query).all():
            return rows
        rows = rng.permutation(len(labels))
    raise Rejected("split")


def standardise(columns: torch.Tensor) -> torch.Tensor:
    """Columns (N, M) with outliers clamped, zero mean and unit variance, within +-100; NaN where a value is not finite.

    Moments are taken in float64: raw columns reach 1e30, whose squares overflow float32, and a large offset
    beside a small spread loses it.
    """
    if columns.is_cuda:
        return standardise_torch(columns)
    from priors.moments import standardise_columns

    return torch.from_numpy(standardise_columns(columns.T.contiguous().numpy(), OUTLIER_STDS, MIN_STD, CLIP)).T


def standardise_torch(columns: torch.Tensor) -> torch.Tensor:
    """The same for CUDA."""
    x = columns.double()
    deviation = x - x.mean(0)
    inside = deviation.abs() <= OUTLIER_STDS * deviation.square().sum(0).div(len(x) - 1).sqrt()
    count = inside.sum(0)
    mean = (x * inside).sum(0) / count
    variance = ((x - mean) * inside).square().sum(0) / (count - 1)
    # A value held by 1 row in 17 or fewer counts as an outlier. The least deviation keeps its column from becoming
    # constant: it comes out at +-4, with a standard deviation below one, as in the released generator (measured).
    bound = OUTLIER_STDS * variance.sqrt().clamp(min=MIN_STD)
    x = x.clamp(mean - bound, mean + bound)
    deviation = x - x.mean(0)
    std = deviation.square().sum(0).div(len(x) - 1).sqrt().clamp(min=MIN_STD)
    return (deviation / std).clamp(-CLIP, CLIP).float()
