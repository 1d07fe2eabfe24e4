"""RandomWeights: positive vectors that are anything from equal to dominated by one entry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from priors.graph.scalars import Scalars
from priors.random import random_key


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
        from priors.graph.draws import fill_weights

        w = np.empty((len(self.slope), self.size), np.float32)
        fill_weights(w, self.slope, self.spread, random_key(rng))
        return w
