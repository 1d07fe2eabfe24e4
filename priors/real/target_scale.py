"""A numeric target in standard deviations of its labeled rows, and back."""

from __future__ import annotations

import numpy as np


class TargetScale:
    """Mean and standard deviation of labeled numbers, and the change to and from units of them.

    Divided by a power of two, which is exact, no square of a number overflows or underflows. A difference to one of the
    numbers is exactly 0 if all are equal, and precise if they are large and almost equal.

    std: in units of 2**exponent; 0 if and only if all labeled numbers are equal
    """

    def __init__(self, y: np.ndarray) -> None:
        """y: the labeled numbers, finite float64 (n,), n > 0"""
        self.exponent = np.frexp(np.abs(y).max())[1]
        self.first = np.ldexp(y[0], -self.exponent)
        differences = self._differences(y)
        self.mean, self.std = differences.mean(), differences.std()

    def standardize(self, y: np.ndarray) -> np.ndarray:
        """Numbers of the table, float64, in standard deviations from the mean; 0 if labeled ones are all equal."""
        return (self._differences(y) - self.mean) / (self.std or 1.0)

    def restore(self, standardized: np.ndarray) -> np.ndarray:
        """The inverse of standardize; the common number if all labeled ones are equal."""
        return np.ldexp(standardized * self.std + (self.first + self.mean), self.exponent)

    def _differences(self, y: np.ndarray) -> np.ndarray:
        return np.ldexp(y, -self.exponent) - self.first
