"""Random matrices with rows of L2 norm 1."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from priors.graph.activations import PlainActivation
from priors.graph.noise import normals
from priors.graph.scalars import Scalars
from priors.graph.weights import Weights

KINDS = ("gaussian", "weights", "singular_values", "kernel", "activation")


def normalise_rows(matrix: np.ndarray) -> np.ndarray:
    """The last axis to L2 norm 1 (+1e-6), in place."""
    norm = np.sqrt(np.einsum("...i,...i->...", matrix, matrix))
    matrix /= (norm + np.float32(1e-6))[..., None]
    return matrix


@dataclass
class MixturePoints:
    """Points from a Gaussian mixture whose components differ in share, shape and size."""

    dim: int
    shares: Weights = field(repr=False)  # one vector over the components
    shapes: Weights = field(repr=False)  # one vector over the dimensions a component

    @classmethod
    def draw(cls, scalars: Scalars, dim: int = 3) -> MixturePoints:
        components = scalars.integer("mixture.components", 1, 16, log=True)
        return cls(dim, Weights.draw(scalars, components), Weights.draw(scalars, dim, batch=components))

    def compute(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """float32 (size, dim)."""
        components = self.shares.size
        centres = normals(rng, components, self.dim)
        g, h = rng.standard_normal(2)
        size_of = np.exp(g + h * rng.standard_normal(components)).astype(np.float32)
        spread = normals(rng, components, self.dim, self.dim)
        spread *= self.shapes.compute(rng)[:, None, :] * size_of[:, None, None]
        shares = np.cumsum(self.shares.compute(rng)[0])
        chosen = np.searchsorted(shares, rng.random(size) * shares[-1]).clip(max=components - 1)
        points = normals(rng, size, self.dim)
        return centres[chosen] + np.einsum("sij,sj->si", spread[chosen], points)


@dataclass
class Matrix:
    """A batch of random matrices (batch, n, m) of one kind."""

    kind: str
    batch: int
    n: int
    m: int
    weights: Weights | None = field(default=None, repr=False)
    points: tuple[MixturePoints, MixturePoints] | None = None
    decay: float = 0.0
    activation: PlainActivation | None = None
    inner: Matrix | None = None

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, batch: int = 1, kinds: tuple[str, ...] = KINDS) -> Matrix:
        kind = scalars.choice("matrix" if kinds is KINDS else "inner_matrix", kinds)
        matrix = cls(kind, batch, n, m)
        if kind == "weights":
            matrix.weights = Weights.draw(scalars, m, batch * n)
        elif kind == "singular_values":
            matrix.weights = Weights.draw(scalars, min(n, m), batch)
        elif kind == "kernel":
            matrix.points = (MixturePoints.draw(scalars), MixturePoints.draw(scalars))
            matrix.decay = scalars.real("matrix.decay", 0.1, 10.0, log=True)
        elif kind == "activation":
            matrix.inner = cls.draw(scalars, n, m, batch, KINDS[:-1])
            matrix.activation = PlainActivation.draw(scalars)
        return matrix

    def __str__(self) -> str:
        return f"{self.activation} of {self.inner}" if self.inner else self.kind

    def compute(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, n, m), each row of L2 norm 1."""
        matrix = self._raw(rng)
        if self.kind != "gaussian":  # where it would be the same distribution
            matrix += np.float32(1e-6) * normals(rng, *matrix.shape)
        return normalise_rows(matrix)

    def _raw(self, rng: np.random.Generator) -> np.ndarray:
        shape = (self.batch, self.n, self.m)
        if self.kind == "gaussian":
            return normals(rng, *shape)
        if self.kind == "weights":
            return normals(rng, *shape) * self.weights.compute(rng).reshape(shape)
        if self.kind == "singular_values":
            k = self.weights.size
            left = normals(rng, self.batch, self.n, k)
            right = normals(rng, self.batch, k, self.m)
            return (left * self.weights.compute(rng)[:, None, :]) @ right
        if self.kind == "kernel":
            a = self.points[0].compute(rng, self.batch * self.n).reshape(self.batch, self.n, -1)
            b = self.points[1].compute(rng, self.batch * self.m).reshape(self.batch, self.m, -1)
            square = np.square(a).sum(-1)[:, :, None] + np.square(b).sum(-1)[:, None, :] - 2 * a @ b.transpose(0, 2, 1)
            matrix = np.exp(np.float32(-self.decay) * np.sqrt(square.clip(min=0)))
            matrix *= rng.integers(0, 2, shape, dtype=np.int8) * np.float32(2) - np.float32(1)
            return matrix
        matrix = self.activation(torch.from_numpy(self.inner.compute(rng)), -1).numpy()
        return matrix + np.float32(1e-3) * normals(rng, *shape)
