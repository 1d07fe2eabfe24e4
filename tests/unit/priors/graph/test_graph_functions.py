import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import softmax
from scipy.stats import chisquare, kstest

from priors.graph import functions, kernels
from priors.graph.functions import (
    CHEAP_FUNCTIONS,
    EM,
    FUNCTIONS,
    GP,
    MLP,
    Discretize,
    Linear,
    Product,
    Quadratic,
    Tree,
    distinct_rows,
    draw_cheap_function,
    draw_function,
)
from priors.graph.scalars import Scalars
from priors.random import random_key, rng_at


def draw_scalars(seed: int) -> Scalars:
    return Scalars(rng_at("functions", seed), skewed_choices=False)


def draw_points(seed: int, n: int, size: int) -> np.ndarray:
    return rng_at("points", seed).standard_normal((n, size)).astype(np.float32)


def rng_of(seed: int) -> np.random.Generator:
    return rng_at("noise", seed)


def matrix_of(linear: Linear, rng: np.random.Generator) -> np.ndarray:
    """The matrix that the function draws next."""
    return linear.matrix.compute(rng)[0].astype(np.float64)


@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.__name__)
def test_shapes_purity_and_text(kind):
    for seed, (n, m, size) in enumerate([(1, 1, 10), (3, 7, 50), (40, 2, 200), (5, 5, 3000)]):
        function = kind.draw(draw_scalars(seed), n, m, size)
        x = draw_points(seed, n, size)
        before = x.copy()
        y = function(x, rng_of(seed))
        assert y.shape == (m, size) and y.dtype == np.float32
        assert (x == before).all(), "the input belongs to the node"
        assert np.array_equal(y, function(x, rng_of(seed)))
        assert not np.array_equal(y, function(x, rng_of(seed + 100))) or kind in (MLP, Product)
        assert kind.__name__.lower().replace("product", "*") in str(function)


@pytest.mark.parametrize(("draw", "kinds"), [(draw_function, FUNCTIONS), (draw_cheap_function, CHEAP_FUNCTIONS)])
def test_kinds_are_drawn_equally_often(draw, kinds):
    scalars = draw_scalars(0)
    drawn = [type(draw(scalars, 3, 2, 50)) for _ in range(2000)]
    assert set(drawn) == set(kinds)
    expected = len(drawn) / len(kinds)
    for kind in kinds:
        assert abs(drawn.count(kind) - expected) < 5 * math.sqrt(expected)


def test_linear_is_a_matrix_with_one_row_per_output():
    for seed in range(20):
        function = Linear.draw(draw_scalars(seed), 4, 6, 100)
        x = draw_points(seed, 4, 100)
        M = matrix_of(function, rng_of(seed))
        assert M.shape == (6, 4)
        np.testing.assert_allclose(function(x, rng_of(seed)), M @ x.astype(np.float64), atol=2e-5)


def test_leaves_are_standard_normal_and_trees_are_averaged():
    x = draw_points(0, 3, 20)
    for trees in (1, 16):
        values = np.concatenate([Tree(trees, 3, 4)(x, rng_of(seed))[:, 0] for seed in range(800)])
        assert kstest(values * math.sqrt(trees), "norm").pvalue > 1e-3


def test_trees_split_where_the_spread_is():
    # Features of standard deviation 3 and 1: the first is split three times as often. One split, one tree:
    # the output depends on one feature alone.
    x = draw_points(0, 2, 2000) * np.array([[3.0], [1.0]], np.float32)
    first = 0
    for seed in range(600):
        high = Tree(1, 1, 1)(x, rng_of(seed))[0]
        group = high == high[x[0].argmax()]
        first += bool(x[0, group].min() > x[0, ~group].max()) if (~group).any() else bool(seed % 4)
    assert abs(first / 600 - 0.75) < 0.08


def test_discretize_is_a_linear_function_of_the_nearest_of_a_few_rows():
    for seed in range(30):
        n, m, size = 3, 4, 400
        function = Discretize.draw(draw_scalars(seed), n, m, size)
        assert 2 <= function.centers < 256 and 0.5 <= function.p <= 4
        function.p = 1.0  # other powers are rough
        x = draw_points(seed, n, size)
        rng = rng_of(seed)
        centers = x[:, distinct_rows(size, function.centers, rng)].astype(np.float64)
        assert len(np.unique(centers, axis=1).T) == function.centers
        M = matrix_of(function.linear, rng)
        nearest = (np.abs(x.astype(np.float64)[:, None] - centers[:, :, None]) ** function.p).sum(0).argmin(0)
        y = function(x, rng_of(seed))
        wrong = np.abs(y - (M @ centers)[:, nearest]).max(0) > 1e-4
        assert wrong.mean() < 0.005  # ties in float32
        assert len(np.unique(y.T, axis=0)) <= function.centers


