"""CPU loops over the features of a node, compiled by numba: each feature, 4 KB at 1,024 rows, is read once.

At 1,024 rows and 10 features, a chain of torch calls takes five to ten times as long, most of it in calls.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from priors.floats import FASTMATH, SUMS, accurate_power, exponential, log1p_exp, scramble, uniform
from priors.graph.elementwise import apply


@njit("UniTuple(f4, 2)(f4[::1])", cache=True, fastmath=SUMS, error_model="numpy")
def moments(row):
    """Mean and 1 / standard deviation of a feature; 0 and not infinity for a constant one, of any value."""
    first = row[0]
    total = np.float32(0.0)
    for j in range(len(row)):
        total += row[j] - first
    mean = first + total / np.float32(len(row))
    square = np.float32(0.0)
    for j in range(len(row)):
        square += (row[j] - mean) * (row[j] - mean)
    return mean, np.float32(1.0) / np.sqrt(square / np.float32(len(row)) + np.float32(1e-20))


@njit("void(f4[::1], f4[::1], f4)", cache=True, fastmath=SUMS, error_model="numpy")
def standardize_feature(row, out, factor):
    """(row - mean) / (standard deviation + 1e-4) * factor; out may be row."""
    mean, inverse_std = moments(row)
    scale = factor * inverse_std / (np.float32(1.0) + np.float32(1e-4) * inverse_std)
    for j in range(len(row)):
        out[j] = (row[j] - mean) * scale


@njit("void(f4[:, ::1], f4[:, ::1])", cache=True, error_model="numpy")
def standardize_features(x, out):
    """standardize_feature for every feature of x (n, N); out may be x."""
    for i in range(x.shape[0]):
        standardize_feature(x[i], out[i], np.float32(1.0))


@njit("void(f4[:, ::1], f4[::1])", cache=True, fastmath=SUMS, error_model="numpy")
def scale_features(x, weights):
    """Standardized features of x (n, N) times weights (n,), over the root mean square of the rows' norms, in place."""
    n = x.shape[0]
    mean = np.empty(n, np.float32)
    factor = np.empty(n, np.float32)
    square = np.float32(0.0)
    for i in range(n):
        mean[i], inverse_std = moments(x[i])
        # The deviation of the standardized feature, std / (std + 1e-4), times the weight
        weight = weights[i] / (np.float32(1.0) + np.float32(1e-4) * inverse_std)
        square += weight * weight
        factor[i] = inverse_std * weight
    # As every feature has deviation 1, the norm of the weights is the root mean square of the rows' norms.
    norm = np.sqrt(square) + np.float32(1e-8)
    for i in range(n):
        row, center, multiplier = x[i], mean[i], factor[i] / norm
        for j in range(len(row)):
            row[j] = (row[j] - center) * multiplier


@njit("void(f4[:, ::1], f4[:, ::1], i8[::1], f4)", cache=True, error_model="numpy")
def shift(x, out, rows, factor):
    """(x - x in row rows[i] of feature i) * factor for standardized features of x (n, N)."""
    for i in range(x.shape[0]):
        standardize_feature(x[i], out[i], factor)
        row = out[i]
        origin = row[rows[i]]
        for j in range(len(row)):
            row[j] -= origin


@njit("void(f4[:, ::1], f4[:, ::1], i8[::1], f4, i8, f4)", cache=True, error_model="numpy")
def activate(x, out, rows, factor, code, power):
    """standardize -> shift -> elementwise function -> standardize, feature by feature."""
    for i in range(x.shape[0]):
        shift(x[i : i + 1], out[i : i + 1], rows[i : i + 1], factor)
        apply(out[i], code, power)
        standardize_feature(out[i], out[i], np.float32(1.0))


@njit("void(f4[:, ::1], i8[::1], f4[::1], f4[::1])", cache=True, fastmath=FASTMATH, error_model="numpy")
def warp_features(x, features, a, b):
    """1 - (1 - u^a)^b of some features (k,) of x (n, N), in place; u are their values scaled to [0, 1]; a, b (k,)."""
    one = np.float32(1.0)
    for i in range(len(features)):
        row = x[features[i]]
        low, high, total = row[0], row[0], np.float32(0.0)
        for j in range(len(row)):
            low, high = min(low, row[j]), max(high, row[j])
            total += row[j] * np.float32(0.0)
        if total != total:  # minima and maxima pass over NaN
            row[:] = np.nan
            continue
        span = max(high - low, np.float32(1e-30))
        for j in range(len(row)):
            u = accurate_power(min((row[j] - low) / span, one), a[i])
            row[j] = one - accurate_power(max(one - u, np.float32(0.0)), b[i])


@njit("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", cache=True, fastmath=FASTMATH, error_model="numpy")
def logsumexp(a, b, out):
    """log(e^a + e^b); out may be a."""
    for i in range(a.shape[0]):
        p, q, row = a[i], b[i], out[i]
        for j in range(len(row)):
            high = max(p[j], q[j])
            lost = (p[j] + q[j]) * np.float32(0.0)  # NaN if one of them is, over which the maximum passes
            row[j] = high + log1p_exp(min(p[j], q[j]) - high) + lost


@njit("i8[::1](f4[:, ::1], f4, f4[::1], u8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def sample_softmax(x, factor, log_shares, key):
    """Categories (N,) drawn from the softmax over factor * standardized x (k, N) + log_shares (k,)."""
    k, rows = x.shape
    cumulative = np.empty((k, rows), np.float32)
    highest = np.full(rows, np.float32(-np.inf))
    for i in range(k):
        row, share = cumulative[i], log_shares[i]
        standardize_feature(x[i], row, factor)
        for j in range(rows):
            logit = row[j] + share
            logit = logit if abs(logit) < np.float32(np.inf) else np.float32(0.0)
            row[j] = logit
            highest[j] = max(highest[j], logit)
    total = np.zeros(rows, np.float32)
    for i in range(k):
        row = cumulative[i]
        for j in range(rows):
            total[j] += exponential(row[j] - highest[j])
            row[j] = total[j]
    for j in range(rows):
        total[j] *= uniform(scramble(key + np.uint64(j)))
    index = np.zeros(rows, np.int64)
    for i in range(k - 1):
        row = cumulative[i]
        for j in range(rows):
            index[j] += 1 if row[j] <= total[j] else 0
    return index
