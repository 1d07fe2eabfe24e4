"""Hyperparameters of the TabICL v1 priors (arXiv 2502.05564, appendix): distributions that are drawn themselves.

They are drawn once per group of tables. See `Group` in priors/mlp_scm.py for the hyperparameters and their ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from priors.random import as_seed, lasting_rng
from priors.table import TableSpec


def group_rng(spec: TableSpec, seed: tuple[int, ...]) -> np.random.Generator:
    """Generator of the hyperparameters of a group; a table without a group is a group of its own."""
    return lasting_rng(seed[:-1] if spec.group_seed is None else as_seed(spec.group_seed), "group", seed)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def scaled_normal(rng: np.random.Generator, max_mean: float, min_mean: float) -> float:
    """A draw from a normal truncated to positive values.

    Its mean is log-uniform in min_mean..max_mean, its standard deviation log-uniform in 1 % to 100 % of the mean.
    """
    mean = log_uniform(rng, min_mean, max_mean)
    std = mean * log_uniform(rng, 0.01, 1.0)
    while (draw := rng.normal(mean, std)) < 0:
        pass
    return float(draw)


def scaled_count(rng: np.random.Generator, max_mean: float, min_mean: float, lower: int) -> int:
    """`lower` plus a rounded scaled_normal."""
    return lower + round(scaled_normal(rng, max_mean, min_mean))


def choice_weights(rng: np.random.Generator, num_options: int) -> np.ndarray:
    """Probabilities of a choice: the softmax of 1 for the first option and U(-3, 5) for each of the others."""
    logits = np.append(1.0, rng.uniform(-3, 5, num_options - 1))
    weights = np.exp(logits)
    return weights / weights.sum()


def choose(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """One of the options, with choice_weights as probabilities."""
    return options[rng.choice(len(options), p=choice_weights(rng, len(options)))]
