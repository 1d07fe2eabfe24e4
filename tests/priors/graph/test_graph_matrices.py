"""Random matrices, mixture points and points."""

import math

import numpy as np
import pytest
import torch
from graph_draws import draw_scalars
from scipy.stats import kstest

from priors.floats import fill_normals
from priors.graph.activations import PlainActivation
from priors.graph.functions import Linear
from priors.graph.matrices import KINDS as MATRIX_KINDS
from priors.graph.matrices import Matrix, MixturePoints
from priors.graph.noise import Noise
from priors.graph.points import BASES, Points, cube
from priors.graph.scalars import Weights
from priors.random import random_key, rng_at


def draw_matrix(kind: str, seed: int, n: int, m: int, batch: int) -> Matrix:
    scalars = draw_scalars(seed)
    while True:
        matrix = Matrix.draw(scalars, n, m, batch)
        if matrix.kind == kind:
            return matrix


def raw_matrix(kind: str, seed: int, n: int, m: int, batch: int = 1) -> np.ndarray:
    return draw_matrix(kind, seed, n, m, batch)._raw(rng_at(seed)).astype(np.float64)


@pytest.mark.parametrize("kind", MATRIX_KINDS)
def test_rows_of_matrices_have_norm_one(kind: str):
    for seed, (n, m, batch) in enumerate([(1, 1, 1), (3, 8, 1), (8, 3, 4), (40, 40, 2)]):
        matrix = draw_matrix(kind, seed, n, m, batch)
        computed = matrix.compute(rng_at(seed))
        assert computed.shape == (batch, n, m) and computed.dtype == np.float32
        raw = np.linalg.norm(matrix._raw(rng_at(seed)).astype(np.float64), axis=-1)
        norms = np.linalg.norm(computed.astype(np.float64), axis=-1)
        assert (norms < 1 + 1e-5).all()
        np.testing.assert_allclose(norms[raw > 1e-2], 1, atol=3e-4)
        assert np.array_equal(computed, matrix.compute(rng_at(seed)))
        assert str(matrix)


def test_matrix_kinds_are_drawn_equally_often():
    scalars = draw_scalars(0)
    kinds = [Matrix.draw(scalars, 2, 2).kind for _ in range(2000)]
    assert [kinds.count(kind) for kind in MATRIX_KINDS] == pytest.approx([400] * 5, abs=90)
    drawn = [draw_matrix("activation", seed, 2, 2, 1) for seed in range(200)]
    assert {matrix.inner.kind for matrix in drawn} == set(MATRIX_KINDS) - {"activation"}


def test_gaussian_matrices_are_isotropic():
    entries = draw_matrix("gaussian", 0, 200, 3, 1).compute(rng_at(0))[0]
    assert kstest(entries[:, 0], "uniform", args=(-1, 2)).pvalue > 1e-3  # Archimedes: on the sphere in R^3


def test_weights_matrices_have_sparse_rows():
    matrix = draw_matrix("weights", 0, 6, 5, 3)
    matrix.weights = Weights(5, np.full(18, 6.0), np.full(18, 1e-4))  # one entry per row outweighs the others
    computed = np.sort(np.abs(matrix.compute(rng_at(0)).reshape(18, 5)), axis=1)
    assert np.median(computed[:, -1]) > 0.99
    winners = np.abs(matrix._raw(rng_at(0))).reshape(18, 5).argmax(1)
    assert len(set(winners.tolist())) > 2, "each row has weights of its own"


def test_singular_value_matrices_have_the_rank_of_their_weights():
    matrix = draw_matrix("singular_values", 0, 12, 9, 2)
    assert matrix.weights.size == 9
    matrix.weights = Weights(9, np.full(2, 6.0), np.full(2, 1e-4))
    values = np.linalg.svd(matrix._raw(rng_at(0)), compute_uv=False)
    assert (values[:, 1] < 0.2 * values[:, 0]).all()
    matrix.weights = Weights(9, np.full(2, 1e-6), np.full(2, 1e-4))
    values = np.linalg.svd(matrix._raw(rng_at(0)), compute_uv=False)
    assert (values[:, 1] > 0.3 * values[:, 0]).all()
    assert np.mean(np.square(matrix._raw(rng_at(0)))) == pytest.approx(9, rel=0.5)


