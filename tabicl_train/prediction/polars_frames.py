"""Converts polars data frames to pandas, whose types the estimators know.

polars is not imported here, and pyarrow, which polars' own `to_pandas` needs, is not needed.
"""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd


def as_pandas(values: Any) -> Any:
    """Convert a polars data frame or series to pandas; other values are returned as they are."""
    polars = sys.modules.get("polars")  # whoever has a polars frame has imported it
    if polars is None:
        return values
    if isinstance(values, polars.LazyFrame):
        raise TypeError("a polars LazyFrame has no values yet; call its method collect() first")
    if isinstance(values, polars.Series):
        return as_series(values, polars)
    if isinstance(values, polars.DataFrame):
        return pd.DataFrame({series.name: as_series(series, polars) for series in values.get_columns()})
    return values


def as_series(series: Any, polars: Any) -> pd.Series:
    """Convert a polars series to a column of the pandas type that has the same meaning."""
    dtype = series.dtype
    if dtype == polars.Enum:
        categories = pd.Categorical(series.to_list(), categories=list(dtype.categories), ordered=True)
        return pd.Series(categories)
    if dtype == polars.Categorical:
        # In sorted order, as pandas numbers them. polars numbers them by their first appearance in the process.
        return pd.Series(pd.Categorical(series.to_list()))
    if dtype.is_integer() and str(dtype).endswith("128"):  # numpy has no such integers
        return pd.Series(series.to_list(), dtype=object)
    if series.null_count() > 0:
        missing = series.is_null().to_numpy()
        if dtype.is_integer():  # numpy would turn them into floats
            return pd.Series(pd.arrays.IntegerArray(series.fill_null(0).to_numpy(), missing))
        if dtype == polars.Boolean:
            return pd.Series(pd.arrays.BooleanArray(series.fill_null(False).to_numpy(), missing))
    has_numpy_type = dtype.is_integer() or dtype.is_float() or dtype == polars.Boolean
    if has_numpy_type or dtype in (polars.Date, polars.Datetime, polars.Duration):
        return pd.Series(series.to_numpy())  # times with a zone are converted to UTC
    return pd.Series(series.to_list())  # text; decimals and times of day as Python's objects
