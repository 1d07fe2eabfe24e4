"""The views that an ensemble has of a table: normalized columns in different orders, labels numbered differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.preprocessing import FunctionTransformer, QuantileTransformer, StandardScaler

from priors.finish import MIN_STD, OUTLIER_STDS  # real tables are clamped as synthetic ones are
from priors.real.yeo_johnson import YeoJohnson

TINY = 1e-150  # smaller numbers count as 0

NORM_METHODS: dict[str, Callable] = {  # from the number of labeled rows
    "none": lambda rows: FunctionTransformer(),
    "power": lambda rows: YeoJohnson(),
    "quantile": lambda rows: QuantileTransformer(n_quantiles=min(rows, 1000), output_distribution="normal"),
}


@dataclass
class View:
    """How one member of an ensemble sees a table.

    norm_method: of the columns, one of NORM_METHODS
    features: the order of the columns, int64 (features,)
    shift: added to every label that is a class, modulo the number of classes
    """

    norm_method: str
    features: np.ndarray
    shift: int


def draw_views(
    rng: np.random.RandomState, count: int, norm_methods: Sequence[str], num_features: int, num_classes: int
) -> list[View]:
    """`count` views; the first one has the columns and labels as they are, and the methods take turns.

    num_classes: 0 if the labels are numbers, which are not shifted
    """
    shifts = np.append(0, 1 + rng.permutation(max(num_classes - 1, 0)))
    views = []
    for i in range(count):
        turn, method = divmod(i, len(norm_methods))
        features = rng.permutation(num_features) if i else np.arange(num_features)
        views.append(View(norm_methods[method], features, int(shifts[turn % len(shifts)])))
    return views


class Normalizer:
    """Shapes columns by one of NORM_METHODS, clamps outliers, and gives them zero mean and unit variance."""

    def __init__(self, method: str):
        self.method = method

    def fit(self, numbers: np.ndarray) -> Normalizer:
        """numbers: float64 (labeled rows, features), NaN where missing; each column has a value that is not"""
        self.scaler = StandardScaler().fit(without_tiny(numbers))
        scaled = self.scaler.transform(without_tiny(numbers))
        self.shaper = NORM_METHODS[self.method](len(numbers)).fit(scaled)
        shaped = self.shaper.transform(scaled)
        inside = np.abs(shaped - np.nanmean(shaped, axis=0)) <= OUTLIER_STDS * np.nanstd(shaped, axis=0)
        mean = shaped.mean(axis=0, where=inside)
        bound = OUTLIER_STDS * np.maximum(shaped.std(axis=0, where=inside), MIN_STD)
        self.low, self.high = mean - bound, mean + bound
        clamped = shaped.clip(self.low, self.high)
        self.mean, self.std = np.nanmean(clamped, axis=0), np.maximum(np.nanstd(clamped, axis=0), MIN_STD)
        return self

    def transform(self, numbers: np.ndarray) -> np.ndarray:
        """float64 (rows, features) -> float32 (rows, features); NaN stays NaN"""
        shaped = self.shaper.transform(self.scaler.transform(without_tiny(numbers))).clip(self.low, self.high)
        return ((shaped - self.mean) / self.std).astype(np.float32)


def without_tiny(numbers: np.ndarray) -> np.ndarray:
    """Numbers whose squares underflow become 0: a column of them would have no variance, yet different values."""
    return np.where(np.abs(numbers) < TINY, 0.0, numbers)
