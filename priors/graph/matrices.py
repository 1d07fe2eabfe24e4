"""Random matrices with rows of L2 norm 1 (TabICLv2, arXiv 2602.11139, appendix on the prior)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from priors.floats import FASTMATH, SUMS, exponential, fill_normals, normal_pair, scramble, uniform
from priors.graph.activations import PlainActivation
from priors.graph.scalars import Scalars, Weights, fill_weights
from priors.random import normal_array, random_key

NOISE = 1e-6  # on all entries, which gives rows of zeros a direction
ACTIVATION_NOISE = 1e-3  # on those of the kind "activation", where NOISE would be negligible
KINDS = ("gaussian", "weights", "singular_values", "kernel", "activation")


@dataclass
class MixturePoints:
    """Points of a Gaussian mixture whose components differ in share, shape (over the dimensions) and size."""

    dim: int
    shares: Weights = field(repr=False)
    shapes: Weights = field(repr=False)

    @classmethod
    def draw(cls, scalars: Scalars, dim: int = 3) -> MixturePoints:
        components = scalars.integer("mixture.components", 1, 16, log=True)
        shares = Weights.draw(scalars, components)
        shapes = Weights.draw(scalars, dim, batch=components)
        return cls(dim, shares, shapes)

    def compute(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """float32 (dim, size)."""
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
        # The matrices inside of an activation have choices of their own, since one kind is missing there.
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
            # Any other kind, since activations could nest without end.
            matrix.inner = cls.draw(scalars, n, m, batch, KINDS[:-1])
            matrix.activation = PlainActivation.draw(scalars)
        return matrix

    def __str__(self) -> str:
        if self.inner:
            return f"{self.activation} of {self.inner}"
        return self.kind

    def compute(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, n, m), each row of L2 norm 1."""
        matrix = self._raw(rng).reshape(self.batch * self.n, self.m)
        # Noise would not change the law of a Gaussian matrix.
        noise = {"gaussian": 0.0, "activation": ACTIVATION_NOISE}.get(self.kind, NOISE)
        normalize_rows(matrix, np.float32(noise), random_key(rng))
        return matrix.reshape(self.batch, self.n, self.m)

    def _raw(self, rng: np.random.Generator) -> np.ndarray:
        """float32 (batch, n, m), before noise is added and rows are normalized."""
        shape = (self.batch, self.n, self.m)
        weights = self.weights
        match self.kind:
            case "gaussian":
                return normal_array(rng, *shape)
            case "weights":
                matrix = weighted_normals(self.m, weights.slope, weights.spread, random_key(rng))
            case "singular_values":
                # U diag(w) V, with normal U (n, min(n, m)) and V (min(n, m), m).
                matrix = weighted_products(self.n, weights.size, self.m, weights.slope, weights.spread, random_key(rng))
            case "kernel":
                # exp(-decay |a_i - b_j|) with random signs.
                of_rows, of_columns = self.points
                a = of_rows.compute(rng, self.batch * self.n)
                b = of_columns.compute(rng, self.batch * self.m)
                matrix = kernel_matrices(a, b, self.batch, np.float32(self.decay), random_key(rng))
            case "activation":
                return self.activation(self.inner.compute(rng), -1)
        return matrix.reshape(shape)


@njit("f4[:, ::1](i8, f8[::1], f8[::1], u8)", cache=True)
def weighted_normals(n, slope, spread, key):
    """Standard normals (batch, n) times weights as of fill_weights; slope, spread (batch,)."""
    out = np.empty((len(slope), n), np.float32)
    fill_weights(out, slope, spread, key)
    # A weight takes two counters, one for its noise and one for its place, see fill_weights.
    normal = np.empty(n, np.float32)
    key += np.uint64(2 * out.size)
    for r in range(len(slope)):
        fill_normals(normal, key)
        key += np.uint64(n)
        for i in range(n):
            out[r, i] *= normal[i]
    return out


@njit("f4[:, ::1](i8, i8, i8, f8[::1], f8[::1], u8)", cache=True, fastmath=SUMS)
def weighted_products(n, k, m, slope, spread, key):
    """Products of normal matrices (n, k) and (k, m), weights of fill_weights between them, float32 (batch * n, m)."""
    batch = len(slope)
    weights = np.empty((batch, k), np.float32)
    fill_weights(weights, slope, spread, key)
    key += np.uint64(2 * weights.size)
    # Row r is the sum of left_i * weight_i times row i of `right`, with its own `left` and the `right` of its matrix.
    left = np.empty(k, np.float32)
    right = np.empty((k, m), np.float32)
    out = np.zeros((batch * n, m), np.float32)
    for b in range(batch):
        fill_normals(right.reshape(-1), key)
        key += np.uint64(k * m)
        for r in range(b * n, (b + 1) * n):
            fill_normals(left, key)
            key += np.uint64(k)
            row = out[r]
            for i in range(k):
                factor, other = left[i] * weights[b, i], right[i]
                for j in range(m):
                    row[j] += factor * other[j]
    return out


