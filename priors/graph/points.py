"""Random points: the values of root nodes and the embeddings of categories (TabICLv2, arXiv 2602.11139, appendix)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from priors.graph.functions import Function, draw_function
from priors.graph.noise import Noise
from priors.graph.scalars import Scalars, Weights
from priors.random import random_key

BASES = ("cube", "ball", "normal", "correlated")


@dataclass
class Points:
    """Points of a simple distribution, passed through a random function R^n -> R^n.

    base: one of BASES
    n: dimension of the points
    gaussian: whether "correlated" points are transformed Gaussian or uniform ones
    axes: scales of the columns of the transformation of "correlated" points
    """

    base: str
    n: int
    function: Function
    gaussian: bool = True
    axes: Weights | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, scalars: Scalars, n: int, size: int) -> Points:
        """Decide the law of `size` points of dimension n."""
        points = cls(scalars.choice("points", BASES), n, draw_function(scalars, n, n, size))
        if points.base == "correlated":
            points.gaussian = scalars.flag("points.gaussian")
            points.axes = Weights.draw(scalars, n)
        return points

    def __str__(self) -> str:
        return f"{self.base} points -> {self.function}"

    def compute(self, size: int, noise: Noise) -> torch.Tensor:
        """The points, float32 (n, size)."""
        return self.function(self.compute_base(size, noise), noise)

    def compute_base(self, size: int, noise: Noise) -> torch.Tensor:
        """The points before the function, float32 (n, size)."""
        if self.base == "cube":
            return cube(self.n, size, noise)
        if self.base == "normal":
            return noise.normal(self.n, size)
        if self.base == "ball":
            return ball(self.n, size, noise)
        x = noise.normal(self.n, size) if self.gaussian else cube(self.n, size, noise)
        return (noise.parameter(self.n, self.n) * noise.tensor(self.axes.compute(noise.rng))) @ x


def ball(n: int, size: int, noise: Noise) -> torch.Tensor:
    """Uniform points in the unit ball of dimension n, float32 (n, size)."""
    if noise.generator is None:
        from priors.graph.draws import ball_points

        return torch.from_numpy(ball_points(n, size, random_key(noise.rng)))
    x = noise.normal(n, size)
    radius = noise.uniform(1, size).pow_(1 / n)
    return x.mul_(radius.div_(x.norm(dim=0, keepdim=True).clamp_(min=1e-30)))


def cube(n: int, size: int, noise: Noise) -> torch.Tensor:
    """Uniform points in [-1, 1]^n, float32 (n, size)."""
    if noise.generator is None:
        from priors.graph.draws import cube_points

        return torch.from_numpy(cube_points(n, size, random_key(noise.rng)))
    return noise.uniform(n, size).mul_(2).sub_(1)
