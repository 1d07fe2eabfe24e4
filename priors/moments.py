"""The CPU path of priors.finish.clamp_and_standardise, compiled by numba."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit("UniTuple(f8, 3)(f8[::1], f8, f8)", cache=True, fastmath={"contract", "nsz", "reassoc"})
def moments_within(x, centre, bound):
    """Number, mean and sum of squared deviations of the values of x (N,) at most `bound` away from `centre`."""
    count = total = 0.0
    for j in range(len(x)):
        inside = abs(x[j] - centre) <= bound
        count += 1.0 if inside else 0.0
        total += x[j] if inside else 0.0
    mean = total / count
    square = 0.0
    for j in range(len(x)):
        deviation = x[j] - mean
        square += deviation * deviation if abs(x[j] - centre) <= bound else 0.0
    return count, mean, square


@njit("UniTuple(f8, 2)(f8[::1])", cache=True, fastmath={"contract", "nsz", "reassoc"})
def moments(x):
    """Mean and standard deviation (ddof 1) of x (N,)."""
    total = square = 0.0
    for j in range(len(x)):
        total += x[j]
    mean = total / len(x)
    for j in range(len(x)):
        deviation = x[j] - mean
        square += deviation * deviation
    return mean, math.sqrt(square / (len(x) - 1))


@njit("f4[:, ::1](f4[:, ::1], f8, f8, f8)", cache=True)
def clamp_and_standardise_columns(columns, outlier_stds, min_std, clip):
    """Columns (M, N) to float32 (M, N); a column with a value that is not finite becomes NaN."""
    M, N = columns.shape
    out = np.empty((M, N), np.float32)
    x = np.empty(N)
    for f in range(M):
        x[:] = columns[f]
        mean, std = moments(x)
        if math.isfinite(std):
            count, mean, square = moments_within(x, mean, outlier_stds * std)
            # See clamp_and_standardise_torch for why min_std is needed here.
            bound = outlier_stds * max(math.sqrt(square / (count - 1)), min_std)
            low, high = mean - bound, mean + bound
            for j in range(N):
                x[j] = min(max(x[j], low), high)
            mean, std = moments(x)
            scale = 1 / max(std, min_std)
            for j in range(N):
                out[f, j] = min(max((x[j] - mean) * scale, -clip), clip)
        else:
            out[f] = np.nan
    return out