@njit("f4[:, ::1](i8, i8, i8, f8[::1], f8[::1], u8)", cache=True, fastmath=FASTMATH)
def mixture_points(size, components, dim, slope, spread, key):
    """Points of a Gaussian mixture, float32 (dim, size).

    slope, spread (1 + components,) are of weights (see fill_weights): the components' probabilities, up to a factor,
    and the scales of the columns of each component's Gaussian matrix, which are also multiplied by exp(g + h * normal)
    with g and h shared by the components.
    """
    # Weights: the components' probabilities, (1, components), and the scales of the columns, (components, dim).
    shares = np.empty((1, components), np.float32)
    fill_weights(shares, slope[:1], spread[:1], key)
    key += np.uint64(2 * components)
    shapes = np.empty((components, dim), np.float32)
    fill_weights(shapes, slope[1:], spread[1:], key)
    key += np.uint64(2 * components * dim)

    # All other parameters, standard normal: g, h, sizes (components,), centers, and matrices (components, dim, dim).
    parameters = np.empty(2 + components * (1 + dim + dim * dim), np.float32)
    fill_normals(parameters, key)
    key += np.uint64(len(parameters))
    g, h = parameters[0], parameters[1]
    sizes = parameters[2 : 2 + components]
    centers = parameters[2 + components : 2 + components * (1 + dim)].reshape(components, dim)
    spread = parameters[2 + components * (1 + dim) :].reshape(components, dim, dim)

    # Scale the columns of the matrices.
    for c in range(components):
        for i in range(dim):
            for j in range(dim):
                spread[c, i, j] *= shapes[c, j] * np.exp(g + h * sizes[c])

    # The points: a component by the inverse CDF of the probabilities, then center + matrix @ normal.
    bounds = np.cumsum(shares[0])
    out = np.empty((dim, size), np.float32)
    normal = np.empty(dim + 1, np.float32)
    for r in range(size):
        u = uniform(scramble(key)) * bounds[-1]
        key += np.uint64(1)
        c = 0
        while c < components - 1 and u >= bounds[c]:
            c += 1
        # Normals come in pairs, so an odd dim leaves one over.
        for i in range(0, dim, 2):
            normal[i], normal[i + 1] = normal_pair(scramble(key))
            key += np.uint64(1)
        for i in range(dim):
            value = centers[c, i]
            for j in range(dim):
                value += spread[c, i, j] * normal[j]
            out[i, r] = value
    return out


@njit("f4[:, ::1](f4[:, ::1], f4[:, ::1], i8, f4, u8)", cache=True, fastmath=FASTMATH)
def kernel_matrices(a, b, batch, decay, key):
    """exp(-decay |a_i - b_j|) with random signs; a (dim, batch * n), b (dim, batch * m) -> (batch * n, m)."""
    n, m = a.shape[1] // batch, b.shape[1] // batch
    out = np.zeros((batch * n, m), np.float32)
    for r in range(batch * n):
        start = r // n * m
        row = out[r]
        # Squared distances, dimension by dimension, so that the inner loop runs over a row.
        for d in range(a.shape[0]):
            value = a[d, r]
            for j in range(m):
                row[j] += (value - b[d, start + j]) * (value - b[d, start + j])
        for j in range(m):
            # The sign is the highest of 64 random bits.
            sign = np.float32(np.int64(scramble(key + np.uint64(j)) >> np.uint64(63)) * 2 - 1)
            row[j] = sign * exponential(-decay * np.sqrt(row[j]))
        key += np.uint64(m)
    return out


@njit("void(f4[:, ::1], f4, u8)", cache=True, fastmath=SUMS)
def normalize_rows(matrix, noise, key):
    """Add noise * normal to matrix (rows, n) and divide its rows by their L2 norms (+1e-6), in place."""
    rows, n = matrix.shape
    normal = np.empty(n, np.float32)
    for r in range(rows):
        row = matrix[r]
        if noise > 0:
            fill_normals(normal, key)
            key += np.uint64(n)
            for i in range(n):
                row[i] += noise * normal[i]
        square = np.float32(0.0)
        for i in range(n):
            square += row[i] * row[i]
        # 1e-6 avoids a division by zero.
        scale = np.float32(1.0) / (np.sqrt(square) + np.float32(1e-6))
        for i in range(n):
            row[i] *= scale
