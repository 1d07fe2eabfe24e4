"""Normalization of columns; the power transform, against scikit-learn's."""

import warnings

import numpy as np
import pytest
from sklearn.preprocessing import PowerTransformer, StandardScaler

from priors.real.normalize import Normalizer, YeoJohnson


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


rng = np.random.default_rng(0)
ROWS = 77
COLUMNS = {
    "normal": rng.normal(size=ROWS),
    "skewed": rng.exponential(size=ROWS) ** 3,
    "heavy tails": rng.standard_cauchy(ROWS) ** 3,
    "two values": rng.integers(0, 2, ROWS) * 1.0,
    "one value differs": (np.arange(ROWS) == 5) * 1.0,
    "equal": np.full(ROWS, 0.1),
    "gaps": np.where(rng.random(ROWS) < 0.3, np.nan, rng.exponential(size=ROWS)),
    "hardly different": 1 + 1e-12 * rng.normal(size=ROWS),
}
SHAPES = {"scaled": lambda x: StandardScaler().fit_transform(x), "raw": abs, "negative": lambda x: -abs(x)}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_scikit_learns_to_the_bit(column, shape):
    x = SHAPES[shape](COLUMNS[column][:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = PowerTransformer(standardize=False).fit(x)
        expected = peer.transform(np.concatenate([x, 3 * x]))
    found = YeoJohnson().fit(x)
    assert found.powers == list(peer.lambdas_)
    assert np.array_equal(found.transform(np.concatenate([x, 3 * x])), expected, equal_nan=True)
