"""Filters of finished tables by what extremely randomized trees learn from them.

One rejects tables that the trees cannot predict at all (TabICLv2, arXiv 2602.11139, appendix), the other those that
they predict less well than a skill that the user sets. The trees (Geurts, Ernst and Wehenkel 2006) are compiled by
numba.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numba import njit

from priors.finish import Rejected
from priors.floats import FASTMATH
from priors.table import Table

# Numbers of trees after which a table may be decided; the last is that of the paper. More trees and more rows only
# raise the z-score of the improvement: of 400 tables, none was rejected whose score exceeded 2 at any stage (the
# highest among the rejected was 1.1), and none accepted whose score was below -3 after 12 trees.
STAGES = (1, 3, 6, 12, 25)
CERTAIN = 2.5  # z-score above which a table is accepted early
HOPELESS = -3.5  # z-score below which a table is rejected early
HOPELESS_AFTER = 12  # trees, at least, before a table is rejected early
FIRST_ROWS = 1024  # random rows of a longer table on which it may be accepted even earlier, and which decide its skill
RESAMPLES = 200
MAX_FAILURES = 10  # 5 % of the resamples
MAX_DEPTH = 6
NODES = 2 ** (MAX_DEPTH + 1) - 1  # of a tree; the children of node k are 2 k + 1 and 2 k + 2
LEAST_VARIANCE = 0.5  # of the rows that have a prediction; that of all rows is 1
SKILL_TREES = 12  # 0.25 ms for a table of 120 rows
# After half of the trees, a table is decided if its skill is farther than this above the least one, or far below it.
# These are 7 of 10 tables, and all trees would decide 1 % of them otherwise.
FIRST_SKILL_TREES = 6
FAR_ABOVE = 0.1


def trees_of(table: Table, rng: np.random.Generator) -> ExtraTrees:
    """Return the trees that predict the target of a table, none yet; both filters look at the same ones."""
    kind = ExtraTrees if table.num_classes else NumericExtraTrees
    return kind(table.X.numpy(), table.y.numpy(), rng)


def check_predictability(trees: ExtraTrees) -> None:
    """Raise Rejected("unpredictable") if the table of these trees is to be dropped.

    25 extremely randomized trees (depth 6, all features tried at each split, bootstrap samples) predict the target
    (the one-hot classes, or the number) out of bag. A table is unpredictable if in at least 5 % of 200 bootstrap
    resamples of its rows the trees' squared error is not below that of the mean.
    """
    # Some rows of a long table may be enough to accept it.
    if trees.is_long and trees.sample.grow_to(STAGES[1]).z_score() > CERTAIN:
        return

    # All rows: few trees may be enough, the 25 decide.
    for num_trees in STAGES[:-1]:
        # check_skill has grown more trees already.
        if num_trees < trees.size:
            continue
        z = trees.grow_to(num_trees).z_score()
        if z > CERTAIN:
            return
        if z < HOPELESS and num_trees >= HOPELESS_AFTER:
            raise Rejected("unpredictable")
    if trees.grow_to(STAGES[-1]).failures(RESAMPLES) >= MAX_FAILURES:
        raise Rejected("unpredictable")


def check_skill(trees: ExtraTrees, least: float) -> None:
    """Raise Rejected("skill") if 12 extremely randomized trees, or the first 6 by far, have less skill than `least`.

    Of a longer table they learn from 1,024 random rows.
    """
    if trees.is_long:
        trees = trees.sample
    skill = trees.grow_to(FIRST_SKILL_TREES).skill()
    if least - trees.far_below < skill < least + FAR_ABOVE:
        skill = trees.grow_to(SKILL_TREES).skill()
    if skill < least:
        raise Rejected("skill")


class ExtraTrees:
    """An ensemble of trees for one table, which grows and predicts its rows out of bag.

    Parameters
    ----------
    X : ndarray
        float32 (N, M).
    y : ndarray
        int64 (N,), labels.
    rng : numpy.random.Generator
        The source of randomness.

    Attributes
    ----------
    size : int
        Number of trees.
    votes : ndarray
        float32 (N, classes that occur), sums of the predictions of the trees that a row is out of the bag of.
    counts : ndarray
        int32 (N,), the number of these trees.
    far_below : float
        By how much less skill few trees may have than more of them.
    """

    far_below = 0.15

    def __init__(self, X: np.ndarray, y: np.ndarray, rng: np.random.Generator):
        self.X = np.ascontiguousarray(X, dtype=np.float32)
        self.rng = rng
        self.size = 0
        self.counts = np.zeros(len(y), np.int32)
        self.set_target(y)

    def set_target(self, y: np.ndarray) -> None:
        """Set y, the target as the trees read it, and votes, of zeros."""
        numbers = (np.bincount(y) > 0).cumsum() - 1  # of the classes that occur
        self.y = numbers[y]
        self.votes: np.ndarray = np.zeros((len(y), numbers[-1] + 1), np.float32)

    @property
    def is_long(self) -> bool:
        """Whether there are so many rows that a sample of them is looked at first."""
        return len(self.y) > FIRST_ROWS

    @functools.cached_property
    def sample(self) -> ExtraTrees:
        """Other trees, for random rows of a long table."""
        rows = self.rng.choice(len(self.y), FIRST_ROWS, replace=False)
        return type(self)(self.X[rows], self.y[rows], self.rng)

    def grow_to(self, size: int) -> ExtraTrees:
        """Add trees until there are so many; returns itself."""
        if size > self.size:
            for seed in self.rng.integers(1, 2**63, size - self.size).tolist():
                self.grow_one(seed)
            self.size = size
        return self

    def grow_one(self, seed: int) -> None:
        grow_tree(self.X, self.y, seed, self.votes, self.counts)

    def errors(self) -> tuple[np.ndarray, np.ndarray]:
        """Squared errors of the mean and of the predictions, float64, of the rows that have a prediction."""
        return class_errors(self.y, self.votes, self.counts)

    def skill(self) -> float:
        """2 ROC AUC - 1, as the mean over the classes, each against the rest; 0 is guessing, 1 perfect."""
        return mean_skill(self.y, self.votes, self.counts)

    def failures(self, resamples: int) -> int:
        """Draw in how many bootstrap resamples of the rows the trees' squared error is not below that of the mean.

        The mean improvement of a resample is nearly normal, so the number is drawn from a binomial instead.
        """
        return self.rng.binomial(resamples, 0.5 * math.erfc(self.z_score() / math.sqrt(2)))

    def z_score(self) -> float:
        """By how much the trees' squared error is below that of the mean: mean over rows, in standard errors."""
        mean_errors, tree_errors = self.errors()
        gain = mean_errors - tree_errors
        standard_error = gain.std() / math.sqrt(len(gain))
        return float(gain.mean() / max(standard_error, 1e-12))


