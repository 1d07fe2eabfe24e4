"""Random matrices, mixture points and points."""

import math

import numpy as np
import pytest
from graph_draws import draw_scalars
from scipy.stats import kstest

from priors.graph.activations import PlainActivation
from priors.graph.functions import Points
from priors.graph.kernels import cube_points
from priors.graph.matrices import KINDS as MATRIX_KINDS
from priors.graph.matrices import Matrix, MixturePoints
from priors.graph.scalars import Weights
from priors.random import normal_array, random_key, rng_at


def draw_matrix(kind: str, seed: int, n: int, m: int, batch: int) -> Matrix:
    scalars = draw_scalars(seed)
    while True:
        matrix = Matrix.draw(scalars, n, m, batch)
        if matrix.kind == kind:
            return matrix


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


def test_kernel_matrices_are_exponentials_of_distances():
    matrix = draw_matrix("kernel", 0, 5, 6, 2)
    matrix.decay = 0.2  # few underflow
    rng = rng_at(0)
    a = matrix.points[0].compute(rng, 10).T.astype(np.float64).reshape(2, 5, 3)
    b = matrix.points[1].compute(rng, 12).T.astype(np.float64).reshape(2, 6, 3)
    distance = np.linalg.norm(a[:, :, None] - b[:, None], axis=-1)
    expected = np.exp(-matrix.decay * distance)
    raw = matrix._raw(rng_at(0))
    np.testing.assert_allclose(np.abs(raw), expected, rtol=1e-3, atol=1e-6)
    assert 15 < (raw > 0).sum() < 45, "signs are random"


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


def base_points(base: str, n: int, size: int, seed: int = 0, **changes) -> np.ndarray:
    points = Points(base, n, function=None, **changes)
    return points.compute_base(size, rng_at("points", seed)).astype(np.float64)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ball_points_are_uniform_in_the_ball(n: int):
    x = base_points("ball", n, 4000)
    radius = np.linalg.norm(x, axis=0)
    assert radius.max() <= 1 + 1e-6
    assert kstest(radius**n, "uniform").pvalue > 1e-3
    np.testing.assert_allclose((x / radius).mean(1), 0, atol=0.08)


@pytest.mark.parametrize("gaussian", [True, False])
def test_correlated_points_have_the_covariance_of_a_weighted_gaussian_matrix(gaussian: bool):
    axes = Weights(3, np.array([3.0]), np.array([1e-4]))
    x = base_points("correlated", 3, 20000, gaussian=gaussian, axes=axes)
    rng = rng_at("points", 0)
    _ = normal_array(rng, 3, 20000) if gaussian else cube_points(3, 20000, random_key(rng))
    A = normal_array(rng, 3, 3).astype(np.float64) * axes.compute(rng)[0]  # columns scaled
    expected = A @ A.T * (1 if gaussian else 1 / 3)
    np.testing.assert_allclose(np.cov(x), expected, atol=0.05 * np.abs(expected).max())
