"""Gaussian noise on the outputs of a layer of mlp_scm and tree_scm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.random import normals


@dataclass(frozen=True)
class LayerNoise:
    """std: standard deviation of the noise
    varies: `std` is instead the scale from which each output draws a standard deviation of its own, std |N(0,1)|
    """

    std: float
    varies: bool

    def __str__(self) -> str:
        return f"noise {'up to about ' if self.varies else ''}{self.std:.2g}"

    def draw_stds(self, rng: np.random.Generator, num_outputs: int) -> torch.Tensor:
        """Standard deviation of every output's noise, float32 (num_outputs,)."""
        stds = torch.full((num_outputs,), self.std)
        return stds.mul_(normals(rng, num_outputs).abs()) if self.varies else stds
