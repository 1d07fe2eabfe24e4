"""A pretrained network as a scikit-learn regressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_consistent_length, column_or_1d
from torch import Tensor

from tabicl_train.prediction.ensemble import Ensemble
from tabicl_train.prediction.predict import quantile_parts

TAIL = 20  # outermost quantiles to which a tail is fitted
TAIL_SCALES = 0.01, 100.0  # bounds of b, in standard deviations of the target
PART = 2**20  # values that are sorted at a time, 8 MB in float64


class TabICLRegressor(RegressorMixin, Ensemble):
    """Predicts a number for each row from labelled rows, without training: `fit` only prepares the table.

    The parameters are those of TabICLClassifier, without softmax_temperature. X may be what it may be there.

    The network predicts quantiles of the target, usually 999, at the levels 0.001, 0.002, ..., 0.999. They are sorted,
    since nothing keeps them from crossing. Levels in between are interpolated. Beyond the outermost levels the network
    says nothing; there the tails are assumed to be exponential: the quantile at level a is b ln(a) + c below and
    -b ln(1 - a) + c above, where b is the slope of a least-squares line through the 20 outermost quantiles, at least
    0.01 and at most 100 standard deviations of the target, and c continues the outermost quantile. `predict` does not
    include the tails. All results are means over the views of the ensemble.

    The target is standardized by the labelled rows. If it is constant there, for example because there is only one
    such row, that number is predicted for every row and level.

    With one estimator and the same normalization, predictions agree with the public client's to 1e-4 standard
    deviations of the target, with the exceptions of TabICLClassifier.
    """

    def fit(self, X: Any, y: Any) -> TabICLRegressor:
        """X (rows, features), y (rows,) of finite numbers or booleans; raises ValueError or TypeError."""
        self._check_parameters()
        X = self._frame(X, y)
        y = finite_numbers(y)
        check_consistent_length(X, y)
        # Divided by a power of two, which is exact, no square of a number overflows or underflows. A difference to one
        # of the numbers is exactly 0 if all are equal, and precise if they are large and almost equal.
        self.exponent_ = np.frexp(np.abs(y).max())[1]
        scaled = np.ldexp(y, -self.exponent_)
        differences = scaled - scaled[0]
        mean, self.scale_ = differences.mean(), differences.std()
        self.mean_ = scaled[0] + mean
        self.y_ = ((differences - mean) / (self.scale_ or 1.0)).astype(np.float32)
        self._prepare(X, num_classes=0)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Means (rows,), float64, of the quantiles that the network predicts"""
        return self._average(self._numbers(X), lambda quantiles: quantiles.mean(1, keepdim=True), 1)[:, 0]

    def predict_median(self, X: Any) -> np.ndarray:
        """Medians (rows,), float64"""
        return self._at(self._numbers(X), [0.5])[:, 0]

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> np.ndarray:
        """Quantiles (rows, levels), float64, at levels between 0 and 1 in any order; raises ValueError for others.

        At the network's own levels, their mean is what `predict` returns.
        """
        return self._at(self._numbers(X), levels)

    def predict_interval(self, X: Any, coverage: float = 0.8) -> np.ndarray:
        """Lower and upper ends (rows, 2), float64, of intervals with as much probability below as above them.

        coverage: probability of the interval, between 0 and 1; raises ValueError for others
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage is {coverage}; it must lie between 0 and 1")
        return self._at(self._numbers(X), [(1 - coverage) / 2, (1 + coverage) / 2])

    def _at(self, numbers: np.ndarray, levels: Sequence[float]) -> np.ndarray:
        a = np.asarray(levels, dtype=float)
        if a.ndim != 1 or len(a) == 0 or not ((a > 0) & (a < 1)).all():
            raise ValueError(f"levels is {levels}; it must be a list of numbers between 0 and 1, both excluded")
        at = torch.from_numpy(a).to(self.device_)
        return self._average(numbers, lambda quantiles: interpolate(quantiles.sort(1).values, at), len(a))

    def _average(self, numbers: np.ndarray, summarise: Callable[[Tensor], Tensor], width: int) -> np.ndarray:
        """Means over the views of what is computed from their quantiles, in units of the target, float64 (rows, width).

        summarise: float64 (some rows, Q), not sorted -> (some rows, width)
        """
        rows = len(numbers)
        total = torch.zeros(rows, width, dtype=torch.float64, device=self.device_)
        size = max(1, PART // max(width, self.network_.config.outputs))
        for _, pack, tokens in self._packs(numbers, lambda view: self.y_):
            done = 0
            for part in quantile_parts(self.network_, pack, tokens):
                for some in part.split(size):  # rows of one view after those of another
                    place = torch.arange(done, done + len(some), device=self.device_) % rows
                    total.index_add_(0, place, summarise(some.double()))
                    done += len(some)
        means = (total / len(self.views_)).cpu().numpy()
        return np.ldexp(means * self.scale_ + self.mean_, self.exponent_)


def finite_numbers(y: Any) -> np.ndarray:
    """A target as float64 (rows,); raises ValueError that says what else it holds."""
    y = column_or_1d(y, warn=True)
    missing = np.asarray(pd.isna(y))
    if y.dtype.kind == "O":
        other = [v for v in y[~missing] if not isinstance(v, Real | Decimal | np.bool_)]
    else:
        other = list(y[:1]) if y.dtype.kind not in "buif" else []
    if other:
        kind = type(other[0]).__name__
        raise ValueError(f"y must hold numbers, but holds values of the type {kind}, for example {other[0]!r}")
    values = np.where(missing, np.nan, y).astype(float)
    for faulty, what in (
        (missing, "NaN or missing values"),
        (np.isinf(values), "infinity or a value too large for dtype('float64')"),
    ):
        if faulty.any():
            rows = f"in {faulty.sum()} of {len(y)} rows, the first of which is row {faulty.argmax()}"
            raise ValueError(f"Input y contains {what} {rows}, counted from 0")
    return values


def interpolate(quantiles: Tensor, levels: Tensor) -> Tensor:
    """Quantiles at other levels, with exponential tails; see TabICLRegressor.

    quantiles: float64 (rows, Q), sorted, at levels 1/(Q+1), ..., Q/(Q+1), in standard deviations of the target
    levels: float64 (levels,), between 0 and 1
    returns: float64 (rows, levels)
    """
    Q = quantiles.shape[1]
    place = levels * (Q + 1) - 1
    low = place.long().clamp(0, Q - 1)
    between = torch.lerp(quantiles[:, low], quantiles[:, (low + 1).clamp(max=Q - 1)], place - low)
    first, last = quantiles[:, :1], quantiles[:, -1:]
    log_outer = torch.log(torch.arange(1, min(TAIL, Q) + 1, dtype=torch.float64, device=levels.device) / (Q + 1))
    below = first + tail_scale(quantiles, log_outer) * (levels.log() - log_outer[0])
    above = last - tail_scale(-quantiles.flip(1), log_outer) * (torch.log1p(-levels) - log_outer[0])
    return torch.where(place < 0, below, torch.where(place > Q - 1, above, between))


def tail_scale(quantiles: Tensor, log_outer: Tensor) -> Tensor:
    """The least-squares slope of the first quantiles by the logarithms of their levels, within bounds, (rows, 1)"""
    centred = log_outer - log_outer.mean()
    slope = quantiles[:, : len(centred)] @ torch.linalg.pinv(centred[:, None]).T
    return slope.clamp(*TAIL_SCALES)
