"""Baselines of a network: untuned scikit-learn models, and the `tabicl` package with its own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, make_column_selector, make_column_transformer
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import MARGINAL

MAX_CATEGORIES = 255  # the limit of histogram gradient boosting; columns with more are dropped for it

is_category = make_column_selector(dtype_include="category")


def boosted(X: pd.DataFrame) -> list[str]:
    """List the columns that gradient boosting supports; it also fails on empty ones."""
    many = {name for name in is_category(X) if X[name].nunique() > MAX_CATEGORIES}
    return [name for name in X if name not in many and X[name].notna().any()]


def one_hot() -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    return make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), is_category), remainder=numbers, sparse_threshold=0
    )


def codes() -> ColumnTransformer:
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    return make_column_transformer((encoder, is_category), remainder="passthrough")


def native_categories() -> ColumnTransformer:
    return make_column_transformer(("passthrough", boosted)).set_output(transform="pandas")


class MarginalQuantiles(DummyRegressor):
    """Predicts the mean and the quantiles of the labeled rows for every row."""

    def fit(self, X: pd.DataFrame, y: np.ndarray) -> MarginalQuantiles:
        self.y_ = y
        return super().fit(X, y)

    def predict_quantiles(self, X: pd.DataFrame, levels: Sequence[float]) -> np.ndarray:
        return np.tile(np.quantile(self.y_, levels), (len(X), 1))


BASELINES: dict[str, Callable[[], BaseEstimator]] = {
    "logistic regression": lambda: make_pipeline(one_hot(), LogisticRegression(max_iter=2000)),
    "random forest": lambda: make_pipeline(codes(), RandomForestClassifier(random_state=0)),
    "gradient boosting": lambda: make_pipeline(native_categories(), HistGradientBoostingClassifier(random_state=0)),
}
NUMBER_BASELINES: dict[str, Callable[[], BaseEstimator]] = {
    "ridge regression": lambda: make_pipeline(one_hot(), Ridge()),
    "random forest": lambda: make_pipeline(codes(), RandomForestRegressor(random_state=0)),
    "gradient boosting": lambda: make_pipeline(native_categories(), HistGradientBoostingRegressor(random_state=0)),
    MARGINAL: MarginalQuantiles,
}


def tabicl_package(weights: str, n_estimators: int, numbers: bool) -> BaseEstimator:
    """Make an estimator of the `tabicl` package, for classes or numbers; raises ConfigError if it is not installed."""
    try:
        from tabicl import TabICLClassifier, TabICLRegressor
    except ImportError:
        raise ConfigError(["tabicl_weights needs the package: pip install tabicl==2.2.0"]) from None

    class Regressor(TabICLRegressor):
        def predict_quantiles(self, X: pd.DataFrame, levels: Sequence[float]) -> np.ndarray:
            return self.predict(X, output_type="quantiles", alphas=list(levels))

    estimator = Regressor if numbers else TabICLClassifier
    return estimator(model_path=weights, allow_auto_download=False, n_estimators=n_estimators)
