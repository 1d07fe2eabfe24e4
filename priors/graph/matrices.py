"""Random matrices with rows of L2 norm 1 (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from priors.graph.activations import PlainActivation
from priors.graph.scalars import Scalars, Weights
from priors.random import normal_array, random_key

NOISE = 1e-6  # on all entries, which gives rows of zeros a direction
ACTIVATION_NOISE = 1e-3  # on those of the kind "activation", where NOISE would be negligible
KINDS = ("gaussian", "weights", "singular_values", "kernel", "activation")


@dataclass
class MixturePoints:
    """Points of a Gaussian mixture whose components differ in share, shape and size.

    shares: one vector over the components
    shapes: one vector over the dimensions for every component
    """

    dim: int
    shares: Weights = field(repr=False)
    shapes: Weights = field(repr=False)

    @classmethod
    def draw(cls, scalars: Scalars, dim: int = 3) -> MixturePoints:
        components = scalars.integer("mixture.components", 1, 16, log=True)
        return cls(dim, Weights.draw(scalars, components), Weights.draw(scalars, dim, batch=components))

    def compute(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """float32 (dim, size)."""
        from priors.graph.draws import mixture_points

        slope = np.concatenate([self.shares.slope, self.shapes.slope])
        spread = np.concatenate([self.shares.spread, self.shapes.spread])
        return mixture_points(size, self.shares.size, self.dim, slope, spread, random_key(rng))


@dataclass
class Matrix:
    """A batch of random matrices (batch, n, m) of one kind.

    kind: one of KINDS
    weights: of the entries of each row ("weights"), or singular values ("singular_values")
    points, decay: two sets of points, and the factor of their distances ("kernel")
    activation, inner: a function, and the matrices it is applied to ("activation")
    """

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
        from priors.graph.draws import normalize_rows

        matrix = self._raw(rng).reshape(self.batch * self.n, self.m)
        # Noise would not change the law of a Gaussian matrix.
        noise = {"gaussian": 0.0, "activation": ACTIVATION_NOISE}.get(self.kind, NOISE)
        normalize_rows(matrix, np.float32(noise), random_key(rng))
        return matrix.reshape(self.batch, self.n, self.m)

    def _raw(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, n, m), before noise is added and rows are normalized."""
        from priors.graph.draws import kernel_matrices, weighted_normals, weighted_products

        shape, weights = (self.batch, self.n, self.m), self.weights
        if self.kind == "gaussian":
            return normal_array(rng, *shape)
        if self.kind == "weights":
            return weighted_normals(self.m, weights.slope, weights.spread, random_key(rng)).reshape(shape)
        if self.kind == "singular_values":
            given = (self.n, weights.size, self.m, weights.slope, weights.spread)
            return weighted_products(*given, random_key(rng)).reshape(shape)
        if self.kind == "kernel":
            a = self.points[0].compute(rng, self.batch * self.n)
            b = self.points[1].compute(rng, self.batch * self.m)
            return kernel_matrices(a, b, self.batch, np.float32(self.decay), random_key(rng)).reshape(shape)
        return self.activation.of_array(self.inner.compute(rng))