class NumericExtraTrees(ExtraTrees):
    """An ensemble that predicts numbers: y float32 (N,), rows of a target of variance 1; votes are float32 (N,)."""

    # R2 of few trees is lower than that of more.
    far_below = 0.35

    def set_target(self, y: np.ndarray) -> None:
        self.y = y
        self.votes = np.zeros(len(y), np.float32)

    def grow_one(self, seed: int) -> None:
        grow_numeric_tree(self.X, self.y, seed, self.votes, self.counts)

    def errors(self) -> tuple[np.ndarray, np.ndarray]:
        seen = self.counts > 0
        y = self.y.astype(float)
        predictions = self.votes[seen] / self.counts[seen]
        mean_errors = np.square(y - y.mean())[seen]
        tree_errors = np.square(y[seen] - predictions)
        return mean_errors, tree_errors

    def skill(self) -> float:
        """R2, below 0 for predictions that are worse than the mean."""
        mean_errors, tree_errors = self.errors()
        # In a sample of rows with the same number, there is nothing to explain.
        if not mean_errors.any():
            return 0.0
        return 1 - tree_errors.sum() / mean_errors.sum()

    def z_score(self) -> float:
        """As of classes, but 0 if the rows that have a prediction vary at most half as much as all rows.

        Such rows may lack the few outliers that decide about the table; 1 table of 400 was accepted for that reason.
        """
        mean_errors, _ = self.errors()
        if mean_errors.sum() > LEAST_VARIANCE * len(mean_errors):
            return super().z_score()
        return 0.0

    def failures(self, resamples: int) -> int:
        """The resamples are drawn: a few outliers may dominate the improvement, which is then far from normal."""
        mean_errors, tree_errors = self.errors()
        return count_failures(mean_errors - tree_errors, resamples, self.rng.integers(1, 2**63))


