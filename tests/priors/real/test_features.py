"""Columns of any type as numbers."""

import numpy as np
import pandas as pd
import pytest

from priors.real.features import FeatureEncoder


def test_encoding_of_columns():
    X = pd.DataFrame(
        {
            "number": [1.0, None, 4.0],
            "string": ["b", "a", None],
            "category": pd.Categorical(["lo", "hi", "lo"], ["lo", "never", "hi"]),
            "boolean": [True, False, None],
            "object": pd.Series([1, None, 2.5], dtype=object),
            "digits": ["10", "9", "8"],
            "time": pd.to_datetime(["1970-01-02", None, "1970-01-04"]),
            "constant": [3, 3, 3],
            "empty": [None, None, None],
            "same": [5.0, None, 5.0],
        }
    )
    encoder = FeatureEncoder().fit(X)
    day = 86400e6
    expected = [
        [1, 1, 0, 1, 1, 10, day],
        [2.5, 0, 1, 0, 1.75, 9, 2 * day],
        [4, -1, 0, 0.5, 2.5, 8, 3 * day],
    ]
    assert np.allclose(encoder.transform(X), expected)
    query = X[:1].assign(number=np.nan, string="new", category="never", constant=9, empty="now there is something")
    query["time"] = query["time"].astype("datetime64[ns]")
    # what no labeled row holds is the mean: of -1, 0 and 1 among strings, of 0, 1 and 0 among categories
    assert np.allclose(encoder.transform(query), [[2.5, 0, 1 / 3, 1, 1, 10, day]])


def test_gaps_are_kept_where_that_is_asked_for():
    """Unknown values and missing categories too; and a column of which only the gaps vary is one to see."""
    X = pd.DataFrame(
        {
            "number": [1.0, None, 4.0],
            "string": ["b", "a", None],
            "same": [5.0, None, 5.0],
            "constant": [3, 3, 3],
            "empty": [None, None, None],
        }
    )
    encoder = FeatureEncoder(keeps_missing=True).fit(X)
    expected = [[1, 1, 5], [np.nan, 0, np.nan], [4, np.nan, 5]]
    assert np.array_equal(encoder.transform(X), expected, equal_nan=True)
    query = X[:1].assign(number=np.nan, string="new")
    assert np.array_equal(encoder.transform(query), [[np.nan, np.nan, 5]], equal_nan=True)


@pytest.mark.parametrize(
    "values, order, codes",
    [
        (["no", True, "no"], ["no", True], [0, 1, 0]),
        ([b"y", b"x", b"y"], [b"x", b"y"], [1, 0, 1]),
        (["a", None, "b"], ["b", "a"], [1, -1, 0]),
    ],
)
def test_pandas_categories_keep_their_order_whatever_their_type(values, order, codes):
    X = pd.DataFrame({"category": pd.Categorical(values, order)})
    encoder = FeatureEncoder().fit(X)
    assert encoder.transform(X)[:, 0].tolist() == codes
    assert encoder.transform(X.astype(object))[:, 0].tolist() == codes
