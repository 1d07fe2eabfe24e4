"""Gradient-boosted trees with vector leaves under squared loss, compiled by numba; single-threaded.

With learning rate 0.3, L2 penalty 1 and 256 bins they predict what XGBoost's histogram method predicts with
multi_strategy="multi_output_tree" and otherwise its defaults (https://arxiv.org/abs/1603.02754, equations 6 and 7,
summed over outputs): up to rounding errors if no column has more than 256 distinct values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Those of XGBoost by default, in its words: max_bin, eta, lambda, and the least gain that counts.
BINS = 256
LEARNING_RATE = np.float32(0.3)
PENALTY = np.float32(1.0)
MIN_GAIN = np.float32(1e-6)


def fit_predict(x: np.ndarray, targets: np.ndarray, num_trees: int, depth: int) -> np.ndarray:
    """Fit boosted trees, and predict the rows that they were fitted to.

    Parameters
    ----------
    x : ndarray
        (N, M), the features.
    targets : ndarray
        (N, D), numbers that each leaf predicts together.
    num_trees, depth : int
        Number of trees, one fitted to what the earlier ones leave, and of their levels.

    Returns
    -------
    ndarray
        float32 (N, D).
    """
    columns = np.ascontiguousarray(x.T, dtype=np.float32)
    codes, num_bins = bin_columns(columns, np.sort(columns, axis=1))
    mean = targets.mean(0, dtype=np.float64).astype(np.float32)
    residuals = (targets - mean).astype(np.float32)
    return mean + boost(codes, num_bins, residuals, num_trees, depth)


@njit("Tuple((u1[:, ::1], i8[::1]))(f4[:, ::1], f4[:, ::1])", cache=True)
def bin_columns(columns, ordered):
    """Divide the values of each column into bins.

    Parameters
    ----------
    columns : ndarray
        float32 (M, N).
    ordered : ndarray
        The same, each column sorted.

    Returns
    -------
    codes : ndarray
        uint8 (M, N), the bin of each value. A bin has one value or, in a column of more than 256, about N / 256 rows.
    num_bins : ndarray
        int64 (M,), the bins of each column.
    """
    M, N = columns.shape
    codes = np.empty((M, N), np.uint8)
    num_bins = np.empty(M, np.int64)
    highest = np.empty(BINS, np.float32)  # the largest value of each bin
    for f in range(M):
        # A bin for each value, unless there are more than 256.
        count = 0
        for i in range(N):
            if i == N - 1 or ordered[f, i] != ordered[f, i + 1]:
                if count == BINS:
                    count += 1
                    break
                highest[count] = ordered[f, i]
                count += 1
        # Otherwise bins that end at the quantiles 1/256, 2/256, ..., each value once.
        if count > BINS:
            count = 0
            for b in range(1, BINS + 1):
                value = ordered[f, b * N // BINS - 1]
                if count == 0 or value != highest[count - 1]:
                    highest[count] = value
                    count += 1
        num_bins[f] = count

        # The first bin whose highest value is not below the value, by bisection in eight steps.
        highest[count:] = np.inf
        for i in range(N):
            value = columns[f, i]
            code = 0
            for step in (128, 64, 32, 16, 8, 4, 2, 1):
                code += step * (value > highest[code + step - 1])
            codes[f, i] = code
    return codes, num_bins


@njit("Tuple((i8, i8))(u1[:, ::1], i8[::1], i8[::1], f4[:, ::1], f4[:, ::1], i8[::1])", cache=True)
def best_split(codes, num_bins, rows, residuals, histogram, counts):
    """Find the split of a node with the largest gain.

    With the sum G of the residuals of n rows, a leaf is worth |G|^2 / (n + PENALTY); a split gains what its two leaves
    are worth together, less what the node is worth as a leaf (arXiv 1603.02754, equation 7 without its factor 1/2).

    Parameters
    ----------
    codes, num_bins : ndarray
        See `bin_columns`.
    rows : ndarray
        int64 (n,), the rows of the node.
    residuals : ndarray
        float32 (n, D), those of these rows.
    histogram, counts : ndarray
        float32 (BINS, D) and int64 (BINS,), memory to work in.

    Returns
    -------
    feature, last_bin : int
        Rows up to this bin of the feature go left; (-1, 0) if no split gains more than MIN_GAIN.
    """
    # What the node is worth as a leaf; a split must be worth more.
    n, D = residuals.shape
    whole = np.zeros(D, np.float32)
    for i in range(n):
        for o in range(D):
            whole[o] += residuals[i, o]
    score = np.float32(0)
    for o in range(D):
        score += whole[o] * whole[o]
    best = score / (n + PENALTY) + MIN_GAIN

    best_feature = -1
    best_bin = 0
    sums = np.empty(D, np.float32)  # of the residuals on the left
    for f in range(len(num_bins)):
        # Rows and sums of residuals of each bin.
        bins = num_bins[f]
        histogram[:bins] = 0
        counts[:bins] = 0
        for i in range(n):
            b = codes[f, rows[i]]
            counts[b] += 1
            for o in range(D):
                histogram[b, o] += residuals[i, o]

        # The splits after each bin that has rows, but for the last one.
        sums[:] = 0
        left = 0
        for b in range(bins - 1):
            if counts[b] == 0:
                continue
            left += counts[b]
            if left == n:
                break
            score_left = np.float32(0)
            score_right = np.float32(0)
            for o in range(D):
                sums[o] += histogram[b, o]
                rest = whole[o] - sums[o]
                score_left += sums[o] * sums[o]
                score_right += rest * rest
            score = score_left / (left + PENALTY) + score_right / (n - left + PENALTY)
            if score > best:
                best = score
                best_feature = f
                best_bin = b
    return best_feature, best_bin


@njit("f4[:, ::1](u1[:, ::1], i8[::1], f4[:, ::1], i8, i8)", cache=True)
def boost(codes, num_bins, residuals, num_trees, depth):
    """Fit trees, each to the residuals of the earlier ones.

    Parameters
    ----------
    codes, num_bins : ndarray
        See `bin_columns`.
    residuals : ndarray
        float32 (N, D), the targets less their means; what the trees leave of them is written there.
    num_trees, depth : int
        Number of trees, and of their levels.

    Returns
    -------
    ndarray
        float32 (N, D), the sum of the predictions of the trees.
    """
    N, D = residuals.shape
    total = np.zeros((N, D), np.float32)
    order = np.empty(N, np.int64)  # rows, those of a node side by side
    spare = np.empty(N, np.int64)
    gathered = np.empty((N, D), np.float32)
    histogram = np.empty((BINS, D), np.float32)
    counts = np.empty(BINS, np.int64)
    leaf = np.empty(D, np.float32)
    for _ in range(num_trees):
        # The root: node k of a level holds order[edges[k] : edges[k + 1]].
        for i in range(N):
            order[i] = i
        edges = np.empty(2, np.int64)
        edges[0] = 0
        edges[1] = N

        # Level by level, each node is split if that gains something.
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
                # Rows that go left are moved to the front, the others behind them, both in their order.
                left = 0
                right = 0
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

        # Leaves predict the sum of their residuals / (n + PENALTY) (equation 5), times the learning rate.
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