@njit(inline="always")
def next_random(state):
    """xorshift64* (Vigna 2016): the next state and a float32 in [0, 1)."""
    state ^= state >> np.uint64(12)
    state ^= state << np.uint64(25)
    state ^= state >> np.uint64(27)
    return state, np.float32((state * np.uint64(2685821657736338717)) >> np.uint64(40)) * np.float32(2.0**-24)


@njit(inline="always")
def first_state(seed):
    """The state of the random numbers of a seed, after the first four, in which similar seeds still look alike."""
    state = np.uint64(seed)
    for _ in range(4):
        state, _u = next_random(state)
    return state


@njit(inline="always")
def draw_bag(N, seed):
    """Return how often a bootstrap sample holds each of N rows, float32 (N,), and the state of the random numbers."""
    state = first_state(seed)
    weight = np.zeros(N, np.float32)
    for _ in range(N):
        state, u = next_random(state)
        weight[min(int(np.float64(u) * N), N - 1)] += np.float32(1.0)
    return weight, state


@njit(inline="always")
def plant(weight):
    """Return a tree of one node.

    Returns
    -------
    feature, threshold : ndarray
        int64 and float32 (NODES,), the test of each node; feature -1 in a leaf.
    bounds : ndarray
        int64 (NODES, 2), the part of `rows` that a node has, from start to stop.
    rows : ndarray
        int32, the rows in the bag.
    spare : ndarray
        Memory of this size for `split`.
    """
    rows = np.flatnonzero(weight).astype(np.int32)
    bounds = np.zeros((NODES, 2), np.int64)
    bounds[0, 1] = len(rows)
    return np.full(NODES, -1, np.int64), np.zeros(NODES, np.float32), bounds, rows, np.empty(len(rows), np.int32)


@njit(inline="always")
def draw_cuts(X, rows, state, low, high, cut):
    """Fill low, high and cut (M,) with the extremes of each feature in some rows, and a random cut between them.

    A feature whose extremes differ by 1e-7 or less is not cut. Returns the state of the random numbers.
    """
    M = X.shape[1]
    low[:] = np.float32(np.inf)
    high[:] = np.float32(-np.inf)
    for j in range(len(rows)):
        row = X[rows[j]]
        for f in range(M):
            low[f] = min(low[f], row[f])
            high[f] = max(high[f], row[f])
    for f in range(M):
        if high[f] > low[f] + np.float32(1e-7):
            state, u = next_random(state)
            cut[f] = low[f] + u * (high[f] - low[f])
            if cut[f] >= high[f]:
                cut[f] = low[f]
    return state


@njit(inline="always")
def split(node, column, threshold, rows, spare, bounds):
    """Give a node's part of `rows` to its two children: values of at most the threshold to the first."""
    start, stop = bounds[node]
    middle = start
    rest = 0
    for j in range(start, stop):
        row_index = rows[j]
        if column[row_index] <= threshold:
            rows[middle] = row_index
            middle += 1
        else:
            spare[rest] = row_index
            rest += 1
    for j in range(rest):
        rows[middle + j] = spare[j]
    bounds[2 * node + 1, 0], bounds[2 * node + 1, 1] = start, middle
    bounds[2 * node + 2, 0], bounds[2 * node + 2, 1] = middle, stop


@njit(inline="always")
def find_leaf(row, feature, threshold):
    """The leaf that a row falls into."""
    node = 0
    while feature[node] >= 0:
        node = 2 * node + (1 if row[feature[node]] <= threshold[node] else 2)
    return node


