"""Which targets the regressor takes, and what it says about others and about wrong arguments."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from networks import tiny_network
from tiny_regressor import LABELED, numbers, regressor

from tabicl_train import TabICLRegressor

X, Y = numbers()
LABELED_X, QUERIES = X[:LABELED], X[LABELED:]
COUNTS = np.arange(LABELED) % 7
DAYS = pd.date_range("2020-01-01", periods=LABELED)
FAULTS = {
    "missing": ([None, *Y[1:-1], np.nan], "Input y contains NaN"),
    "pd.NA": (pd.array([*COUNTS[:-1], None], dtype="Int64"), "Input y contains NaN"),
    "infinite": ([*Y[:5], np.inf, *Y[6:]], "Input y contains infinity or a value too large"),
    "a string": (np.array([*Y[1:], "low"], dtype=object), "could not convert string to float: 'low'"),
    "times": (DAYS, "y has dates or times, which cannot be predicted; convert them to numbers first"),
    "times with a zone": (pd.Series(DAYS).dt.tz_localize("UTC"), "y has dates or times"),
    "dates": ([day.date() for day in DAYS], "y has dates or times"),
    "periods": (pd.Series(DAYS).dt.to_period("D"), "y has dates or times"),
    "durations": (DAYS - DAYS[0], "y has durations, which cannot be predicted; convert them to numbers first"),
    "complex": (Y + 1j, "Complex data not supported: y has complex numbers"),
    "complex objects": ([*Y[1:].tolist(), 1j], "Complex data not supported: y has complex numbers"),
    "two columns": (np.c_[Y, Y], r"y should be a 1d array, got an array of shape \(40, 2\) instead"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_malformed_targets_are_refused(fault):
    y, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words) as raised:
        regressor().fit(LABELED_X, y)
    if words.startswith(("y has", "Complex")):
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("y", [COUNTS.astype(np.uint64) + 2**40, COUNTS > 3])
def test_integers_booleans_and_decimals_are_numbers(y):
    expected = regressor().fit(LABELED_X, y.astype(float)).predict_interval(QUERIES)
    for same in (y.tolist(), pd.Series(y).astype("category"), [Decimal(int(value)) for value in y]):
        assert np.array_equal(regressor().fit(LABELED_X, same).predict_interval(QUERIES), expected)
    assert expected.dtype == float and (expected[:, 0] < expected[:, 1]).all()


@pytest.mark.parametrize("value", [0.1, -1e300])
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
    assert np.allclose(model.y_, expected.y_, atol=1e-6)
    assert np.abs(model.y_).max() > 6
    assert np.abs(model.predict(QUERIES) - 1e16).max() <= 4


@pytest.mark.parametrize("levels", [[0, 0.5], [0.5, 1], [], 0.5])
def test_levels_outside_0_to_1_are_refused(levels):
    model = regressor().fit(LABELED_X, Y)
    with pytest.raises(ValueError, match="it must be a list of numbers between 0 and 1, both excluded"):
        model.predict_quantiles(QUERIES, levels)


def test_a_coverage_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match="coverage is 80; it must lie between 0 and 1"):
        regressor().fit(LABELED_X, Y).predict_interval(QUERIES, 80)


def test_a_network_that_predicts_classes_is_refused():
    with pytest.raises(ValueError, match=r"^The network predicts classes, and this is a regressor\.$"):
        TabICLRegressor(tiny_network()).fit(LABELED_X, Y)


def test_a_warning_about_values_names_the_line_of_the_caller():
    model = regressor().fit(pd.DataFrame(LABELED_X), Y)
    strange = pd.DataFrame(QUERIES).astype({1: object})
    strange.loc[3, 1] = "much"
    for predict in (model.predict, model.predict_median, model.predict_interval):
        with pytest.warns(UserWarning, match="1 .'much' among numbers.; they are treated as missing") as record:
            predict(strange)
        assert [warning.filename for warning in record] == [__file__]
