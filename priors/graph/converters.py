"""From a slice of a node to a column, and to the values that flow on (TabICLv2, arXiv 2602.11139, appendix)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from priors.floats import FASTMATH, accurate_power, exponential, scramble, uniform
from priors.graph.activations import standardize_feature
from priors.graph.functions import Function, Points, draw_cheap_function, nearest_centers, random_centers
from priors.graph.scalars import LOCAL, Scalars, Weights
from priors.random import random_key

NUMERIC_MODES = ("identity", "warp")
CATEGORICAL_MODES = (
    "neighbor_id",
    "neighbor_disc",
    "neighbor_func",
    "neighbor_int",
    "softmax_id",
    "softmax_disc",
    "softmax_int",
)


@dataclass
class Numeric:
    """A numeric column of width 1: the values themselves, or their Kumaraswamy warp.

    mode: one of NUMERIC_MODES
    a, b: exponents of the warp
    warp_flow: whether the warped values flow on, as in the released generator, or the raw ones (corrected preset)
    """

    mode: str
    a: float = 1.0
    b: float = 1.0
    warp_flow: bool = False
    width: int = 1

    @classmethod
    def draw(cls, scalars: Scalars, warp_flow: bool) -> Numeric:
        mode = scalars.choice("numeric", NUMERIC_MODES)
        if mode == "identity":
            return cls(mode)
        a = scalars.real("numeric.a", 0.2, 5.0, log=True)
        b = scalars.real("numeric.b", 0.2, 5.0, log=True)
        return cls(mode, a, b, warp_flow)

    def __str__(self) -> str:
        if self.mode == "identity":
            return "numeric"
        return f"numeric warp({self.a:.2g}, {self.b:.2g})"


def convert_numeric(x: np.ndarray, converters: list[Numeric]) -> tuple[np.ndarray, np.ndarray]:
    """Convert all numeric columns of a node at once: warp some, and leave the others as they are.

    Parameters
    ----------
    x : np.ndarray
        Float32 (k, N), the values of the node for each of the columns.
    converters : list of Numeric
        Those of the k columns.

    Returns
    -------
    columns : np.ndarray
        Float32 (k, N).
    flow : np.ndarray
        Float32 (k, N), the values that the children of the node get. Both may be x itself.
    """
    warped = [i for i, converter in enumerate(converters) if converter.mode == "warp"]
    if not warped:
        return x, x
    # The exponents of each warp.
    a = np.array([converters[i].a for i in warped], np.float32)
    b = np.array([converters[i].b for i in warped], np.float32)
    columns = x.copy()
    warp_features(columns, np.array(warped), a, b)
    # It depends on the preset alone, so all warps of a table have the same.
    warp_flow = converters[warped[0]].warp_flow
    return columns, (columns if warp_flow else x)


@dataclass
class Categorical:
    """A column of `cardinality` categories, read from `width` values per row.

    mode: one of CATEGORICAL_MODES. Before the underscore stands how a category is found: "neighbor", as the nearest of
        some rows, or "softmax", as a draw from a softmax. Behind it stands what flows on: "id", the values themselves;
        "disc", the center or the embedding of the category; "func", a function of the center; "int", the category
    p: exponent of the distance sum |x - c|^p to a center
    function: what flows on in mode "neighbor_func"
    factor: of the standardized logits
    shares: of the categories, whose logarithms are added to the logits
    embedding: of the categories in mode "softmax_disc"
    """

    mode: str
    cardinality: int
    width: int
    p: float = 2.0
    function: Function | None = None
    factor: float = 1.0
    shares: Weights | None = field(default=None, repr=False)
    embedding: Points | None = None

    @classmethod
    def draw(cls, scalars: Scalars, cardinality: int, num_rows: int) -> Categorical:
        mode = scalars.choice("categorical", CATEGORICAL_MODES)
        converter = cls(mode, cardinality, width=cardinality)
        if mode.startswith("neighbor"):
            # In some columns, fewer values than categories decide which center is near.
            if scalars.flag("categorical.narrow"):
                converter.width = scalars.integer(LOCAL, 1, cardinality, log=True)
            converter.p = scalars.real("categorical.p", 0.5, 4.0, log=True)
            if mode == "neighbor_func":
                converter.function = draw_cheap_function(scalars, converter.width, converter.width, num_rows)
        else:
            converter.factor = scalars.real("categorical.factor", 0.1, 10.0, log=True)
            converter.shares = Weights.draw(scalars, cardinality)
            if mode == "softmax_disc":
                converter.embedding = Points.draw(scalars, cardinality, cardinality)
        return converter

    def __str__(self) -> str:
        text = f"{self.cardinality} categories {self.mode}"
        if self.function:
            text += f"({self.function})"
        return text

    def __call__(
        self, x: np.ndarray, rng: np.random.Generator, flows: bool = True
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """x (width, N) -> categories int64 (N,), values that flow on float32 (width, N), or None unless `flows`."""
        # The categories; a table with fewer rows than categories has fewer centers.
        if self.mode.startswith("neighbor"):
            num_rows = x.shape[1]
            points = random_centers(x, min(self.cardinality, num_rows), rng)  # (categories, width)
            index = nearest_centers(x, points, self.p)
        else:
            index = self.sample_softmax(x, rng)

        # What flows on.
        if not flows:
            return index, None
        match self.mode:
            case "neighbor_id" | "softmax_id":
                return index, x
            case "neighbor_disc":
                return index, points.T.take(index, axis=1)
            case "neighbor_func":
                return index, self.function(points.T.take(index, axis=1), rng)
            case "softmax_disc":
                return index, self.embedding.compute(self.cardinality, rng).take(index, axis=1)
        return index, np.broadcast_to(index.astype(np.float32), x.shape)

    def sample_softmax(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Categories int64 (N,) drawn from the softmax over the standardized values of each row of x (width, N)."""
        # 1e-4 keeps the logarithm of a negligible share above -9.3.
        log_shares = np.log(self.shares.compute(rng)[0] + np.float32(1e-4))
        return sample_softmax(x, np.float32(self.factor), log_shares, random_key(rng))


