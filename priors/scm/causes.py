"""What mlp_scm and tree_scm draw independently of all else: causes, which are their roots, and noise of layers.

Source: TabICL, arXiv 2502.05564, appendix.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from priors.random import normals

CAUSE_SAMPLINGS = ("normal", "mixed", "uniform")


@dataclass(frozen=True)
class Causes:
    """Independent root variables: of each "normal" or a name from SAMPLERS, and moments of the normal ones."""

    kinds: tuple[str, ...]
    means: np.ndarray
    stds: np.ndarray

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(self.kinds).items())
        return f"{len(self.kinds)} causes: {kinds}"


def plan_causes(rng: np.random.Generator, number: int, sampling: str, random_moments: bool) -> Causes:
    """Kinds and moments; with random_moments, normal causes have a mean m ~ N(0,1) and a deviation |m N(0,1)|."""
    if sampling == "mixed":
        # The kinds are tried in this order, and each passes a cause on to the next with a probability of its own.
        normal, categorical, zipf = rng.uniform(0, 0.66, 3)
        draws = rng.random((3, number))
        kinds = np.select(
            [draws[0] > normal, draws[1] > categorical, draws[2] > zipf], ["normal", "categorical", "zipf"], "uniform"
        ).tolist()
    else:
        kinds = [sampling] * number
    means, stds = np.zeros(number), np.ones(number)
    if random_moments:
        means = rng.standard_normal(number)
        stds = np.abs(means * rng.standard_normal(number))
    return Causes(tuple(kinds), means, stds)


def sample_causes(causes: Causes, num_rows: int, rng: np.random.Generator) -> torch.Tensor:
    """The causes' values, float32 (num_rows, number)."""
    columns = normals(rng, num_rows, len(causes.kinds))
    columns *= torch.from_numpy(causes.stds.astype(np.float32))
    columns += torch.from_numpy(causes.means.astype(np.float32))
    for j, kind in enumerate(causes.kinds):
        if kind != "normal":
            columns[:, j] = torch.from_numpy(SAMPLERS[kind](rng, num_rows))
    return columns


def sample_categorical(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """float64 (num_rows,): 2 to 20 equidistant values with probabilities proportional to U(0,1), standardized."""
    weights = rng.random(rng.integers(2, 21))
    codes = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(num_rows))
    return (codes - codes.mean()) / max(codes.std(ddof=1), 1e-6)


def sample_zipf(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """float64 (num_rows,): Zipf with an exponent in 2..4, clipped at 10, centered."""
    values = np.minimum(rng.zipf(rng.uniform(2, 4), num_rows), 10)
    return values - values.mean()


def sample_uniform(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    return rng.random(num_rows, dtype=np.float32)


SAMPLERS = {"categorical": sample_categorical, "zipf": sample_zipf, "uniform": sample_uniform}


@dataclass(frozen=True)
class LayerNoise:
    """Gaussian noise on the outputs of a layer; if it varies, each output has a deviation of its own, std |N(0,1)|."""

    std: float
    varies: bool

    def __str__(self) -> str:
        return f"noise {'up to about ' if self.varies else ''}{self.std:.2g}"

    def draw_stds(self, rng: np.random.Generator, num_outputs: int) -> torch.Tensor:
        """Standard deviation of every output's noise, float32 (num_outputs,)."""
        stds = torch.full((num_outputs,), self.std)
        return stds.mul_(normals(rng, num_outputs).abs()) if self.varies else stds
