"""Heavy tails and rounding of the numeric columns of a raw table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from priors.finish import clamp_and_standardize
from priors.realism.raw import Raw, some_columns

LOOKED_AT = 50  # rows by which numbers are told from categories
STRETCHES = (0.5, 2.0)  # factors in the hyperbolic sine, by strength; near the mean it changes little
LOG_STDS = (0.4, 1.6)  # standard deviations of the logarithm
STEPS = (0.03, 1.0)  # between rounded values, in standard deviations
HEAP = 5  # steps from one heaped value to the next

Change = Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def make_tails_heavy(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Stretch numeric columns far from their mean, on both sides, or on one as in a log-normal distribution."""
    return change_columns(raw, strength, rng, (stretch_both_tails, stretch_one_tail))


def round_numbers(raw: Raw, strength: float, rng: np.random.Generator) -> str:
    """Round numeric columns to a step, to one or two significant digits, or in some rows to multiples of five steps."""
    return change_columns(raw, strength, rng, (round_to_step, round_to_digits, round_to_heaps))


def change_columns(raw: Raw, strength: float, rng: np.random.Generator, changes: tuple[Change, ...]) -> str:
    """Apply one of the changes to each of some numeric columns, standardized; the others stay as they are."""
    picked = some_columns(raw.columns.shape[1], rng.uniform(0.2, 1.0), rng)
    kinds = rng.integers(len(changes), size=len(picked))
    first = np.sort(raw.columns[:LOOKED_AT, picked], axis=0)
    is_numeric = (np.diff(first, axis=0) > 0).sum(0) >= len(first) // 2
    picked, kinds = picked[is_numeric], kinds[is_numeric]
    values = clamp_and_standardize(torch.from_numpy(raw.columns[:, picked])).numpy()  # (N, K)
    texts = []
    for kind, change in enumerate(changes):
        own = kinds == kind
        if own.any():
            raw.columns[:, picked[own]] = change(values[:, own], strength, rng)
            texts.append(f"{change.__name__.replace('_', ' ')}: columns {', '.join(map(str, picked[own]))}")
    return "; ".join(texts) or "no numeric column changed"


def between(bounds: tuple[float, float], strength: float) -> float:
    """The geometric interpolation between two positive numbers."""
    return bounds[0] * (bounds[1] / bounds[0]) ** strength


def stretch_both_tails(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    return np.sinh(np.float32(between(STRETCHES, strength)) * z)


def stretch_one_tail(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    sides = np.where(rng.random(z.shape[1]) < 0.7, 1, -1).astype(np.float32)  # most long tails are on the right
    return sides * np.exp(sides * np.float32(between(LOG_STDS, strength)) * z)


def round_to_step(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    step = np.float32(between(STEPS, strength) * rng.uniform(0.7, 1.4))
    return np.rint(z / step) * step


def round_to_digits(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    digits = 2 if strength < 0.5 else 1
    scale = np.float32(10) ** rng.random(z.shape[1], dtype=np.float32)  # where the powers of ten lie
    x = (z + rng.uniform(0, 2, z.shape[1]).astype(np.float32)) * scale
    unit = np.float32(10) ** (np.floor(np.log10(np.maximum(np.abs(x), 1e-3))) - np.float32(digits - 1))
    return np.rint(x / unit) * unit


def round_to_heaps(z: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    step = np.float32(between(STEPS, strength))
    is_heaped = rng.random(z.shape, dtype=np.float32) < rng.uniform(0.3, 0.9)
    fine = step / HEAP
    return np.where(is_heaped, np.rint(z / step) * HEAP, np.rint(z / fine)) * fine
