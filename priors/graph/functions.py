"""The eight kinds of random functions (n, N) -> (m, N) of TabICLv2 (arXiv 2602.11139, appendix), and random points."""

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
from priors.random import normals, random_key

# float32 values of a temporary that is wider than its input and output: 512 KB, which stays in the second-level cache
CHUNK = 2**17
BASES = ("cube", "ball", "normal", "correlated")


def distinct_rows(num_rows: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Indices int64 (size,) of distinct random rows."""
    return torch.from_numpy(kernels.distinct_integers(num_rows, size, random_key(rng)))


def nearest_centers(x: torch.Tensor, centers: torch.Tensor, p: float) -> torch.Tensor:
    """Index of the center with the smallest sum |x - c|^p, int64 (N,), for x (n, N) and centers (n, k)."""
    n, k = centers.shape
    wide = n > 16 or (n > kernels.HEAD and k >= 32)
    nearest = kernels.nearest_centers_wide if wide else kernels.nearest_centers_narrow
    return torch.from_numpy(nearest(x.numpy(), centers.T.contiguous().numpy(), np.float32(p)))


def row_chunks(x: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """x (n, N) cut into chunks of rows, for which a temporary of `width` values per row is small."""
    num_rows = x.shape[1]
    most_rows = max(64, CHUNK // width)
    chunks = math.ceil(num_rows / most_rows)
    if chunks <= 1:
        return (x,)
    return x.split(math.ceil(num_rows / chunks), dim=1)  # of equal length


def combine_features(
    weights: torch.Tensor, features: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """weights (m, k) @ features(x) (k, N) -> (m, N), computed in chunks of rows."""
    width = x.shape[0] + weights.shape[1]
    chunks = row_chunks(x, width)
    if len(chunks) == 1:
        return torch.mm(weights, features(x))
    out = x.new_empty(weights.shape[0], x.shape[1])
    for chunk, part in zip(chunks, row_chunks(out, width), strict=True):
        torch.mm(weights, features(chunk), out=part)
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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(self.matrix.compute(rng)[0]) @ x


@dataclass
class MLP:
    """Linear layers with random activations between them, optionally one before and one after."""

    steps: list[Activation | Linear]

    @classmethod
    def draw(cls, scalars: Scalars, n: int, m: int, num_rows: int) -> MLP:
        width = scalars.integer("mlp.width", 1, 128, log=True)
        layers = scalars.integer("mlp.layers", 1, 4, log=True)
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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(kernels.random_trees(x.numpy(), self.trees, self.depth, self.m, random_key(rng)))


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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        centers = x[:, distinct_rows(x.shape[1], self.centers, rng)]
        values = self.linear(centers, rng)  # (m, centers)
        return values.index_select(1, nearest_centers(x, centers, self.p))


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

    def radii(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Draws from the density (decay - 1) (1 + r)^-decay, float32 of this shape."""
        out = np.empty(shape, np.float32)
        kernels.fill_radii(out.reshape(-1), np.float32(self.decay), random_key(rng))
        return out

    def frequencies(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """float32 (256, n), in radians per unit of the inputs."""
        if self.product_kernel:
            return self.radii(rng, (self.features, n))
        radial, mixing = kernels.mixed_frequencies(
            self.features,
            n,
            np.float32(self.decay),
            np.float32(self.scale),
            self.axes.slope,
            self.axes.spread,
            random_key(rng),
        )
        return (torch.from_numpy(radial) @ torch.from_numpy(mixing)).numpy()

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        turns = torch.from_numpy(self.frequencies(x.shape[0], rng)).div_(2 * math.pi)
        phases = rng.random(self.features, dtype=np.float32)
        weights = normals(rng, self.m, self.features).div_(math.sqrt(self.features))

        def cosines(chunk: torch.Tensor) -> torch.Tensor:
            out = turns @ chunk
            kernels.cos_turns(out.numpy(), phases)
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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        if x.shape[0] > self.max_inputs:
            x = x[distinct_rows(x.shape[0], self.max_inputs, rng)]
        # The sum over i <= j of (M_ij + M_ji) z_i z_j: one matrix product, with half of the products z_i z_j
        matrices = self.matrices.compute(rng)  # (m, s, s)
        i, j = np.triu_indices(self.matrices.n)
        pair_weights = matrices[:, i, j] + np.where(i == j, np.float32(0), matrices[:, j, i])
        pair_weights = torch.from_numpy(np.ascontiguousarray(pair_weights))
        z = torch.cat([x, x.new_ones(1, x.shape[1])])

        def products(chunk: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(kernels.pair_products(chunk.contiguous().numpy()))

        return combine_features(pair_weights, products, z)


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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        rows = torch.from_numpy(rng.integers(x.shape[1], size=self.components))
        centers = x[:, rows] + normals(rng, x.shape[0], self.components)
        sigma = (normals(rng, self.components, 1) * self.spread).exp_()
        weights = torch.from_numpy(self.linear.matrix.compute(rng)[0])
        return combine_features(weights, lambda chunk: self.assignment(chunk, centers, sigma), x)

    def assignment(self, x: torch.Tensor, centers: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Shares (k, N) of the components, which sum to one; x (n, N), centers (n, k), sigma (k, 1)."""
        shares = kernels.soft_assignment(
            x.contiguous().numpy(),
            centers.T.contiguous().numpy(),
            sigma.numpy()[:, 0],
            np.float32(self.p),
            np.float32(self.q),
        )
        return torch.from_numpy(shares)


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

    def __call__(self, x: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        first, second = self.factors
        return first(x, rng).mul_(second(x, rng))


Function = Linear | MLP | Tree | Discretize | GP | Quadratic | EM | Product
FUNCTIONS = (Linear, MLP, Tree, Discretize, GP, Quadratic, EM, Product)
CHEAP_FUNCTIONS = (GP, Tree, Discretize, Linear, Quadratic)


def draw_function(scalars: Scalars, n: int, m: int, num_rows: int) -> Function:
    return scalars.choice("function", FUNCTIONS).draw(scalars, n, m, num_rows)


def draw_cheap_function(scalars: Scalars, n: int, m: int, num_rows: int) -> Function:
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

    def compute(self, size: int, rng: np.random.Generator) -> torch.Tensor:
        """The points, float32 (n, size)."""
        return self.function(self.compute_base(size, rng), rng)

    def compute_base(self, size: int, rng: np.random.Generator) -> torch.Tensor:
        """The points before the function, float32 (n, size)."""
        match self.base:
            case "cube":
                return torch.from_numpy(kernels.cube_points(self.n, size, random_key(rng)))
            case "normal":
                return normals(rng, self.n, size)
            case "ball":
                return torch.from_numpy(kernels.ball_points(self.n, size, random_key(rng)))
        if self.gaussian:
            x = normals(rng, self.n, size)
        else:
            x = torch.from_numpy(kernels.cube_points(self.n, size, random_key(rng)))
        transformation = normals(rng, self.n, self.n) * torch.from_numpy(self.axes.compute(rng))
        return transformation @ x
