"""A pretrained network as a scikit-learn regressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from priors.real.preprocessing import Member, TargetScale
from tabicl_train.model.predict import decode
from tabicl_train.prediction.ensemble import Ensemble, refuse_complex
from tabicl_train.prediction.polars_frames import as_pandas

__all__ = ["TabICLRegressor"]

TAIL = 20  # outermost quantiles to which a tail is fitted
TAIL_SCALES = (0.01, 100.0)  # bounds of b, in standard deviations of the target
PART = 2**17  # values that are sorted and averaged at a time: 1 MB in float64 fits into the cache, 2.5 times faster


class TabICLRegressor(RegressorMixin, Ensemble):
    """Predict a number for each row, and its distribution, in one forward pass of a pretrained network.

    `fit` prepares the table, and trains nothing. Parameters, attributes and X are those of TabICLClassifier, without
    `softmax_temperature` and `classes_`.

    Notes
    -----
    The network predicts quantiles of the target, usually 999, at the levels 0.001, 0.002, ..., 0.999. They are sorted,
    since they may cross. Levels in between are interpolated. Beyond the outermost levels, tails are assumed to be
    exponential: the quantile at level a is b ln(a) + c below and -b ln(1 - a) + c above, where b is the slope of a
    least-squares line through the 20 outermost quantiles, at least 0.01 and at most 100 standard deviations of the
    target, and c continues the outermost quantile. `predict` does not include the tails. All results are means over the
    members of the ensemble.

    The target is standardized by the labeled rows. If it is constant there, for example because there is only one
    such row, that number is predicted for every row and level.

    With one estimator and the same normalization, predictions agree with those of the `tabicl` package to 1e-4 standard
    deviations of the target, with the exceptions of TabICLClassifier.
    """

    def fit(self, X: Any, y: Any) -> TabICLRegressor:
        """Prepare the table.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Labeled rows.
        y : array of shape (rows,)
            Their targets: finite numbers or booleans, but no times or durations.

        Returns
        -------
        TabICLRegressor
            Itself.

        Raises
        ------
        ValueError, TypeError
            If the table or a parameter cannot be used.
        """
        self._check_parameters()
        y = as_pandas(y)
        X = self._frame(X, y)
        refuse_other_targets(y)
        y = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
        check_consistent_length(X, y)
        self.target_scale_ = TargetScale(y)
        self.y_ = self.target_scale_.standardize(y).astype(np.float32)
        self._prepare(X, num_classes=0)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predict means: array of shape (rows,), float64, for X of shape (rows, features)."""
        return self._average(self._encode(X), lambda q: q.astype(float).mean(axis=1, keepdims=True), 1)[:, 0]

    def predict_median(self, X: Any) -> np.ndarray:
        """Predict medians: array of shape (rows,), float64, for X of shape (rows, features)."""
        return self._quantiles_at(self._encode(X), [0.5])[:, 0]

    def predict_quantiles(self, X: Any, levels: Sequence[float]) -> np.ndarray:
        """Predict quantiles; at the network's own levels, their mean is what `predict` returns.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Query rows.
        levels : sequence of float
            Between 0 and 1, both excluded, in any order.

        Returns
        -------
        array of shape (rows, levels)
            Quantiles, float64.

        Raises
        ------
        ValueError
            For other levels.
        """
        return self._quantiles_at(self._encode(X), levels)

    def predict_interval(self, X: Any, coverage: float = 0.8) -> np.ndarray:
        """Predict intervals with as much probability below as above them.

        Parameters
        ----------
        X : array or data frame of shape (rows, features)
            Query rows.
        coverage : float
            Probability of the interval, between 0 and 1.

        Returns
        -------
        array of shape (rows, 2)
            Lower and upper ends, float64.

        Raises
        ------
        ValueError
            For another coverage.
        """
        if not 0 < coverage < 1:
            raise ValueError(f"coverage is {coverage}; it must lie between 0 and 1")
        return self._quantiles_at(self._encode(X), [(1 - coverage) / 2, (1 + coverage) / 2])

    def _labels(self, member: Member) -> np.ndarray:
        """Return the targets of the labeled rows, which are the same for all members."""
        return self.y_

    def _quantiles_at(self, encoded: np.ndarray, levels: Sequence[float]) -> np.ndarray:
        """Predict quantiles of encoded query rows, (rows, levels)."""
        a = np.asarray(levels, dtype=float)
        if a.ndim != 1 or len(a) == 0 or not ((a > 0) & (a < 1)).all():
            raise ValueError(f"levels is {levels}; it must be a list of numbers between 0 and 1, both excluded")
        return self._average(encoded, lambda q: interpolate_quantiles(np.sort(q, axis=1), a), len(a))

    def _average(self, encoded: np.ndarray, summarize: Callable[[np.ndarray], np.ndarray], width: int) -> np.ndarray:
        """Average summaries of quantiles over the members.

        Parameters
        ----------
        encoded : ndarray
            (rows, features), query rows.
        summarize : callable
            From quantiles, float32 (some rows, Q), which are not sorted, to float64 (some rows, width).
        width : int
            Values of a summary.

        Returns
        -------
        ndarray
            float64 (rows, width), in units of the target.
        """
        total = np.zeros((len(encoded), width))
        size = max(1, PART // max(width, self.network_.config.outputs))
        for _, rows, outputs in self._passes(encoded, decode):
            for quantiles in outputs:  # of one member, with padding after the last row
                for start in range(rows.start, rows.stop, size):
                    stop = min(start + size, rows.stop)
                    total[start:stop] += summarize(quantiles[start - rows.start : stop - rows.start])
        return self.target_scale_.restore(total / len(self.members_))


def refuse_other_targets(y: Any) -> None:
    """Raise ValueError for targets that would lose their meaning as numbers: times, durations and complex numbers."""
    refuse_complex(y, "y")
    values = np.asarray(y).ravel()
    kind = pd.api.types.infer_dtype(values, skipna=True)
    if kind in ("datetime64", "datetime", "date", "time", "period"):
        raise ValueError(
            "y has dates or times, which cannot be predicted; convert them to numbers first, such as days: "
            "(y - y.min()) / pd.Timedelta(days=1)"
        )
    if kind in ("timedelta64", "timedelta"):
        raise ValueError(
            "y has durations, which cannot be predicted; convert them to numbers first, such as days: "
            "y / pd.Timedelta(days=1)"
        )


def interpolate_quantiles(quantiles: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Interpolate quantiles at other levels, with exponential tails; see TabICLRegressor.

    Parameters
    ----------
    quantiles : ndarray
        (rows, Q), sorted, at the levels 1/(Q+1), ..., Q/(Q+1), in standard deviations of the target.
    levels : ndarray
        (levels,), between 0 and 1.

    Returns
    -------
    ndarray
        float64 (rows, levels).
    """
    # Between the two neighboring quantiles.
    Q = quantiles.shape[1]
    place = levels * (Q + 1) - 1
    low = place.astype(int).clip(0, Q - 1)
    high = (low + 1).clip(max=Q - 1)
    left = quantiles.take(low, axis=1)
    right = quantiles.take(high, axis=1)
    interpolated = left + (place - low) * (right.astype(float) - left)

    # Beyond the outermost ones.
    below = place < 0
    above = place > Q - 1
    interpolated[:, below] = tail(quantiles, levels[below])
    interpolated[:, above] = -tail(-quantiles[:, ::-1], 1 - levels[above])  # the upper tail is the lower one mirrored
    return interpolated


def tail(quantiles: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return quantiles at levels below the outermost one, (rows, levels): the line b ln(level) + c of the first 20."""
    Q = quantiles.shape[1]
    outer = quantiles[:, :TAIL].astype(float)
    logs = np.log(np.arange(1, outer.shape[1] + 1) / (Q + 1))
    # The slope of the least-squares line; a product with a vector would depend on the number of rows.
    weights = np.linalg.pinv(logs[:, None] - logs.mean())[0]
    b = (outer * weights).sum(axis=1).clip(*TAIL_SCALES)
    return outer[:, :1] + b[:, None] * (np.log(levels) - logs[0])
