"""Extremely randomised trees with out-of-bag predictions of class shares, compiled by numba."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

MAX_DEPTH = 6


class ExtraTrees:
    """A growing ensemble over one table: X float32 (M, N), y int64 (N,)."""

    def __init__(self, X: np.ndarray, y: np.ndarray, rng: np.random.Generator):
        present, y = np.unique(y, return_inverse=True)
        order = np.argsort(y, kind="stable")
        self.X, self.y = np.ascontiguousarray(X[:, order], dtype=np.float32), y[order]  # rows sorted by class
        self.rng = rng
        self.size = 0
        self.votes = np.zeros((len(y), len(present)), np.float32)  # sums of out-of-bag predictions
        self.counts = np.zeros(len(y), np.int32)

    def grow(self, trees: int) -> ExtraTrees:
        for _ in range(trees):
            grow_tree(self.X, self.y, self.rng.integers(1, 2**63), self.votes, self.counts)
        self.size += trees
        return self

    def errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Squared errors of the mean and of the out-of-bag predictions, per row that has such."""
        seen = self.counts > 0
        truth = np.eye(self.votes.shape[1], dtype=np.float32)[self.y]
        mean = np.square(truth - truth.mean(0)).sum(1)[seen]
        return mean, np.square(truth[seen] - self.votes[seen] / self.counts[seen, None]).sum(1)

    def z_score(self) -> float:
        """The mean improvement in squared error over the mean, in standard errors."""
        mean, model = self.errors()
        improvement = mean - model
        return float(improvement.mean() / max(improvement.std() / math.sqrt(len(improvement)), 1e-12))

    def relative_error(self) -> float:
        mean, model = self.errors()
        return float(model.sum() / mean.sum())


@njit(inline="always")
def next_random(state):
    """xorshift64* (Vigna 2016): the next state and a float32 in [0, 1)."""
    state ^= state >> np.uint64(12)
    state ^= state << np.uint64(25)
    state ^= state >> np.uint64(27)
    return state, np.float32((state * np.uint64(2685821657736338717)) >> np.uint64(40)) * np.float32(2.0**-24)


@njit("void(f4[:, ::1], i8[::1], u8, f4[:, ::1], i4[::1])", cache=True, fastmath={"contract", "nsz", "reassoc"})
def grow_tree(X, y, seed, votes, counts):
    """Add one tree's out-of-bag predictions.

    Rows are sorted by class and every partition is stable, so that within a node each class is one segment: class
    counts left of a threshold are plain sums, which vectorise.
    """
    M, N = X.shape
    C = votes.shape[1]
    state = np.uint64(seed)
    for _ in range(4):
        state, _u = next_random(state)
    weight = np.zeros(N, np.int32)
    for _ in range(N):
        state, u = next_random(state)
        weight[min(int(np.float64(u) * N), N - 1)] += 1

    nodes = 2 ** (MAX_DEPTH + 1) - 1
    feature = np.full(nodes, -1, np.int64)
    threshold = np.zeros(nodes, np.float32)
    share = np.zeros((nodes, C), np.float32)
    bounds = np.zeros((nodes, C + 1), np.int64)  # segment of each class in `rows`
    rows = np.empty(N, np.int32)
    spare = np.empty(N, np.int32)
    size = 0
    for i in range(N):
        if weight[i] > 0:
            rows[size] = i
            size += 1
            bounds[0, y[i] + 1] = size
    for k in range(C):
        bounds[0, k + 1] = max(bounds[0, k + 1], bounds[0, k])

    values = np.empty(N, np.float32)
    w = np.empty(N, np.int32)
    label = np.empty(N, np.int32)
    total = np.empty(C, np.float32)
    left = np.empty(C, np.float32)
    for node in range(nodes):
        start, stop = bounds[node, 0], bounds[node, C]
        size = stop - start
        if size == 0:
            continue
        all_weight = np.float32(0.0)
        classes = 0
        for j in range(start, stop):
            w[j - start] = weight[rows[j]]
            label[j - start] = y[rows[j]]
        for k in range(C):
            count = np.int32(0)
            for j in range(bounds[node, k] - start, bounds[node, k + 1] - start):
                count += w[j]
            total[k] = count
            all_weight += total[k]
            classes += count > 0
        for k in range(C):
            share[node, k] = total[k] / all_weight
        if classes < 2 or node >= 2**MAX_DEPTH - 1:
            continue

        best = np.float32(-1.0)
        for f in range(M):
            low, high = np.float32(np.inf), np.float32(-np.inf)
            for j in range(size):
                value = X[f, rows[start + j]]
                values[j] = value
                low = min(low, value)
                high = max(high, value)
            if not high > low + np.float32(1e-7):
                continue
            state, u = next_random(state)
            cut = low + u * (high - low)
            if cut >= high:
                cut = low
            if size >= 4 * C:
                for k in range(C):
                    count = np.int32(0)
                    for j in range(bounds[node, k] - start, bounds[node, k + 1] - start):
                        count += w[j] if values[j] <= cut else np.int32(0)
                    left[k] = count
            else:
                left[:] = np.float32(0.0)
                for j in range(size):
                    left[label[j]] += w[j] if values[j] <= cut else np.int32(0)
            left_weight, left_square, right_square = np.float32(0.0), np.float32(0.0), np.float32(0.0)
            for k in range(C):
                left_weight += left[k]
                left_square += left[k] * left[k]
                right_square += (total[k] - left[k]) * (total[k] - left[k])
            gain = left_square / left_weight + right_square / (all_weight - left_weight)  # variance explained
            if gain > best:
                best, feature[node], threshold[node] = gain, f, cut
        if feature[node] < 0:
            continue
        f, cut = feature[node], threshold[node]
        a, b = start, 0
        for k in range(C):
            bounds[2 * node + 1, k] = a
            bounds[2 * node + 2, k] = b
            for j in range(bounds[node, k], bounds[node, k + 1]):
                row = rows[j]
                if X[f, row] <= cut:
                    rows[a] = row
                    a += 1
                else:
                    spare[b] = row
                    b += 1
        rows[a : a + b] = spare[:b]
        bounds[2 * node + 1, C] = a
        bounds[2 * node + 2, C] = b
        for k in range(C + 1):
            bounds[2 * node + 2, k] += a

    for i in range(N):
        if weight[i] == 0:
            node = 0
            while feature[node] >= 0:
                node = 2 * node + (1 if X[feature[node], i] <= threshold[node] else 2)
            counts[i] += 1
            for k in range(C):
                votes[i, k] += share[node, k]
