"""From the columns of a data frame to the numbers that a network reads, fitted on labelled rows only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable

import numpy as np
import pandas as pd
from sklearn.preprocessing import FunctionTransformer, PowerTransformer, QuantileTransformer, StandardScaler
from sklearn.utils import assert_all_finite

from priors.finish import MIN_STD, OUTLIER_STDS  # real tables are clamped like those that networks are trained with

MISSING = -1.0  # the code of a missing category, where labelled rows lack it too
TINY = 1e-150  # smaller numbers count as 0

NORM_METHODS: dict[str, Callable] = {  # by the number of labelled rows
    "none": lambda rows: FunctionTransformer(),
    "power": lambda rows: PowerTransformer(standardize=False),
    "quantile": lambda rows: QuantileTransformer(n_quantiles=min(rows, 1000), output_distribution="normal"),
}


class FeatureEncoder:
    """Columns as numbers without gaps.

    What reads as a number is one, and so is a time; a missing one becomes the mean. Other values are categories,
    numbered in their sorted order, or that of a pandas category. One that no labelled row holds becomes the mean, and
    so does a value that is no number in a column of numbers, with a warning.
    """

    def fit(self, X: pd.DataFrame) -> FeatureEncoder:
        self.categories = [None if reads_as_numbers(column) else categories(column) for _, column in X.items()]
        self.lacking = X.isna().to_numpy().any(axis=0)
        numbers = self.encode(X, range(X.shape[1]))
        known = ~np.isnan(numbers)
        means = np.where(known, numbers, 0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        filled = np.where(known, numbers, means)
        self.varying = np.flatnonzero((filled != filled[0]).any(axis=0))
        self.means = means[self.varying]
        return self

    def transform(self, X: pd.DataFrame) -> np.ndarray:
        """float64 (rows, columns that vary among labelled rows), or a single zero a row if none does"""
        if len(self.varying) == 0:
            return np.zeros((len(X), 1))
        numbers = self.encode(X, self.varying)
        return np.where(np.isnan(numbers), self.means, numbers)

    def encode(self, X: pd.DataFrame, columns: Iterable[int]) -> np.ndarray:
        """float64 (rows, columns), NaN where nothing is known; warns of values that should be numbers and are not"""
        unreadable: dict[Hashable, object] = {}  # the first such value of a column
        numbers = np.column_stack([self.codes(X.iloc[:, j], j, unreadable) for j in columns])
        if unreadable:
            examples = ", ".join(f"{name!r} ({value!r})" for name, value in unreadable.items())
            warnings.warn(
                f"X has values that are not numbers in columns that held numbers in fit: {examples}; "
                "they are treated as missing",
                stacklevel=4,  # where predict or predict_proba is called
            )
        with np.errstate(over="ignore"):
            assert_all_finite(numbers.astype(np.float32), allow_nan=True, input_name="X")
        return numbers

    def codes(self, column: pd.Series, j: int, unreadable: dict[Hashable, object]) -> np.ndarray:
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
        codes = known.get_indexer(column.astype(object)).astype(float)
        codes[codes < 0] = np.nan
        if self.lacking[j]:
            codes[column.isna()] = MISSING
        return codes


def as_numbers(column: pd.Series) -> np.ndarray:
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
    """The different values of a column in order, as objects."""
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


class Normalizer:
    """Columns of numbers with a shape from NORM_METHODS, outliers clamped, zero mean, unit variance."""

    def __init__(self, method: str):
        self.method = method

    def fit(self, numbers: np.ndarray) -> Normalizer:
        self.scaler = StandardScaler().fit(without_tiny(numbers))
        scaled = self.scaler.transform(without_tiny(numbers))
        self.shaper = NORM_METHODS[self.method](len(numbers)).fit(scaled)
        shaped = self.shaper.transform(scaled)
        inside = np.abs(shaped - shaped.mean(axis=0)) <= OUTLIER_STDS * shaped.std(axis=0)
        mean = shaped.mean(axis=0, where=inside)
        bound = OUTLIER_STDS * np.maximum(shaped.std(axis=0, where=inside), MIN_STD)
        self.low, self.high = mean - bound, mean + bound
        clamped = shaped.clip(self.low, self.high)
        self.mean, self.std = clamped.mean(axis=0), np.maximum(clamped.std(axis=0), MIN_STD)
        return self

    def transform(self, numbers: np.ndarray) -> np.ndarray:
        """float32, of the shape of `numbers`"""
        shaped = self.shaper.transform(self.scaler.transform(without_tiny(numbers))).clip(self.low, self.high)
        return ((shaped - self.mean) / self.std).astype(np.float32)


def without_tiny(numbers: np.ndarray) -> np.ndarray:
    """With 0 for numbers whose squares underflow: a column of them would have no variance, yet different values."""
    return np.where(np.abs(numbers) < TINY, 0.0, numbers)
