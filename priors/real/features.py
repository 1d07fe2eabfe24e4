"""Columns of a data frame as numbers, fitted on labeled rows only."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable

import numpy as np
import pandas as pd
from sklearn.utils import assert_all_finite

MISSING = -1.0  # the code of a missing category, if a labeled row lacks it too


class FeatureEncoder:
    """Encodes columns of any type as numbers.

    Columns that can be read as numbers, and times, keep their values; missing ones become the mean. Other values are
    categories, numbered in sorted order, or in that of a pandas category. A category that no labeled row has becomes
    the mean; so does a value that is not a number in a column of numbers, with a warning.

    keeps_missing: all of these, and missing categories, are NaN instead
    """

    def __init__(self, keeps_missing: bool = False):
        self.keeps_missing = keeps_missing

    def fit(self, X: pd.DataFrame) -> FeatureEncoder:
        """X (rows, columns). Raises TypeError for a column of values that have no order, ValueError for infinity."""
        self.categories = [None if reads_as_numbers(column) else categories(column) for _, column in X.items()]
        self.lacking = X.isna().to_numpy().any(axis=0) & (not self.keeps_missing)
        numbers = self.encode(X, range(X.shape[1]))
        known = ~np.isnan(numbers)
        means = np.where(known, numbers, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        filled = np.where(known, numbers, means)
        varies = (filled != filled[0]).any(axis=0)
        if self.keeps_missing:
            varies |= (known != known[0]).any(axis=0)  # which values are missing is something to see too
        self.varying = np.flatnonzero(varies)
        self.means = means[self.varying]
        return self

    def transform(self, X: pd.DataFrame) -> np.ndarray:
        """float64 (rows, columns that vary among labeled rows), or a single column of zeros if none does"""
        if len(self.varying) == 0:
            return np.zeros((len(X), 1))
        numbers = self.encode(X, self.varying)
        return numbers if self.keeps_missing else np.where(np.isnan(numbers), self.means, numbers)

    def encode(self, X: pd.DataFrame, columns: Iterable[int]) -> np.ndarray:
        """float64 (rows, columns), NaN for unknown values; warns of values that are not numbers but should be"""
        unreadable: dict[Hashable, object] = {}  # of each column, the first such value
        numbers = np.column_stack([self.codes(X.iloc[:, j], j, unreadable) for j in columns])
        if unreadable:
            examples = ", ".join(f"{name!r} ({value!r})" for name, value in unreadable.items())
            warnings.warn(
                f"X has values that are not numbers in columns that held numbers in fit: {examples}; "
                "they are treated as missing",
                stacklevel=5,  # where a method of an estimator is called
            )
        with np.errstate(over="ignore"):
            assert_all_finite(numbers.astype(np.float32), allow_nan=True, input_name="X")
        return numbers

    def codes(self, column: pd.Series, j: int, unreadable: dict[Hashable, object]) -> np.ndarray:
        """float64 (rows,): column j of X as numbers"""
        known = self.categories[j]
        if known is None:
            try:
                return as_numbers(column)
            except (ValueError, TypeError):
                numbers = pd.to_numeric(column.astype(object), errors="coerce").to_numpy(float, na_value=np.nan)
                unreadable[column.name] = column[np.isnan(numbers) & column.notna()].iloc[0]
                return numbers
        if known.inferred_type == "string" and pd.api.types.is_numeric_dtype(column) and column.notna().any():
            raise ValueError(f"Column {column.name!r} of X held strings in fit, now it holds numbers")
        # scikit-learn's OrdinalEncoder refuses pandas categories of several types, bytes and tuples
        codes = known.get_indexer(column.astype(object)).astype(float)
        codes[codes < 0] = np.nan
        if self.lacking[j]:
            codes[column.isna()] = MISSING
        return codes


def as_numbers(column: pd.Series) -> np.ndarray:
    """float64 (rows,), times in microseconds; raises ValueError or TypeError if a value is neither number nor time."""
    if column.dtype.kind in "mM":
        column = column.dt.as_unit("us").astype("int64").where(column.notna())
    return pd.to_numeric(column).to_numpy(float, na_value=np.nan)


def reads_as_numbers(column: pd.Series) -> bool:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return False
    try:
        as_numbers(column)
    except (ValueError, TypeError):
        return False
    return True


def categories(column: pd.Series) -> pd.Index:
    """The different values of a column in order, as objects; raises TypeError if they have no order."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.remove_unused_categories().cat.categories.astype(object)
    try:
        return pd.Index(sorted(column.dropna().unique()), dtype=object)
    except TypeError:
        types = sorted({type(value).__name__ for value in column.dropna()})
        raise TypeError(
            f"Column {column.name!r} of X holds values of the types {', '.join(types)}; "
            "each argument must be a string or a number, and all of a column of one kind"
        ) from None
