"""The eight kinds of random functions (n, N) -> (m, N) of TabICLv2 (arXiv 2602.11139, appendix), and random points.

`draw(scalars, n, m, num_rows)` decides about a function from n features to m, for tables of N = num_rows rows. Calling
the function with x, float32 (n, N), and a generator computes its values, float32 (m, N); all other random numbers, such
as the entries of a matrix, come from this generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from priors.graph import kernels
from priors.graph.activations import Activation
from priors.graph.matrices import Matrix
from priors.graph.scalars import Scalars, Weights
from priors.random import normal_array, random_key

# float32 values of a temporary that is wider than its input and output: 512 KB, which stays in the second-level cache
CHUNK = 2**17
TURN = np.float32(1 / (2 * math.pi))  # from radians
AMPLITUDE = np.float32(1 / 16)  # of each of the 256 Fourier features, 1 / sqrt(256)
SAMPLE = 1024  # rows that tell whether many rows are equal
BASES = ("cube", "ball", "normal", "correlated")


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b by torch, which `Prior.sample` limits to one thread; numpy's rounding would depend on the threads."""
    return torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()


def distinct_rows(num_rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Indices int64 (size,) of distinct random rows."""
    return kernels.distinct_integers(num_rows, size, random_key(rng))


def random_centers(x: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct random rows of x (n, N), as centers (size, n)."""
    rows = distinct_rows(x.shape[1], size, rng)
    return np.ascontiguousarray(x.take(rows, axis=1).T)


def nearest_centers(x: np.ndarray, centers: np.ndarray, p: float) -> np.ndarray:
    """Index of the center with the smallest sum |x - c|^p, int64 (N,), for x (n, N) and centers (k, n)."""
    power = np.float32(p)
    if x.shape[1] > SAMPLE:
        # Values that come from trees or centers have many equal rows, each of which is looked for once.
        hashes = kernels.hash_rows(x[:, :SAMPLE].copy())
        if len(np.unique(hashes)) < SAMPLE // 2:
            hashes = kernels.hash_rows(x)
            _, first, row_of = np.unique(hashes, return_index=True, return_inverse=True)
            return kernels.nearest_centers(x.take(first, axis=1), centers, power)[row_of]
    return kernels.nearest_centers(x, centers, power)


def combine_features(weights: np.ndarray, features: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """weights (m, k) @ features(x) (k, N) -> (m, N), computed in chunks of rows whose features are small."""
    num_rows = x.shape[1]
    # A row of a chunk has its n inputs and k features.
    most_rows = max(64, CHUNK // (x.shape[0] + weights.shape[1]))
    if num_rows <= most_rows:
        return matmul(weights, features(x))
    out = np.empty((len(weights), num_rows), np.float32)
    chunk_rows = math.ceil(num_rows / math.ceil(num_rows / most_rows))  # of equal length
    for start in range(0, num_rows, chunk_rows):
        chunk = np.ascontiguousarray(x[:, start : start + chunk_rows])
        out[:, start : start + chunk_rows] = matmul(weights, features(chunk))
    return out


@dataclass
class Linear:
    """x -> M x."""

    matrix: Matrix

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> Linear:
        return cls(Matrix.draw(scalars, m, n))

    def __str__(self) -> str:
        return f"linear({self.matrix})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return matmul(self.matrix.compute(rng)[0], x)


@dataclass
class MLP:
    """Linear layers with random activations between them, optionally one before and one after."""

    steps: list[Activation | Linear]

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> MLP:
        width = scalars.integer("mlp.width", 1, 128, log=True)
        layers = scalars.integer("mlp.layers", 1, 4, log=True)
        # n -> width -> ... -> m
        sizes = [n] + [width] * (layers - 1) + [m]
        steps: list[Activation | Linear] = []
        if scalars.flag("mlp.activation_before"):
            steps.append(Activation.draw(scalars))
        for layer in range(layers):
            if layer > 0:
                steps.append(Activation.draw(scalars))
            steps.append(Linear.draw(scalars, sizes[layer], sizes[layer + 1], num_rows))
        if scalars.flag("mlp.activation_after"):
            steps.append(Activation.draw(scalars))
        return cls(steps)

    def __str__(self) -> str:
        return f"mlp({', '.join(map(str, self.steps))})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        for step in self.steps:
            x = step(x, rng)
        return x


@dataclass
class Tree:
    """Mean of oblivious trees: at each level, all nodes of a tree test one feature against its value in a random row.

    m: number of outputs
    """

    trees: int
    depth: int
    m: int

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> Tree:
        trees = round(scalars.real("tree.trees", 1, 128, log=True))
        depth = scalars.integer("tree.depth", 1, 8)
        return cls(trees, depth, m)

    def __str__(self) -> str:
        return f"tree({self.trees} of depth {self.depth})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return kernels.random_trees(x, self.trees, self.depth, self.m, random_key(rng))


@dataclass
class Discretize:
    """A linear function of the nearest of some random rows.

    centers: number of these rows
    p: exponent of the distance sum |x - c|^p
    """

    centers: int
    p: float
    linear: Linear

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> Discretize:
        centers = scalars.integer("discretize.centers", 2, min(num_rows, 256), log=True)
        p = scalars.real("discretize.p", 0.5, 4.0, log=True)
        return cls(centers, p, Linear.draw(scalars, n, m, num_rows))

    def __str__(self) -> str:
        return f"discretize({self.centers} centers, p {self.p:.2g}, {self.linear})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        centers = random_centers(x, self.centers, rng)
        values = self.linear(centers.T, rng)  # (m, centers)
        return values.take(nearest_centers(x, centers, self.p), axis=1)


@dataclass
class GP:
    """A draw of a Gaussian process by 256 random Fourier features with a power-law spectrum; its variance is 1/2.

    m: number of outputs
    decay: exponent of the power law of the frequencies' radii
    product_kernel: every input has frequencies of its own, instead of one direction and one radius for all inputs
    axes: scales of the inputs, unless product_kernel
    scale: of all frequencies, unless product_kernel
    """

    features: ClassVar[int] = 256
    m: int
    decay: float
    product_kernel: bool
    axes: Weights | None = field(default=None, repr=False)
    scale: float = 1.0

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> GP:
        decay = scalars.real("gp.decay", 2.0, 20.0, log=True)
        gp = cls(m, decay, product_kernel=scalars.flag("gp.product_kernel"))
        if not gp.product_kernel:
            gp.axes = Weights.draw(scalars, n)
            gp.scale = scalars.real("gp.scale", 0.5, 10.0, log=True)
        return gp

    def __str__(self) -> str:
        kernel = "product, " if self.product_kernel else ""
        return f"gp({kernel}decay {self.decay:.2g}, scale {self.scale:.2g})"

    def frequencies(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """float32 (256, n), in turns per unit of the inputs: a turn is 2 pi."""
        key = random_key(rng)
        if self.product_kernel:
            out = np.empty((self.features, n), np.float32)
            kernels.fill_radii(out.reshape(-1), np.float32(self.decay), TURN, key)
            return out
        axes = self.axes
        scale = np.float32(self.scale) * TURN
        radial, mixing = kernels.mixed_frequencies(
            self.features, n, np.float32(self.decay), scale, axes.slope, axes.spread, key
        )
        return matmul(radial, mixing)

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        frequencies = self.frequencies(x.shape[0], rng)
        weights = normal_array(rng, self.m, self.features)
        phases = random_key(rng)

        def cosines(chunk: np.ndarray) -> np.ndarray:
            out = matmul(frequencies, chunk)
            kernels.cos_turns(out, phases, AMPLITUDE)
            return out

        return combine_features(weights, cosines, x)


@dataclass
class Quadratic:
    """out_o = z^T M_o z, where z is at most 20 of the inputs and a constant 1."""

    max_inputs: ClassVar[int] = 20
    matrices: Matrix

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> Quadratic:
        size = min(n, cls.max_inputs) + 1
        return cls(Matrix.draw(scalars, size, size, batch=m))

    def __str__(self) -> str:
        return f"quadratic({self.matrices})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if x.shape[0] > self.max_inputs:
            x = x.take(distinct_rows(x.shape[0], self.max_inputs, rng), axis=0)
        pair_weights = kernels.pair_weights(self.matrices.compute(rng))
        return combine_features(pair_weights, kernels.pair_products, x)


@dataclass
class EM:
    """A linear function of the soft assignment to random components of different widths, as in the E step of EM.

    components: their number
    spread: standard deviation of the logarithm of their widths
    p, q: the assignment is the softmax of -(||x - c||_p / width)^q and the logarithm of the width's density factor
    """

    components: int
    spread: float
    p: float
    q: float
    linear: Linear

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> EM:
        components = scalars.integer("em.components", 2, max(16, 2 * m), log=True)
        spread = scalars.real("em.spread", 0.0, 1.0)
        p = scalars.real("em.p", 1.0, 4.0, log=True)
        q = scalars.real("em.q", 1.0, 2.0)
        return cls(components, spread, p, q, Linear.draw(scalars, components, m, num_rows))

    def __str__(self) -> str:
        return f"em({self.components} components, p {self.p:.2g}, q {self.q:.2g}, {self.linear})"

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        centers, sigma = kernels.components(x, self.components, np.float32(self.spread), random_key(rng))
        p = np.float32(self.p)
        q = np.float32(self.q)
        weights = self.linear.matrix.compute(rng)[0]
        return combine_features(weights, lambda chunk: kernels.soft_assignment(chunk, centers, sigma, p, q), x)


@dataclass
class Product:
    """The product of two cheap functions."""

    factors: tuple[Function, Function]

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> Product:
        first = draw_cheap_function(scalars, n, m, num_rows)
        second = draw_cheap_function(scalars, n, m, num_rows)
        return cls((first, second))

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors))

    def __call__(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        first, second = self.factors
        out = first(x, rng)
        out *= second(x, rng)
        return out


Function = Linear | MLP | Tree | Discretize | GP | Quadratic | EM | Product
FUNCTIONS = (Linear, MLP, Tree, Discretize, GP, Quadratic, EM, Product)
CHEAP_FUNCTIONS = (GP, Tree, Discretize, Linear, Quadratic)


def draw_function(scalars: Scalars, n: int, m: int, num_rows: int) -> Function:
    """Draw one of the eight kinds."""
    return scalars.choice("function", FUNCTIONS).draw(scalars, n, m, num_rows)


def draw_cheap_function(scalars: Scalars, n: int, m: int, num_rows: int) -> Function:
    """Draw one of the five kinds that are a part of others: of products, and of categorical columns."""
    return scalars.choice("cheap_function", CHEAP_FUNCTIONS).draw(scalars, n, m, num_rows)


@dataclass
class Points:
    """Points of a simple distribution, passed through a random function R^n -> R^n.

    They are the values of root nodes and the embeddings of categories.

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
        base = scalars.choice("points", BASES)
        points = cls(base, n, draw_function(scalars, n, n, size))
        if base == "correlated":
            points.gaussian = scalars.flag("points.gaussian")
            points.axes = Weights.draw(scalars, n)
        return points

    def __str__(self) -> str:
        return f"{self.base} points -> {self.function}"

    def compute(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """The points, float32 (n, size)."""
        return self.function(self.compute_base(size, rng), rng)

    def compute_base(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """The points before the function, float32 (n, size)."""
        match self.base:
            case "cube":
                return kernels.cube_points(self.n, size, random_key(rng))
            case "normal":
                return normal_array(rng, self.n, size)
            case "ball":
                return kernels.ball_points(self.n, size, random_key(rng))
        # Correlated: a normal matrix (n, n), its columns scaled by the axes, times uniform or normal points.
        x = normal_array(rng, self.n, size) if self.gaussian else kernels.cube_points(self.n, size, random_key(rng))
        transformation = normal_array(rng, self.n, self.n)
        transformation *= self.axes.compute(rng)
        return matmul(transformation, x)