def test_kernel_matrices_are_bounded_with_random_signs():
    for seed in range(20):
        raw = raw_matrix("kernel", seed, 30, 20)
        assert (np.abs(raw) <= 1).all()
        nonzero = raw[raw != 0]
        if len(nonzero) > 100:
            assert abs((nonzero > 0).mean() - 0.5) < 0.15


def test_kernel_matrices_are_exponentials_of_distances():
    matrix = draw_matrix("kernel", 0, 5, 6, 2)
    matrix.decay = 0.2  # few underflow
    rng = rng_at(0)
    a = matrix.points[0].compute(rng, 10).T.astype(np.float64).reshape(2, 5, 3)
    b = matrix.points[1].compute(rng, 12).T.astype(np.float64).reshape(2, 6, 3)
    distance = np.linalg.norm(a[:, :, None] - b[:, None], axis=-1)
    expected = np.exp(-matrix.decay * distance)
    np.testing.assert_allclose(np.abs(matrix._raw(rng_at(0))), expected, rtol=1e-3, atol=1e-6)


def test_activation_matrices_are_activations_of_others():
    matrix = draw_matrix("activation", 0, 6, 7, 2)
    matrix.activation = PlainActivation("sign")
    assert (np.abs(matrix._raw(rng_at(0))) == 1).all()
    deviation = np.abs(matrix.compute(rng_at(0))) * math.sqrt(7) - 1
    assert 2e-4 < deviation.std() < 2e-3  # noise of 1e-3
    matrix.activation = PlainActivation("rank")
    assert (np.sort(matrix._raw(rng_at(0)), axis=-1) == np.arange(7)).all(), "along the rows of the matrix"


def test_mixture_points_have_the_moments_of_their_components():
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 1e-9), np.full(1, 1e-4)))
    points = np.stack([one.compute(rng_at(seed), 40).T for seed in range(600)]).astype(np.float64)
    centers = points.mean(1)
    # Center N(0, I); spread e^(g + h eps) with median 1: log of the mean squared deviation a component
    within = points.var(1, ddof=1).sum(1)
    assert np.median(within) == pytest.approx(9, rel=0.35)
    log = np.log(within) / 2
    # Var(g + h eps) = 2, plus that of the Gaussian matrix
    assert 1.2 < log.std() < 1.8
    tight = within < np.quantile(within, 0.25)
    assert centers[tight].std() == pytest.approx(1, abs=0.15)


def test_components_of_mixtures_are_stretched_in_random_directions():
    # Columns of the Gaussian matrix are scaled, not rows: the long axis is a Gaussian vector, not a coordinate axis.
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 6.0), np.full(1, 1e-4)))
    axes = [np.linalg.svd(np.cov(one.compute(rng_at(seed), 60)))[0][:, 0] for seed in range(400)]
    assert kstest(np.abs(axes)[:, 0], "uniform").pvalue > 1e-3


def test_components_of_a_mixture_differ_in_size_by_a_shared_factor():
    # log size = g + h eps: given h, its squared distance from g is h^2 plus the scatter of the Gaussian matrix.
    one = MixturePoints(3, Weights(1, np.ones(1), np.ones(1)), Weights(3, np.full(1, 1e-9), np.full(1, 1e-4)))
    h, deviation = [], []
    for seed in range(1000):
        values = np.empty(2 + 1 + 3 + 9, np.float32)  # g, h, and the component's size, center and matrix
        fill_normals(values, random_key(rng_at(seed)) + 2 * (1 + 3))  # the weights come first
        g, spread = values[:2].tolist()
        within = one.compute(rng_at(seed), 40).var(1, ddof=1).sum() / 9
        h.append(spread)
        deviation.append(np.log(within) / 2 - g)
    h, deviation = np.array(h), np.array(deviation)
    assert np.std(deviation[np.abs(h) < 0.3]) < 0.6 and np.std(deviation[np.abs(h) > 0.3]) > 0.9
    assert abs(np.mean(deviation[h > 0.5]) - np.mean(deviation[h < -0.5])) < 0.4  # of either sign: h eps, not h


