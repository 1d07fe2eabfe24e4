"""Scalars that are correlated within one table ("meta" sampling), and random weights.

The two need each other: a random weight has two scalars, and a categorical choice may have random weights.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from priors.floats import FASTMATH, exponential, fill_normals, integer_below, scramble
from priors.random import random_key

LOCAL = ""  # the name of draws that are independent of all others


class Scalars:
    """Source of every scalar decision of one table.

    All draws with one name follow one Beta(st, s(1-t)) with t ~ U(0,1) and s ~ LogU(0.1, 10000), drawn when the name
    is first used. So a hyperparameter may be nearly constant within a table (large s), take only its two extremes
    (small s), or anything in between.

    skewed_choices: categorical choices with one name share random probabilities (the corrected preset) instead of
        uniform ones (the released preset)
    """

    def __init__(self, rng: np.random.Generator, skewed_choices: bool):
        self.rng = rng
        self.skewed_choices = skewed_choices
        self._beta: dict[str, tuple[float, float]] = {}
        self._units: dict[str, list[float]] = {}
        self._thresholds: dict[tuple[str, int], list[float]] = {}

    def beta(self, name: str) -> tuple[float, float]:
        """The parameters (a, b) of the name's Beta distribution in this table."""
        if name not in self._beta:
            t = self.rng.random()
            s = math.exp(self.rng.uniform(math.log(0.1), math.log(1e4)))
            self._beta[name] = (s * t, s * (1 - t))
        return self._beta[name]

    def unit(self, name: str) -> float:
        """One draw in [0, 1]."""
        if name == LOCAL:
            return self.rng.random()
        # A block of 16 costs little more than one draw.
        units = self._units.get(name)
        if not units:
            units = self._units[name] = self.rng.beta(*self.beta(name), 16).tolist()
        return units.pop()

    def real(self, name: str, low: float, high: float, log: bool = False, edges: bool = False) -> float:
        """One draw in [low, high], linear in the logarithm if `log`; edges: both ends have a mass of their own."""
        # The call of `unit` is avoided while a block lasts, since there are 500 draws a table.
        units = self._units.get(name)
        u = units.pop() if units else self.unit(name)
        # If u is uniform, each end has probability 1/12.
        if edges:
            u = min(max(1.2 * u - 0.1, 0.0), 1.0)
        if log:
            return low * (high / low) ** u
        return low + (high - low) * u

    def reals(
        self, name: str, size: int, low: float, high: float, log: bool = False, edges: bool = False
    ) -> np.ndarray:
        """float64 (size,): draws as of `real`."""
        # The commonest case: 1 us instead of 7.
        if size == 1:
            return np.array([self.real(name, low, high, log, edges)])
        if name == LOCAL:
            u = self.rng.random(size)
        else:
            a, b = self.beta(name)
            u = self.rng.beta(a, b, size)
        # np.clip would take twice the time, and a power ten times that of the exponential.
        if edges:
            u = np.minimum(np.maximum(1.2 * u - 0.1, 0.0), 1.0)
        if log:
            return low * np.exp(math.log(high / low) * u)
        return low + (high - low) * u

    def integer(self, name: str, low: int, high: int, log: bool = False, edges: bool = False) -> int:
        """One integer in low..high-1."""
        return min(int(self.real(name, low, high, log, edges)), high - 1)

    def choice(self, name: str, options: Sequence):
        """One of the options."""
        if not self.skewed_choices:
            return options[int(self.rng.random() * len(options))]
        # The probabilities, drawn once for each name and number of options.
        key = (name, len(options))
        if key not in self._thresholds:
            weights = Weights.draw(self, len(options)).compute(self.rng)[0]
            self._thresholds[key] = np.cumsum(weights).tolist()
        thresholds = self._thresholds[key]
        # The first option whose threshold is u or more.
        u = self.rng.random() * thresholds[-1]
        return options[bisect.bisect_left(thresholds, u)]

    def flag(self, name: str) -> bool:
        """One choice between False and True."""
        return self.choice(name, (False, True))


@dataclass
class Weights:
    """A batch of positive vectors of L2 norm sqrt(size), from all entries equal to one entry dominating.

    Before shuffling, the logarithm of the i-th entry is -slope * log(i) plus Gaussian noise of deviation `spread`.
    """

    size: int
    slope: np.ndarray  # (batch,)
    spread: np.ndarray  # (batch,)

    @classmethod
    def draw(cls, scalars: Scalars, size: int, batch: int = 1) -> Weights:
        # With the smallest slope and without noise, no weight is below exp(-0.1) = 0.9 of the largest.
        slope = scalars.reals("weights.slope", batch, 0.1 / math.log(1 + size), 6.0, log=True, edges=True)
        spread = scalars.reals("weights.spread", batch, 1e-4, 10.0, log=True)
        return cls(size, slope, spread)

    def compute(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, size)."""
        w = np.empty((len(self.slope), self.size), np.float32)
        fill_weights(w, self.slope, self.spread, random_key(rng))
        return w


@njit("void(f4[:, ::1], f8[::1], f8[::1], u8)", cache=True, fastmath=FASTMATH)
def fill_weights(out, slope, spread, key):
    """Fill each row of out (batch, n) with softmax(-slope log(i) + spread * normal), shuffled, of L2 norm sqrt(n)."""
    batch, n = out.shape
    log_rank = np.log(np.arange(1, n + 1)).astype(np.float32)
    flat = out.reshape(-1)
    fill_normals(flat, key)
    key += np.uint64(out.size)
    for r in range(batch):
        row = out[r]
        # Logarithms of the weights, and the largest: exponentials of differences from it do not overflow.
        a, b = np.float32(slope[r]), np.float32(spread[r])
        highest = np.float32(-np.inf)
        for i in range(n):
            row[i] = b * row[i] - a * log_rank[i]
            highest = max(highest, row[i])
        # Scale to the norm; so there is no need for the sum of a softmax.
        square = np.float32(0.0)
        for i in range(n):
            row[i] = exponential(row[i] - highest)
            square += row[i] * row[i]
        scale = np.float32(math.sqrt(n / square))
        for i in range(n):
            row[i] *= scale
        # Weights are in the order of their ranks: shuffle them (Fisher and Yates).
        for i in range(n - 1, 0, -1):
            j = integer_below(scramble(key), i + 1)
            key += np.uint64(1)
            row[i], row[j] = row[j], row[i]
