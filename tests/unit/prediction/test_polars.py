"""polars frames: each column means what it means in the same pandas frame, without pyarrow."""

import datetime
import sys
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from tiny_classifier import classifier
from tiny_regressor import regressor

from tabicl_train.prediction.polars_frames import as_pandas

polars = pytest.importorskip("polars")

ROWS = 60
rng = np.random.default_rng(0)
LEVELS = ["low", "middle", "high"]
DAYS = [datetime.date(1999, 12, 30) + datetime.timedelta(int(day)) for day in rng.integers(0, 5, ROWS)]
MOMENTS = [datetime.datetime.combine(day, datetime.time(row % 24)) for row, day in enumerate(DAYS)]
NAMES = rng.choice(["x", "y", "z"], ROWS).tolist()
RANKS = rng.choice(LEVELS, ROWS).tolist()


# Of each type: values, the type in polars, and the same column in pandas, of values some of which may be None.
COLUMNS = {
    "float": (rng.normal(size=ROWS).tolist(), polars.Float32, lambda v: pd.array(v, dtype="Float32")),
    "integer": (rng.integers(2**53, 2**53 + 9, ROWS).tolist(), polars.Int64, lambda v: pd.array(v, dtype="Int64")),
    "large integer": (rng.integers(0, 9, ROWS).tolist(), polars.Int128, lambda v: pd.array(v, dtype="Int64")),
    "boolean": ((rng.random(ROWS) < 0.5).tolist(), polars.Boolean, lambda v: pd.array(v, dtype="boolean")),
    "string": (NAMES, polars.String, lambda v: v),
    "categorical": (NAMES, polars.Categorical, lambda v: pd.Categorical(v)),
    "ordered": (RANKS, polars.Enum(LEVELS), lambda v: pd.Categorical(v, LEVELS, ordered=True)),
    "date": (DAYS, polars.Date, pd.to_datetime),
    "datetime": (MOMENTS, polars.Datetime("ms"), pd.to_datetime),
    "zoned": (
        MOMENTS,
        polars.Datetime("us", "Europe/Paris"),
        lambda v: pd.Series(pd.to_datetime(v)).dt.tz_localize("UTC").dt.tz_convert("Europe/Paris"),
    ),
    "duration": ([moment - MOMENTS[0] for moment in MOMENTS], polars.Duration, pd.to_timedelta),
    "time": ([moment.time() for moment in MOMENTS], polars.Time, lambda v: pd.Series(v, dtype=object)),
    "decimal": ([Decimal(i % 7) / 4 for i in range(ROWS)], polars.Decimal(10, 2), lambda v: pd.Series(v, dtype=object)),
}


def frames(names: list[str], missing: bool) -> tuple[pd.DataFrame, object]:
    """The same columns in pandas and in polars; missing: whether some values are."""
    in_pandas, in_polars = {}, {}
    for number, name in enumerate(names):
        values, dtype, convert = COLUMNS[name]
        if missing:
            values = [None if (row + number) % 5 == 0 else value for row, value in enumerate(values)]
        in_pandas[name] = convert(values)
        in_polars[name] = polars.Series(name, values, dtype=dtype)
    return pd.DataFrame(in_pandas), polars.DataFrame(in_polars)


@pytest.mark.parametrize("missing", [False, True])
def test_predictions_are_those_of_the_same_pandas_frame(missing):
    polars.Series(["z", "y", "x"], dtype=polars.Categorical)  # which numbers the categories in the whole process
    expected, X = frames(list(COLUMNS), missing)
    y = np.array(NAMES)
    of_pandas = classifier().fit(expected[:40], y[:40])
    of_polars = classifier().fit(X[:40], polars.Series(y[:40]))
    assert of_polars.encoder_.kinds == of_pandas.encoder_.kinds
    assert list(of_polars.feature_names_in_) == list(COLUMNS)
    assert np.array_equal(of_polars.X_, of_pandas.X_)
    p = of_pandas.predict_proba(expected[40:])
    assert np.array_equal(of_polars.predict_proba(X[40:]), p)
    assert np.array_equal(of_polars.predict_proba(expected[40:]), p)
    assert set(of_polars.predict(X)) <= set(NAMES)


def test_pyarrow_is_not_needed(monkeypatch):
    expected, X = frames(list(COLUMNS), missing=True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)  # its import fails
        found = as_pandas(X)
    assert (found.isna() == expected.isna()).all(axis=None)
    assert not found.isna().all(axis=None)


@pytest.mark.parametrize("name", sorted(COLUMNS.keys() - {"float"}))
def test_types_do_not_depend_on_the_columns_beside_them(name):
    expected, X = frames(["float", name], missing=False)
    y = np.arange(ROWS) % 7
    found, same = (regressor(n_estimators=1).fit(table, y) for table in (X, expected))
    assert found.encoder_.kinds == same.encoder_.kinds
    assert np.array_equal(found.X_, same.X_)
    assert np.array_equal(found.predict(X[:5]), same.predict(expected[:5]))


def test_targets_of_polars():
    X, _ = frames(["float"], missing=False)
    values = [None, *range(1, ROWS)]
    with pytest.raises(ValueError, match="Input y contains NaN"):
        regressor().fit(X, polars.Series(values))
    expected = regressor().fit(X, np.arange(ROWS) % 2 == 0)
    same = regressor().fit(X, polars.Series([row % 2 == 0 for row in range(ROWS)]))
    assert np.array_equal(same.predict(X), expected.predict(X))
    model = classifier().fit(X, polars.Series(RANKS, dtype=polars.Enum(LEVELS)))
    assert list(model.classes_) == sorted(LEVELS)


def test_a_lazy_frame_is_refused_in_a_line():
    with pytest.raises(TypeError, match=r"^a polars LazyFrame has no values yet; call its method collect\(\) first$"):
        classifier().fit(polars.LazyFrame({"x": [1.0, 2.0]}), [0, 1])