Converter = Numeric | Categorical


@njit("void(f4[:, ::1], i8[::1], f4[::1], f4[::1])", cache=True, fastmath=FASTMATH, error_model="numpy")
def warp_features(x, features, a, b):
    """1 - (1 - u^a)^b of some features (k,) of x (n, N), in place; u are their values scaled to [0, 1]; a, b (k,)."""
    one = np.float32(1.0)
    for i in range(len(features)):
        row = x[features[i]]
        # The range. Minima and maxima pass over NaN, which the sum of zeros keeps.
        low, high, total = row[0], row[0], np.float32(0.0)
        for j in range(len(row)):
            low, high = min(low, row[j]), max(high, row[j])
            total += row[j] * np.float32(0.0)
        if total != total:
            row[:] = np.nan
            continue
        # The distribution function of Kumaraswamy. A constant feature has u = 0.
        span = max(high - low, np.float32(1e-30))
        for j in range(len(row)):
            u = accurate_power(min((row[j] - low) / span, one), a[i])
            row[j] = one - accurate_power(max(one - u, np.float32(0.0)), b[i])


@njit("i8[::1](f4[:, ::1], f4, f4[::1], u8)", cache=True, fastmath=FASTMATH, error_model="numpy")
def sample_softmax(x, factor, log_shares, key):
    """Draw a category for each row from the softmax of factor * standardized x + log_shares, by its inverse CDF.

    Parameters
    ----------
    x : ndarray
        float32 (k, N): a value for each of k categories, standardized over the N rows.
    factor : float
        Of the standardized values: the larger, the more x decides.
    log_shares : ndarray
        float32 (k,), added to the logits of all rows.
    key : int
        uint64, the first of N counters of random numbers, one for each row.

    Returns
    -------
    ndarray
        int64 (N,), categories 0, ..., k - 1.
    """
    # Logits, and the largest of each row. Those that are not finite count as 0 (the appendix of TabICLv2).
    k, rows = x.shape
    logits = np.empty((k, rows), np.float32)
    highest = np.full(rows, np.float32(-np.inf))
    for i in range(k):
        row = logits[i]
        share = log_shares[i]
        row[:] = x[i]
        standardize_feature(row, factor)
        for j in range(rows):
            logit = row[j] + share
            logit = logit if abs(logit) < np.float32(np.inf) else np.float32(0.0)
            row[j] = logit
            highest[j] = max(highest[j], logit)

    # The CDF, not yet divided by its last value: running sums of exponentials, in the place of the logits
    cumulative = logits
    total = np.zeros(rows, np.float32)
    for i in range(k):
        row = cumulative[i]
        for j in range(rows):
            total[j] += exponential(row[j] - highest[j])  # at most 1
            row[j] = total[j]

    # A point in [0, total) for each row; its category is how many of the running sums it has passed
    point = total
    for j in range(rows):
        point[j] *= uniform(scramble(key + np.uint64(j)))
    # The last sum is left out: a point may be rounded up to it, and would get category k.
    category = np.zeros(rows, np.int64)
    for i in range(k - 1):
        row = cumulative[i]
        for j in range(rows):
            category[j] += 1 if row[j] <= point[j] else 0
    return category
