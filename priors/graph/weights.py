"""RandomWeights: positive vectors that are anything from equal to dominated by one entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from priors.graph.noise import normals
from priors.graph.scalars import Scalars


@dataclass
class Weights:
    """A batch of positive vectors of one size with L2 norm sqrt(size).

    The logarithm of the i-th entry before shuffling is -slope * log(i) plus Gaussian noise of deviation `spread`.
    """

    size: int
    slope: np.ndarray  # (batch,)
    spread: np.ndarray  # (batch,)

    @classmethod
    def draw(cls, scalars: Scalars, size: int, batch: int = 1) -> Weights:
        slope = scalars.reals("weights.slope", batch, 0.1 / math.log(1 + size), 6.0, log=True, edges=True)
        return cls(size, slope, scalars.reals("weights.spread", batch, 1e-4, 10.0, log=True))

    def compute(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, size)."""
        batch = len(self.slope)
        log_rank = np.log(np.arange(1, self.size + 1, dtype=np.float32))
        logits = normals(rng, batch, self.size) * self.spread[:, None].astype(np.float32)
        logits -= log_rank * self.slope[:, None].astype(np.float32)
        w = np.exp(logits - logits.max(axis=1, keepdims=True))
        w *= math.sqrt(self.size) / np.sqrt(np.square(w).sum(axis=1, keepdims=True))
        if self.size > 1:
            rng.permuted(w, axis=1, out=w)
        return w
