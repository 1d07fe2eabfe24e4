"""Which targets the regressor takes, and what it says about others and about wrong arguments."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import DataConversionWarning
from tiny_network import tiny_network
from tiny_regressor import LABELED, numbers, regressor

from tabicl_train import TabICLRegressor

X, Y = numbers()
LABELED_X, QUERIES = X[:LABELED], X[LABELED:]
COUNTS = np.arange(LABELED) % 7
FAULTS = {
    "missing": (
        [None, *Y[1:-1], np.nan],
        r"Input y contains NaN or missing values in 2 of 40 rows, .* is row 0, counted",
    ),
    "pd.NA": (pd.array([*COUNTS[:-1], None], dtype="Int64"), "missing values in 1 of 40 rows, .* is row 39, counted"),
    "infinite": (
        [*Y[:5], np.inf, -np.inf, *Y[7:]],
        r"Input y contains infinity .* in 2 of 40 rows, .* is row 5, counted",
    ),
    "too large": (np.full(LABELED, np.longdouble("1e4000")), "a value too large for .* in 40 of 40 rows"),
    "a long integer": ([*COUNTS[1:], -(10**400)], "a value too large for .* in 1 of 40 rows, .* is row 39, counted"),
    "strings": (["low", "high"] * 20, "y must be numbers, but has values of the type str_?, for example 'low'"),
    "a string": (np.array([*Y[1:], "low"], dtype=object), "values of the type str, for example 'low'"),
    "digits": (pd.Series(Y).astype(str), "must be numbers, but has values of the type str"),
    "times": (pd.date_range("2020", periods=LABELED), "of the type datetime64, for example '2020-01-01"),
    "complex": (Y + 1j, "Complex data not supported"),
    "two columns": (np.c_[Y, Y], r"y should be a 1d array, got an array of shape \(40, 2\) instead"),
    "short": (Y[1:], r"Found input variables with inconsistent numbers of samples: \[40, 39\]"),
    "none": (None, "requires y to be passed, but the target y is None"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_targets_are_refused(fault):
    y, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words):
        regressor().fit(LABELED_X, y)


@pytest.mark.parametrize("y", [COUNTS.astype(np.uint64) + 2**40, COUNTS > 3])
@pytest.mark.parametrize("kind", [list, lambda y: pd.Series(y).astype("category")])
def test_integers_and_booleans_are_numbers(y, kind):
    expected = regressor().fit(LABELED_X, y.astype(float)).predict_interval(QUERIES)
    assert np.array_equal(regressor().fit(LABELED_X, kind(y)).predict_interval(QUERIES), expected)
    assert expected.dtype == float and (expected[:, 0] < expected[:, 1]).all()


def test_other_numbers_and_a_column():
    expected = regressor().fit(LABELED_X, COUNTS).predict(QUERIES)
    decimals = [Decimal(int(value)) for value in COUNTS]
    assert np.array_equal(regressor().fit(LABELED_X, decimals).predict(QUERIES), expected)
    with pytest.warns(DataConversionWarning, match="A column-vector y was passed"):
        model = regressor().fit(LABELED_X, COUNTS[:, None])
    assert np.array_equal(model.predict(QUERIES), expected)


@pytest.mark.parametrize("value", [0, 0.1, -1e300, True])
def test_a_constant_target_is_predicted_without_doubt(value):
    model = regressor().fit(LABELED_X, [value] * LABELED)
    for found in (
        model.predict(QUERIES), model.predict_median(QUERIES), model.predict_interval(QUERIES, 0.9999),
        model.predict_quantiles(QUERIES, [1e-9, 0.3]),
    ):  # fmt: skip
        assert (found == float(value)).all()


def test_a_single_labeled_row_is_a_constant_target():
    model = regressor(norm_methods=("none", "power", "quantile")).fit(X[:1], [3.5])
    assert (model.predict_interval(QUERIES) == 3.5).all()


def test_a_target_that_is_almost_constant_keeps_its_differences():
    """Of numbers near 1e16 the mean is rounded by as much as they differ; the standardized target must not be."""
    y = np.full(LABELED, 1e16)
    y[7] += 2
    model, expected = regressor().fit(LABELED_X, y), regressor().fit(LABELED_X, np.arange(LABELED) == 7)
    assert np.allclose(model.y_, expected.y_, atol=1e-6) and np.abs(model.y_).max() > 6
    assert np.abs(model.predict(QUERIES) - 1e16).max() <= 4


@pytest.mark.parametrize("levels", [[0, 0.5], [0.5, 1], [np.nan], [], 0.5, [[0.5]]])
def test_levels_outside_0_to_1_are_refused(levels):
    model = regressor().fit(LABELED_X, Y)
    with pytest.raises(ValueError, match="it must be a list of numbers between 0 and 1, both excluded"):
        model.predict_quantiles(QUERIES, levels)


@pytest.mark.parametrize("coverage", [0, 1, 80, np.nan])
def test_a_coverage_outside_0_to_1_is_refused(coverage):
    with pytest.raises(ValueError, match=f"coverage is {coverage}; it must lie between 0 and 1"):
        regressor().fit(LABELED_X, Y).predict_interval(QUERIES, coverage)


def test_a_network_that_predicts_classes_is_refused():
    with pytest.raises(ValueError, match=r"^The network predicts classes, and this is a regressor\.$"):
        TabICLRegressor(tiny_network()).fit(LABELED_X, Y)


def test_a_warning_about_values_names_the_line_of_the_caller():
    model = regressor().fit(pd.DataFrame(LABELED_X), Y)
    strange = pd.DataFrame(QUERIES).astype({1: object})
    strange.loc[3, 1] = "much"
    for predict in (model.predict, model.predict_median, model.predict_interval):
        with pytest.warns(UserWarning, match="1 .'much'.; they are treated as missing") as record:
            predict(strange)
        assert [warning.filename for warning in record] == [__file__]
