"""The trees of trees.py for a numeric target."""

from __future__ import annotations

import numpy as np
from numba import njit

from priors.filters.trees import MAX_DEPTH, ExtraTrees, draw_bag, draw_cuts, find_leaf, first_state, next_random, split

LEAST_VARIANCE = 0.5


class NumericExtraTrees(ExtraTrees):
    """An ensemble that predicts numbers: y float32 (N,), rows of a target of variance 1; votes are float32 (N,)."""

    def __init__(self, X: np.ndarray, y: np.ndarray, rng: np.random.Generator):
        self.X, self.y = np.ascontiguousarray(X, dtype=np.float32), y
        self.rng = rng
        self.size = 0
        self.votes = np.zeros(len(y), np.float32)
        self.counts = np.zeros(len(y), np.int32)

    def grow(self, trees: int) -> NumericExtraTrees:
        for _ in range(trees):
            grow_numeric_tree(self.X, self.y, self.rng.integers(1, 2**63), self.votes, self.counts)
        self.size += trees
        return self

    def errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Squared errors of the mean and of the predictions, float64, of the rows that have a prediction."""
        seen = self.counts > 0
        y = self.y.astype(float)
        return np.square(y - y.mean())[seen], np.square(y[seen] - self.votes[seen] / self.counts[seen])

    def sum_errors(self) -> tuple[float, float, float, float]:
        mean, model = self.errors()
        return len(mean), mean.sum(), model.sum(), np.square(mean - model).sum()

    def z_score(self) -> float:
        """As of classes, but 0 while the rows that have a prediction hold less than half of the target's variance.

        They may lack the few outliers that decide about the table; 1 table of 400 was accepted for that reason.
        """
        count, mean, _, _ = self.sum_errors()
        return super().z_score() if mean > LEAST_VARIANCE * count else 0.0

    def failures(self, resamples: int) -> int:
        """The resamples are drawn: a few outliers may dominate the improvement, which is then far from normal."""
        mean, model = self.errors()
        return count_failures(mean - model, resamples, self.rng.integers(1, 2**63))


@njit("i8(f8[::1], i8, u8)", cache=True)
def count_failures(improvement, resamples, seed):
    """In how many bootstrap resamples the improvement (N,) has no positive mean."""
    N = len(improvement)
    state = first_state(seed)
    failures = 0
    for _ in range(resamples):
        total = 0.0
        for _ in range(N):
            state, u = next_random(state)
            total += improvement[min(int(np.float64(u) * N), N - 1)]
        failures += total <= 0
    return failures


@njit("void(f4[:, ::1], f4[::1], u8, f4[::1], i4[::1])", cache=True, fastmath={"contract", "nsz", "reassoc"})
def grow_numeric_tree(X, y, seed, votes, counts):
    """Grow a tree on X (N, M) and y (N,), and add its out-of-bag predictions to votes (N,) and counts (N,)."""
    N, M = X.shape
    weight, state = draw_bag(N, seed)

    nodes = 2 ** (MAX_DEPTH + 1) - 1
    feature = np.full(nodes, -1, np.int64)
    threshold = np.zeros(nodes, np.float32)
    value = np.zeros(nodes, np.float32)
    bounds = np.zeros((nodes, 2), np.int64)  # the node's part of `rows`
    rows = np.flatnonzero(weight).astype(np.int32)
    spare = np.empty(len(rows), np.int32)
    bounds[0, 1] = len(rows)

    low = np.empty(M, np.float32)
    high = np.empty(M, np.float32)
    cut = np.empty(M, np.float32)
    left_weight = np.empty(M, np.float32)  # at or below the cut
    left_sum = np.empty(M, np.float32)
    for node in range(nodes):
        start, stop = bounds[node]
        if start == stop:
            continue
        all_weight, total = np.float32(0.0), np.float32(0.0)
        varies = False
        for j in range(start, stop):
            all_weight += weight[rows[j]]
            total += weight[rows[j]] * y[rows[j]]
            varies |= y[rows[j]] != y[rows[start]]
        value[node] = total / all_weight
        if not varies or node >= 2**MAX_DEPTH - 1:
            continue

        state = draw_cuts(X, rows[start:stop], state, low, high, cut)
        left_weight[:] = np.float32(0.0)
        left_sum[:] = np.float32(0.0)
        for j in range(start, stop):
            row, w = X[rows[j]], weight[rows[j]]
            v = w * y[rows[j]]
            for f in range(M):
                left = row[f] <= cut[f]
                left_weight[f] += w if left else np.float32(0.0)
                left_sum[f] += v if left else np.float32(0.0)
        best = np.float32(-1.0)
        for f in range(M):
            if not high[f] > low[f] + np.float32(1e-7):
                continue
            right_sum = total - left_sum[f]
            gain = left_sum[f] * left_sum[f] / left_weight[f] + right_sum * right_sum / (all_weight - left_weight[f])
            if gain > best:
                best, feature[node], threshold[node] = gain, f, cut[f]
        if feature[node] < 0:
            continue
        split(node, X[:, feature[node]], threshold[node], rows, spare, bounds)

    for i in range(N):
        if weight[i] == 0:
            counts[i] += 1
            votes[i] += value[find_leaf(X[i], feature, threshold)]
