"""What describe and gallery say about tables with a numeric target."""

import numpy as np
import pytest
import torch

from priors import TableSpec, build_prior
from priors.inspection import informative_columns, save_gallery, statistics
from priors.random import rng_at
from priors.table import Table


def make_table(X: np.ndarray, y: np.ndarray, train_size: int) -> Table:
    return Table(torch.from_numpy(X.astype(np.float32)), torch.from_numpy(y.astype(np.float32)), train_size, 0)


def test_statistics_of_a_numeric_target():
    X = rng_at("statistics").standard_normal((400, 3))
    y = np.where(X[:, 1] > 0, 2.0, -0.5)
    y[X[:, 0] > 1.5] = 5.0
    found = statistics(make_table(X, y, 300))
    assert (found["rows"], found["labeled share"], found["features"]) == (400, 0.75, 3)
    assert found["distinct targets"] == 3 and found["lowest target"] == -0.5 and found["highest target"] == 5
    assert found["commonest target"] == np.unique(y, return_counts=True)[1].max() / 400
    assert found["skewness of target"] == pytest.approx((y**3).mean())
    assert found["kurtosis of target"] == pytest.approx((y**4).mean())
    assert 0.4 < found["skill of ridge regression"] < 0.8 < found["skill of extra trees"] <= 1
    noise = statistics(make_table(X, rng_at("noise").standard_normal(400), 300))
    assert 0 <= noise["skill of ridge regression"] < 0.1 and 0 <= noise["skill of extra trees"] < 0.1
    constant = np.append(rng_at("noise").standard_normal(300), np.zeros(100))  # among the query rows
    assert statistics(make_table(X, constant, 300))["skill of ridge regression"] == 0


def test_the_informative_columns_are_those_that_a_number_depends_on():
    rng = rng_at("informative")
    X = rng.standard_normal((800, 5))
    y = X[:, 3] ** 2 + 0.3 * rng.standard_normal(800) + 0.5 * X[:, 1]
    assert informative_columns(X, y.astype(np.float32))[:2] == [3, 1]


def test_gallery_shows_numeric_targets_of_any_width(tmp_path):
    tables = [(f"width {m}", build_prior("dummy").sample(TableSpec(40, 20, m, 0), m)) for m in (1, 2, 5)]
    assert save_gallery(tables, tmp_path / "numbers.png") == [tmp_path / "numbers.png", tmp_path / "numbers.html"]
    assert (tmp_path / "numbers.png").stat().st_size > 10_000
    page = (tmp_path / "numbers.html").read_text()
    assert page.count("numeric target</pre>") == 3 and "histogram" in page
