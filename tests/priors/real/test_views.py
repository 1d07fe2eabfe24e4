"""Normalization of columns, and the views of an ensemble."""

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer, StandardScaler

from priors.real.views import Normalizer


@pytest.mark.parametrize("method", ["none", "power", "quantile"])
def test_normalisation(method):
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


def test_power_is_yeo_johnson_without_outliers():
    numbers = np.random.default_rng(0).exponential(size=(200, 1))
    expected = make_pipeline(StandardScaler(), PowerTransformer()).fit_transform(numbers)
    assert np.abs(expected).max() < 4
    assert np.allclose(Normalizer("power").fit(numbers).transform(numbers), expected, atol=1e-5)