def test_mixture_points_pick_components_by_share():
    scalars = [MixturePoints.draw(draw_scalars(seed)) for seed in range(300)]
    assert {m.shares.size for m in scalars} >= {1, 2, 14} and max(m.shares.size for m in scalars) <= 15
    mixture = MixturePoints(
        3, Weights(2, np.array([1.0]), np.array([1e-4])), Weights(3, np.full(2, 1e-9), np.full(2, 1e-4))
    )
    shares = np.sort(mixture.shares.compute(rng_at(0))[0])
    assert shares[1] / shares.sum() == pytest.approx(2 / 3, abs=1e-3)
    # Two small components: the one nearest to each point tells which it came from.
    for seed in range(200):
        points = mixture.compute(rng_at(seed), 3000)
        assert points.shape == (3, 3000)
        near = np.linalg.norm(points - points[:, :1], axis=0)
        gaps = np.diff(np.sort(near))
        if gaps.max() > 1 and np.sort(near)[gaps.argmax()] < 0.3 and 100 < gaps.argmax() < 2900:
            share = (gaps.argmax() + 1) / 3000
            assert min(share, 1 - share) == pytest.approx(1 / 3, abs=0.04)
            break
    else:
        raise AssertionError("no mixture with two components apart")


def base_points(base: str, n: int, size: int, seed: int = 0, **changes) -> np.ndarray:
    points = Points(base, n, function=None, **changes)
    return points.compute_base(size, Noise(("points", seed))).double().numpy()


def test_cube_points_are_uniform():
    x = base_points("cube", 3, 4000)
    assert x.shape == (3, 4000)
    for feature in x:
        assert kstest(feature, "uniform", args=(-1, 2)).pvalue > 1e-3


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ball_points_are_uniform_in_the_ball(n: int):
    x = base_points("ball", n, 4000)
    radius = np.linalg.norm(x, axis=0)
    assert radius.max() <= 1 + 1e-6
    assert kstest(radius**n, "uniform").pvalue > 1e-3
    np.testing.assert_allclose((x / radius).mean(1), 0, atol=0.08)


def test_normal_points_are_standard_normal():
    x = base_points("normal", 3, 4000)
    assert kstest(x.ravel(), "norm").pvalue > 1e-3
    np.testing.assert_allclose(np.cov(x), np.eye(3), atol=0.1)


@pytest.mark.parametrize("gaussian", [True, False])
def test_correlated_points_have_the_covariance_of_a_weighted_gaussian_matrix(gaussian: bool):
    axes = Weights(3, np.array([3.0]), np.array([1e-4]))
    x = base_points("correlated", 3, 20000, gaussian=gaussian, axes=axes)
    noise = Noise(("points", 0))
    _ = noise.normal(3, 20000) if gaussian else cube(3, 20000, noise)
    A = noise.parameter(3, 3).double().numpy() * axes.compute(noise.rng)[0]  # columns scaled
    expected = A @ A.T * (1 if gaussian else 1 / 3)
    np.testing.assert_allclose(np.cov(x), expected, atol=0.05 * np.abs(expected).max())


def test_points_go_through_a_function():
    drawn = [Points.draw(draw_scalars(seed), 4, 50) for seed in range(100)]
    assert {points.base for points in drawn} == set(BASES)
    assert {points.gaussian for points in drawn if points.base == "correlated"} == {True, False}
    points = next(p for p in drawn if isinstance(p.function, Linear))
    noise = Noise(("points", 1))
    expected = points.function(points.compute_base(50, noise), noise)
    torch.testing.assert_close(points.compute(50, Noise(("points", 1))), expected)
    assert all(p.compute(50, Noise(("points", 1))).shape == (4, 50) and " points -> " in str(p) for p in drawn)
