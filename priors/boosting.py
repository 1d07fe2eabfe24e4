"""Gradient-boosted trees with vector leaves under squared loss, compiled by numba; single-threaded.

With learning rate 0.3, L2 penalty 1 and 256 bins they predict what XGBoost's histogram method predicts with
multi_strategy="multi_output_tree" and otherwise its defaults (https://arxiv.org/abs/1603.02754, equations 6 and 7,
summed over outputs): up to rounding errors if no column has more than 256 distinct values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

BINS = 256
LEARNING_RATE = np.float32(0.3)
PENALTY = np.float32(1.0)
MIN_GAIN = np.float32(1e-6)


def fit_predict(x: np.ndarray, targets: np.ndarray, num_trees: int, depth: int) -> np.ndarray:
    """Fit boosted trees to the targets (N, D) at the rows of x (N, M), and predict the same rows, float32 (N, D)."""
    columns = np.ascontiguousarray(x.T, dtype=np.float32)
    codes, num_bins = bin_columns(columns, np.sort(columns, axis=1))
    mean = targets.mean(0, dtype=np.float64).astype(np.float32)
    residuals = (targets - mean).astype(np.float32)
    return mean + boost(codes, num_bins, residuals, num_trees, depth)


@njit("Tuple((u1[:, ::1], i8[::1]))(f4[:, ::1], f4[:, ::1])", cache=True)
def bin_columns(columns, ordered):
    """Return the bins of the values (M, N), each of one value or about N / 256 rows, and their number per column."""
    M, N = columns.shape
    codes = np.empty((M, N), np.uint8)
    num_bins = np.empty(M, np.int64)
    highest = np.empty(BINS, np.float32)  # highest value of each bin
    for f in range(M):
        count = 0
        for i in range(N):
            if i == N - 1 or ordered[f, i] != ordered[f, i + 1]:
                if count == BINS:
                    count += 1
                    break
                highest[count] = ordered[f, i]
                count += 1
        if count > BINS:
            count = 0
            for b in range(1, BINS + 1):
                value = ordered[f, b * N // BINS - 1]
                if count == 0 or value != highest[count - 1]:
                    highest[count] = value
                    count += 1
        num_bins[f] = count
        highest[count:] = np.inf
        for i in range(N):
            value, code = columns[f, i], 0
            for step in (128, 64, 32, 16, 8, 4, 2, 1):
                code += step * (value > highest[code + step - 1])
            codes[f, i] = code
    return codes, num_bins


@njit("Tuple((i8, i8))(u1[:, ::1], i8[::1], i8[::1], f4[:, ::1], f4[:, ::1], i8[::1])", cache=True)
def best_split(codes, num_bins, rows, residuals, histogram, counts):
    """Find the split of a node with the largest gain: feature and last bin on the left; (-1, 0) without any gain."""
    n, D = residuals.shape
    whole = np.zeros(D, np.float32)
    for i in range(n):
        for o in range(D):
            whole[o] += residuals[i, o]
    score = np.float32(0)
    for o in range(D):
        score += whole[o] * whole[o]
    best = score / (n + PENALTY) + MIN_GAIN
    best_feature, best_bin = -1, 0
    sums = np.empty(D, np.float32)
    for f in range(len(num_bins)):
        bins = num_bins[f]
        histogram[:bins] = 0
        counts[:bins] = 0
        for i in range(n):
            b = codes[f, rows[i]]
            counts[b] += 1
            for o in range(D):
                histogram[b, o] += residuals[i, o]
        sums[:] = 0
        left = 0
        for b in range(bins - 1):
            if counts[b] == 0:
                continue
            left += counts[b]
            if left == n:
                break
            score_left, score_right = np.float32(0), np.float32(0)
            for o in range(D):
                sums[o] += histogram[b, o]
                rest = whole[o] - sums[o]
                score_left += sums[o] * sums[o]
                score_right += rest * rest
            score = score_left / (left + PENALTY) + score_right / (n - left + PENALTY)
            if score > best:
                best, best_feature, best_bin = score, f, b
    return best_feature, best_bin


@njit("f4[:, ::1](u1[:, ::1], i8[::1], f4[:, ::1], i8, i8)", cache=True)
def boost(codes, num_bins, residuals, num_trees, depth):
    """Return the sum of the trees' predictions (N, D); the residuals (N, D) are overwritten."""
    N, D = residuals.shape
    total = np.zeros((N, D), np.float32)
    order = np.empty(N, np.int64)  # rows, those of a node side by side
    spare = np.empty(N, np.int64)
    gathered = np.empty((N, D), np.float32)
    histogram = np.empty((BINS, D), np.float32)
    counts = np.empty(BINS, np.int64)
    leaf = np.empty(D, np.float32)
    for _ in range(num_trees):
        for i in range(N):
            order[i] = i
        edges = np.empty(2, np.int64)  # node k holds order[edges[k] : edges[k + 1]]
        edges[0], edges[1] = 0, N
        for _ in range(depth):
            split = np.empty(2 * len(edges), np.int64)
            num_edges = 0
            for k in range(len(edges) - 1):
                start, stop = edges[k], edges[k + 1]
                split[num_edges] = start
                num_edges += 1
                rows = order[start:stop]
                for i in range(len(rows)):
                    for o in range(D):
                        gathered[i, o] = residuals[rows[i], o]
                f, b = best_split(codes, num_bins, rows, gathered[: len(rows)], histogram, counts)
                if f < 0:
                    continue
                left, right = 0, 0
                for row in rows:
                    if codes[f, row] <= b:
                        rows[left] = row
                        left += 1
                    else:
                        spare[right] = row
                        right += 1
                for i in range(right):
                    rows[left + i] = spare[i]
                split[num_edges] = start + left
                num_edges += 1
            split[num_edges] = N
            edges = split[: num_edges + 1]
        for k in range(len(edges) - 1):
            rows = order[edges[k] : edges[k + 1]]
            leaf[:] = 0
            for row in rows:
                for o in range(D):
                    leaf[o] += residuals[row, o]
            for o in range(D):
                leaf[o] *= LEARNING_RATE / (len(rows) + PENALTY)
            for row in rows:
                for o in range(D):
                    residuals[row, o] -= leaf[o]
                    total[row, o] += leaf[o]
    return total