@njit("void(f4[:, ::1], i8[::1], u8, f4[:, ::1], i4[::1])", cache=True, fastmath={"contract", "nsz", "reassoc"})
def grow_tree(X, y, seed, votes, counts):
    """Grow a tree, and add its out-of-bag predictions to the votes.

    A node is split where a random cut of one of its features explains the most variance of the one-hot classes: it has
    the largest sum over classes of W_left^2 / w_left + W_right^2 / w_right, with the weights W of a class and w of all
    rows. Cuts of all features of a row are compared at once, which is vectorized.

    Parameters
    ----------
    X : ndarray
        float32 (N, M).
    y : ndarray
        int64 (N,), labels 0, ..., C - 1.
    seed : int
        The seed of the tree.
    votes : ndarray
        float32 (N, C), to which the shares of the classes in the leaf of a row outside the bag are added.
    counts : ndarray
        int32 (N,), to which 1 is added for these rows.
    """
    N, M = X.shape
    C = votes.shape[1]
    weight, state = draw_bag(N, seed)
    feature, threshold, bounds, rows, spare = plant(weight)
    share = np.zeros((NODES, C), np.float32)
    low, high, cut = np.empty(M, np.float32), np.empty(M, np.float32), np.empty(M, np.float32)
    left = np.empty((C, M), np.float32)  # weight of each class at or below the cut
    total = np.empty(C, np.float32)  # weight of each class in the node
    for node in range(NODES):
        start, stop = bounds[node]
        if start == stop:
            continue

        # The shares of the classes, which are the prediction if the node is a leaf.
        total[:] = np.float32(0.0)
        for j in range(start, stop):
            total[y[rows[j]]] += weight[rows[j]]
        all_weight = total.sum()
        for k in range(C):
            share[node, k] = total[k] / all_weight
        if (total > 0).sum() < 2 or node >= 2**MAX_DEPTH - 1:
            continue

        # The weights of the classes at or below a random cut of each feature.
        state = draw_cuts(X, rows[start:stop], state, low, high, cut)
        left[:] = np.float32(0.0)
        for j in range(start, stop):
            row = X[rows[j]]
            w = weight[rows[j]]
            left_of_class = left[y[rows[j]]]
            for f in range(M):
                left_of_class[f] += w if row[f] <= cut[f] else np.float32(0.0)

        # The best cut.
        best = np.float32(-1.0)
        for f in range(M):
            if not high[f] > low[f] + np.float32(1e-7):  # it was not cut
                continue
            left_weight = np.float32(0.0)
            left_square = np.float32(0.0)
            right_square = np.float32(0.0)
            for k in range(C):
                left_weight += left[k, f]
                left_square += left[k, f] * left[k, f]
                right_square += (total[k] - left[k, f]) * (total[k] - left[k, f])
            gain = left_square / left_weight + right_square / (all_weight - left_weight)  # variance explained
            if gain > best:
                best = gain
                feature[node] = f
                threshold[node] = cut[f]
        if feature[node] < 0:
            continue
        split(node, X[:, feature[node]], threshold[node], rows, spare, bounds)

    # Predictions for the rows outside the bag.
    for i in range(N):
        if weight[i] == 0:
            node = find_leaf(X[i], feature, threshold)
            counts[i] += 1
            for k in range(C):
                votes[i, k] += share[node, k]


@njit("UniTuple(f8[::1], 2)(i8[::1], f4[:, ::1], i4[::1])", cache=True, fastmath=FASTMATH)
def class_errors(y, votes, counts):
    """Squared errors of the shares of classes and of the predictions, of the rows that have one; see `ExtraTrees`."""
    N, C = votes.shape
    share = np.zeros(C)
    for i in range(N):
        share[y[i]] += 1.0 / N
    square_of_shares = 0.0
    for k in range(C):
        square_of_shares += share[k] * share[k]
    mean_errors = np.empty(N)
    tree_errors = np.empty(N)
    seen = 0
    for i in range(N):
        if counts[i] == 0:
            continue
        square = 0.0
        for k in range(C):
            square += votes[i, k] * votes[i, k]
        # The sum over k of (1 - p_k)^2 for the row's class, and p_k^2 for the others
        mean_errors[seen] = 1.0 - 2.0 * share[y[i]] + square_of_shares
        tree_errors[seen] = 1.0 - 2.0 * votes[i, y[i]] / counts[i] + square / (counts[i] * counts[i])
        seen += 1
    return mean_errors[:seen], tree_errors[:seen]


