"""Scalars that are correlated inside one table ("meta" sampling)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LOCAL = ""  # the name of draws that are independent of all others


class Scalars:
    """Source of every scalar decision of one table.

    All draws of one name follow one Beta(st, s(1-t)), t ~ U(0,1), s ~ LogU(0.1, 10000), drawn at the name's first use:
    within a table a hyper-parameter may be nearly constant (large s), all-or-nothing (small s) or anything between.
    skewed_choices: choices of one name share random probabilities (the corrected preset) instead of uniform ones.
    """

    def __init__(self, rng: np.random.Generator, skewed_choices: bool):
        self.rng = rng
        self.skewed_choices = skewed_choices
        self._laws: dict[str, tuple[float, float]] = {}
        self._units: dict[str, list[float]] = {}
        self._thresholds: dict[tuple[str, int], list[float]] = {}

    def law(self, name: str) -> tuple[float, float]:
        """The parameters (a, b) of the Beta distribution of a name in this table."""
        if name not in self._laws:
            t, log_s = self.rng.random(), self.rng.uniform(math.log(0.1), math.log(1e4))
            self._laws[name] = (math.exp(log_s) * t, math.exp(log_s) * (1 - t))
        return self._laws[name]

    def unit(self, name: str) -> float:
        """One draw in [0, 1]."""
        if name == LOCAL:
            return self.rng.random()
        units = self._units.get(name)
        if not units:  # a block of 16 costs little more than one draw
            units = self._units[name] = self.rng.beta(*self.law(name), 16).tolist()
        return units.pop()

    def real(self, name: str, low: float, high: float, log: bool = False, edges: bool = False) -> float:
        """A draw over [low, high]; `edges` gives both ends a mass of their own (each 1/12 of a uniform draw)."""
        u = self.unit(name)
        if edges:
            u = min(max(1.2 * u - 0.1, 0.0), 1.0)
        return low * (high / low) ** u if log else low + (high - low) * u

    def reals(
        self, name: str, size: int, low: float, high: float, log: bool = False, edges: bool = False
    ) -> np.ndarray:
        if size == 1:  # most often: 1 us instead of 7
            return np.array([self.real(name, low, high, log, edges)])
        u = self.rng.random(size) if name == LOCAL else self.rng.beta(*self.law(name), size)
        if edges:
            u = np.clip(1.2 * u - 0.1, 0.0, 1.0)
        return low * (high / low) ** u if log else low + (high - low) * u

    def integer(self, name: str, low: int, high: int, log: bool = False, edges: bool = False) -> int:
        """An integer in low..high-1."""
        return min(int(self.real(name, low, high, log, edges)), high - 1)

    def choice(self, name: str, options: Sequence):
        if not self.skewed_choices:
            return options[int(self.rng.random() * len(options))]
        key = (name, len(options))
        if key not in self._thresholds:
            from priors.graph.weights import Weights

            self._thresholds[key] = np.cumsum(Weights.draw(self, len(options)).compute(self.rng)[0]).tolist()
        thresholds = self._thresholds[key]
        u = self.rng.random() * thresholds[-1]
        return next(option for option, threshold in zip(options, thresholds, strict=True) if u <= threshold)

    def flag(self, name: str) -> bool:
        return self.choice(name, (False, True))