@pytest.mark.parametrize("decay", [2.0, 5.0, 20.0])
def test_gp_radii_follow_the_power_law(decay: float):
    radii = 2 * np.pi * GP(1, decay, True).frequencies(80, rng_at("radii")).reshape(-1)
    # u^(1/(1-a)) - 1 <= r  <=>  u >= (1+r)^(1-a)
    assert kstest(radii, lambda r: 1 - (1 + r) ** (1 - decay)).pvalue > 1e-3


def test_gp_has_variance_one_half_and_is_stationary():
    for product_kernel in (False, True):
        x = draw_points(0, 2, 1)
        x = np.concatenate([x, x + np.array([[0.3], [-0.2]], np.float32)], axis=1)
        x = np.concatenate([x, x + 50.0], axis=1)  # two pairs of points, far from each other, of equal difference
        gp = GP(1, 4.0, product_kernel)
        if not product_kernel:
            gp.axes, gp.scale = functions.Weights(2, np.array([1.0]), np.array([0.5])), 1.0
        y = np.concatenate([gp(x, rng_of(seed)) for seed in range(6000)]).astype(np.float64)
        assert kstest(y[:, 0] * math.sqrt(2), "norm").pvalue > 1e-3
        covariance = (y.T @ y) / len(y)
        error = 4 * 0.5 * math.sqrt(2 / len(y))
        np.testing.assert_allclose(covariance.diagonal(), 0.5, atol=error)
        assert covariance[0, 1] > 0.1
        assert abs(covariance[0, 1] - covariance[2, 3]) < error


def test_quadratic_is_the_quadratic_form():
    for seed, (n, m) in enumerate([(1, 1), (3, 4), (20, 2), (33, 3)]):
        x, rng = draw_points(seed, n, 300), rng_of(seed)
        function = Quadratic.draw(draw_scalars(seed), n, m, 300)
        chosen = x[distinct_rows(n, 20, rng)] if n > 20 else x
        assert len(chosen) == min(n, 20)
        M = function.matrices.compute(rng).astype(np.float64)
        z = np.concatenate([chosen.astype(np.float64), np.ones((1, 300))])
        expected = np.einsum("in,oij,jn->on", z, M, z)
        np.testing.assert_allclose(function(x, rng_of(seed)), expected, atol=2e-5 * np.abs(z).max() ** 2 * len(z))


def test_em_is_a_linear_function_of_a_softmax():
    for seed in range(40):
        n, m, size = 3, 5, 200
        function = EM.draw(draw_scalars(seed), n, m, size)
        assert 2 <= function.components < 16 and 0 <= function.spread <= 1
        assert 1 <= function.p <= 4 and 1 <= function.q <= 2
        x, rng = draw_points(seed, n, size), rng_of(seed)
        centers, sigma = kernels.components(x, function.components, np.float32(function.spread), random_key(rng))
        sigma = sigma.astype(np.float64)[:, None]
        distance = cdist(centers.astype(np.float64), x.T.astype(np.float64), "minkowski", p=function.p)
        logits = -np.log(2 * math.pi * sigma**2) / 2 - (distance / sigma) ** function.q
        expected = matrix_of(function.linear, rng) @ softmax(logits, axis=0)
        # powers to 5e-4 under an exponential
        np.testing.assert_allclose(function(x, rng_of(seed)), expected, atol=1e-2)


def test_components_of_em_are_random_rows_plus_normals():
    x = 1000 * np.arange(50, dtype=np.float32)[None]
    centers, sigma = kernels.components(x, 20000, np.float32(0.5), 7)
    row = np.rint(centers[:, 0] / 1000)
    assert chisquare(np.bincount(row.astype(int), minlength=50)).pvalue > 1e-3
    assert kstest(centers[:, 0] - 1000 * row, "norm").pvalue > 1e-3
    assert kstest(np.log(sigma) / 0.5, "norm").pvalue > 1e-3


@pytest.mark.parametrize("kind", [GP, Quadratic, EM], ids=lambda kind: kind.__name__)
def test_chunks_of_rows_change_nothing(kind, monkeypatch):
    function, x = kind.draw(draw_scalars(3), 6, 4, 1000), draw_points(0, 6, 1000)
    whole = function(x, rng_of(0))
    monkeypatch.setattr(functions, "CHUNK", 64)
    np.testing.assert_allclose(function(x, rng_of(0)), whole, rtol=1e-5, atol=1e-5)