@njit("f8(i8[::1], f4[:, ::1], i4[::1])", cache=True)
def mean_skill(y, votes, counts):
    """2 ROC AUC - 1 of the rows that have a prediction, as the mean over the classes; 0 without any pair of rows."""
    N, C = votes.shape
    positive = np.empty(N, np.float32)
    negative = np.empty(N, np.float32)
    total = 0.0
    counted = 0
    # Of two classes one is enough, since both have the same ROC AUC.
    for label in range(1 if C == 2 else 0, C):
        num_positive = num_negative = 0
        for i in range(N):
            if counts[i] == 0:
                continue
            vote = votes[i, label] / np.float32(counts[i])
            if y[i] == label:
                positive[num_positive] = vote
                num_positive += 1
            else:
                negative[num_negative] = vote
                num_negative += 1
        if num_positive == 0 or num_negative == 0:
            continue
        # All pairs are compared, which is vectorized: no more than a few trees take, up to FIRST_ROWS rows.
        # `difference` is the number of pairs in which the positive row has more votes, minus that of the opposite.
        difference = 0
        for i in range(num_positive):
            vote = positive[i]
            more = np.int32(0)
            for j in range(num_negative):
                more += np.int32(vote > negative[j]) - np.int32(vote < negative[j])
            difference += more
        total += difference / (num_positive * num_negative)
        counted += 1
    return total / max(counted, 1)


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
    """Do what `grow_tree` does for numbers: y float32 (N,), votes float32 (N,), means of leaves instead of shares."""
    N, M = X.shape
    weight, state = draw_bag(N, seed)
    feature, threshold, bounds, rows, spare = plant(weight)
    value = np.zeros(NODES, np.float32)
    low, high, cut = np.empty(M, np.float32), np.empty(M, np.float32), np.empty(M, np.float32)
    left_weight = np.empty(M, np.float32)  # at or below the cut
    left_sum = np.empty(M, np.float32)
    for node in range(NODES):
        start, stop = bounds[node]
        if start == stop:
            continue

        # The mean, which is the prediction if the node is a leaf.
        all_weight = np.float32(0.0)
        total = np.float32(0.0)
        varies = False
        for j in range(start, stop):
            all_weight += weight[rows[j]]
            total += weight[rows[j]] * y[rows[j]]
            varies |= y[rows[j]] != y[rows[start]]
        value[node] = total / all_weight
        if not varies or node >= 2**MAX_DEPTH - 1:
            continue

        # Weights, and weighted sums of y, at or below a random cut of each feature.
        state = draw_cuts(X, rows[start:stop], state, low, high, cut)
        left_weight[:] = np.float32(0.0)
        left_sum[:] = np.float32(0.0)
        for j in range(start, stop):
            row = X[rows[j]]
            w = weight[rows[j]]
            weighted_y = w * y[rows[j]]
            for f in range(M):
                is_left = row[f] <= cut[f]
                left_weight[f] += w if is_left else np.float32(0.0)
                left_sum[f] += weighted_y if is_left else np.float32(0.0)

        # The best cut.
        best = np.float32(-1.0)
        for f in range(M):
            if not high[f] > low[f] + np.float32(1e-7):  # it was not cut
                continue
            right_sum = total - left_sum[f]
            gain = left_sum[f] * left_sum[f] / left_weight[f] + right_sum * right_sum / (all_weight - left_weight[f])
            if gain > best:
                best = gain
                feature[node] = f
                threshold[node] = cut[f]
        if feature[node] < 0:
            continue
        split(node, X[:, feature[node]], threshold[node], rows, spare, bounds)

    # Predictions for the rows outside the bag.
    for i in range(N):
        if weight[i] == 0:
            counts[i] += 1
            votes[i] += value[find_leaf(X[i], feature, threshold)]
