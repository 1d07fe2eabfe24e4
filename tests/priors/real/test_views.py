"""Normalization of columns, and the views of an ensemble."""

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer, StandardScaler

from priors.real.normalize import Normalizer


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_normalization(method):
    rng = np.random.default_rng(0)
    numbers = np.column_stack([rng.normal(5, 1e-8, 500), rng.exponential(1e7, 500), rng.random(500) < 0.5])
    normalizer = Normalizer(method).fit(numbers)
    out = normalizer.transform(numbers)
    assert np.allclose(out.mean(axis=0), 0, atol=1e-4) and np.allclose(out.std(axis=0), 1, atol=1e-4)
    assert out.dtype == np.float32
    far = normalizer.transform(np.array([[1e9, 1e30, -1e30]]))
    assert np.isfinite(far).all() and np.abs(far).max() < 10
    order = np.argsort(numbers[:, 1])
    assert (np.diff(out[order, 1]) >= 0).all()


@pytest.mark.parametrize("method", ["none", "power"])
def test_gaps_change_nothing_about_the_values_that_are_known(method):
    rng = np.random.default_rng(0)
    numbers = rng.exponential(size=(200, 3))
    numbers[rng.random(numbers.shape) < 0.3] = np.nan
    found = Normalizer(method).fit(numbers).transform(numbers)
    for column, own in zip(numbers.T, found.T, strict=True):
        known = column[~np.isnan(column), None]
        expected = Normalizer(method).fit(known).transform(known)[:, 0]
        assert np.array_equal(np.isnan(own), np.isnan(column))
        assert np.allclose(own[~np.isnan(own)], expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 1), (1000, 1), (333, 17)])
def test_moments_of_columns_without_gaps_are_the_plain_ones_to_the_bit(shape):
    """So that tables without gaps are what they were before there were gaps."""
    x = np.random.default_rng(0).normal(3, 10, shape)
    normalizer = Normalizer("none").fit(x)
    scaled = normalizer.scaler.transform(x).clip(normalizer.low, normalizer.high)
    assert np.array_equal(normalizer.mean, scaled.mean(axis=0)) and np.array_equal(normalizer.std, scaled.std(axis=0))


def test_power_is_yeo_johnson_without_outliers():
    numbers = np.random.default_rng(0).exponential(size=(200, 1))
    expected = make_pipeline(StandardScaler(), PowerTransformer()).fit_transform(numbers)
    assert np.abs(expected).max() < 4
    assert np.allclose(Normalizer("power").fit(numbers).transform(numbers), expected, atol=1e-5)
