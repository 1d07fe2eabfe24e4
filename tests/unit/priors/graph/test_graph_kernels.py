import numpy as np
import pytest

from priors.graph import kernels
from priors.graph.functions import nearest_centers
from priors.random import rng_at

POWERS = (0.5, 0.77, 1.0, 1.5, 2.0, 3.1, 4.0)
SHAPES = ((1, 1, 2), (1, 700, 5), (3, 513, 40), (9, 300, 33), (16, 1025, 4), (17, 200, 3), (24, 100, 60), (57, 100, 7))


@pytest.fixture
def rng() -> np.random.Generator:
    return rng_at("test graph kernels")


def brute_distances(x: np.ndarray, centers: np.ndarray, p: float) -> np.ndarray:
    """x (n, N), centers (n, k) -> (k, N) in float64, with the powers of rough_power."""
    distances = np.abs(x[:, None, :] - centers[:, :, None]).astype(np.float64)
    return rough_power(distances, float(np.float32(p))).sum(0)


def rough_power(x: np.ndarray, p: float) -> np.ndarray:
    """Logarithm and power interpolated linearly between powers of two."""
    mantissa, exponent = np.frexp(np.maximum(x, 2.0**-127))
    z = p * (exponent - 1 + 2 * mantissa - 1)
    return 2.0 ** np.floor(z) * (1 + z - np.floor(z))


@pytest.mark.parametrize("p", POWERS)
def test_rough_powers_are_within_six_percent_a_power(p: float):
    x = np.exp(np.linspace(-20, 20, 10001))
    ratio = rough_power(x, p) / x**p
    assert 0.942**p < ratio.min() and ratio.max() < 1.062
    assert (np.diff(rough_power(x, p)) > 0).all()


def draw_points(rng: np.random.Generator, n: int, size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """x (n, N) and centers (n, k) of which some are rows of x (zero distances) and two are equal (ties)."""
    x = rng.standard_normal((n, size)).astype(np.float32) * np.exp(rng.standard_normal((n, 1))).astype(np.float32)
    centers = rng.standard_normal((n, k)).astype(np.float32)
    rows = rng.integers(size, size=(k + 1) // 2)
    centers[:, : len(rows)] = x[:, rows]
    centers[:, -1] = centers[:, 0]
    return x, centers


def assert_nearest(index: np.ndarray, distances: np.ndarray, rtol: float = 1e-4):
    chosen = distances[index, np.arange(distances.shape[1])]
    np.testing.assert_array_less(chosen, distances.min(0) * (1 + rtol) + 1e-30)


@pytest.mark.parametrize("p", POWERS)
def test_nearest_centers_are_nearest(rng, p: float):
    for n, size, k in SHAPES:
        x, centers = draw_points(rng, n, size, k)
        rough = brute_distances(x, centers, p)
        flat = np.ascontiguousarray(centers.T)
        index = nearest_centers(x, flat, p)
        assert index.dtype == np.int64 and index.shape == (size,)
        assert_nearest(index, rough)
        # By exact distances in float64, the chosen center is as near as the error of rough_power allows.
        exact = (np.abs(x[:, None, :] - centers[:, :, None]).astype(np.float64) ** p).sum(0)
        assert_nearest(index, exact, 1.062 / 0.942**p - 1)
        assert (index != k - 1).all()  # it equals center 0, which comes first


def test_nearest_centers_of_a_long_table_with_few_different_rows_are_nearest(rng):
    different = rng.standard_normal((3, 50)).astype(np.float32)
    x = different.take(rng.integers(50, size=3000), axis=1)
    x[:, -1] = 7.0  # a row that the first ones do not have
    centers = np.ascontiguousarray(x[:, [0, 1, 2, -1]].T)
    assert_nearest(nearest_centers(x, centers, 1.5), brute_distances(x, centers.T, 1.5))


def test_oblivious_trees_are_those_of_a_loop_over_rows(rng):
    for n, size, trees, depth, m in (
        (1, 30, 1, 1, 1),
        (3, 600, 5, 7, 2),
        (6, 70, 128, 3, 9),
        (2, 100, 6, 1, 300),
    ):  # 300 outputs: blocks of 32 rows
        x = rng.standard_normal((n, size)).astype(np.float32)
        dims, rows = rng.integers(n, size=(trees, depth)), rng.integers(size, size=(trees, depth))
        thresholds = x[dims, rows]  # values of rows: the row itself is a tie, which goes to the zero side
        leaves = rng.standard_normal((trees, 2**depth, m)).astype(np.float32)
        expected = np.zeros((m, size))
        for r in range(size):
            for t in range(trees):
                leaf = sum(2**d for d in range(depth) if x[dims[t, d], r] > thresholds[t, d])
                expected[:, r] += leaves[t, leaf].astype(np.float64) / trees
        np.testing.assert_allclose(kernels.oblivious_trees(x, dims, thresholds, leaves), expected, atol=2e-6)
