"""Correlated scalars, random weights, and the random numbers of the executor."""

import math

import numpy as np
import pytest
from graph_draws import draw_scalars
from scipy.stats import beta, kstest

from priors.graph.functions import distinct_rows
from priors.graph.scalars import LOCAL, Weights
from priors.random import normals, rng_at


def test_the_beta_distribution_of_a_name_is_uniform_in_t_and_log_uniform_in_s():
    a, b = np.array([draw_scalars(seed).beta("width") for seed in range(2000)]).T
    assert kstest(a / (a + b), "uniform").pvalue > 1e-3
    assert kstest((np.log(a + b) - math.log(0.1)) / math.log(1e5), "uniform").pvalue > 1e-3


def test_draws_of_a_name_follow_its_beta_distribution():
    for seed in range(8):
        scalars = draw_scalars(seed)
        a, b = scalars.beta("width")
        units = [(scalars.real("width", 3.0, 7.0) - 3) / 4 for _ in range(300)]
        many = (scalars.reals("width", 300, 3.0, 7.0) - 3) / 4
        for sample in (np.array(units), many):
            assert abs(sample.mean() - a / (a + b)) < 5 * beta(a, b).std() / math.sqrt(300) + 1e-6
            assert sample.std() == pytest.approx(beta(a, b).std(), rel=0.5, abs=1e-2)


def test_integers_exclude_high_and_edges_have_a_probability_mass():
    scalars = draw_scalars(0)
    drawn = [scalars.integer(LOCAL, 2, 6) for _ in range(4000)]
    assert np.bincount(drawn, minlength=6)[2:] == pytest.approx(np.full(4, 1000), abs=150)
    log = np.array([scalars.integer(LOCAL, 1, 32, log=True) for _ in range(4000)])
    assert log.min() == 1 and log.max() <= 31
    assert (log == 1).mean() == pytest.approx(math.log(2) / math.log(32), abs=0.04)
    edges = np.array([scalars.real(LOCAL, 0, 1, edges=True) for _ in range(6000)])
    assert (edges == 0).mean() == pytest.approx(1 / 12, abs=0.02)
    assert (edges == 1).mean() == pytest.approx(1 / 12, abs=0.02)
    assert all(draw_scalars(seed).integer("k", 2, 3) == 2 for seed in range(100))
    assert max(draw_scalars(seed).integer("k", 0, 4) for seed in range(300)) == 3
    arrays = scalars.reals(LOCAL, 6000, 1, math.e, log=True, edges=True)
    assert (arrays == 1).mean() == pytest.approx(1 / 12, abs=0.02)


def test_choices_are_uniform_in_one_preset_and_share_probabilities_in_the_other():
    scalars = draw_scalars(1)
    released = np.bincount([scalars.choice("function", range(4)) for _ in range(4000)], minlength=4)
    assert released == pytest.approx(np.full(4, 1000), abs=150)
    totals, largest = np.zeros(4), []
    for seed in range(400):
        scalars = draw_scalars(seed, skewed_choices=True)
        counts = np.bincount([scalars.choice("function", range(4)) for _ in range(60)], minlength=4)
        totals += counts
        largest.append(counts.max() / 60)
    assert totals / totals.sum() == pytest.approx(np.full(4, 0.25), abs=0.06)
    assert np.mean(largest) > 0.6 and min(largest) < 0.4


@pytest.mark.parametrize("size", [1, 2, 7, 200])
def test_weights_are_positive_with_norm_root_n(size: int):
    w = Weights.draw(draw_scalars(size), size, batch=50).compute(rng_at(size))
    assert w.shape == (50, size) and w.dtype == np.float32
    assert (w >= 0).all() and np.isfinite(w).all()
    np.testing.assert_allclose(np.linalg.norm(w.astype(np.float64), axis=1), math.sqrt(size), rtol=1e-5)


def test_weights_fall_with_the_slope_in_the_logarithm():
    for slope in (0.3, 1.0, 2.5):
        w = np.sort(Weights(50, np.array([slope]), np.array([1e-4])).compute(rng_at(1))[0])[::-1]
        expected = np.arange(1, 51) ** -slope
        np.testing.assert_allclose(w, expected * math.sqrt(50) / np.linalg.norm(expected), rtol=2e-3)


def test_weights_scatter_with_the_spread_and_are_shuffled():
    w = np.log(Weights(2000, np.array([1e-9]), np.array([0.7])).compute(rng_at(1))[0])
    assert kstest((w - w.mean()) / 0.7, "norm").pvalue > 1e-3
    w = Weights(5, np.full(4000, 2.0), np.full(4000, 1e-3)).compute(rng_at(2))
    assert np.bincount(w.argmax(1), minlength=5) == pytest.approx(np.full(5, 800), abs=130)


@pytest.mark.parametrize("size", [1000, 20001])
def test_normals_are_standard_normal(size: int):
    x = normals(rng_at(size), size).numpy()
    assert x.shape == (size,)
    assert x.dtype == np.float32
    assert kstest(x, "norm").pvalue > 1e-3
    half = size // 2
    for a, b in ((x[:half], x[half : 2 * half]), (x[1:], x[:-1])):  # pairs of Box and Muller, neighbors
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(half)
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 5 / math.sqrt(half)


def test_distinct_rows_are_distinct():
    rng = rng_at("rows")
    assert sorted(distinct_rows(50, 50, rng).tolist()) == list(range(50))
    counts = np.zeros((3, 5))
    for _ in range(3000):
        drawn = distinct_rows(5, 3, rng).tolist()
        assert len(set(drawn)) == 3
        counts[range(3), drawn] += 1
    assert abs(counts - 600).max() < 5 * math.sqrt(600 * 0.8)  # every row at every place
