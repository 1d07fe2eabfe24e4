"""What a network is compared with: untuned scikit-learn models, and the public client with weights of its own."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from tabicl_train.errors import ConfigError

MAX_CATEGORIES = 255  # the limit of histogram gradient boosting; columns with more are dropped for it

is_category = make_column_selector(dtype_include="category")


def few_categories(X: pd.DataFrame) -> list[str]:
    return [name for name in is_category(X) if X[name].nunique() <= MAX_CATEGORIES]


def logistic_regression() -> ClassifierMixin:
    numbers = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    columns = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), is_category), remainder=numbers, sparse_threshold=0
    )
    return make_pipeline(columns, LogisticRegression(max_iter=2000))


def random_forest() -> ClassifierMixin:
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    columns = make_column_transformer((codes, is_category), remainder="passthrough")
    return make_pipeline(columns, RandomForestClassifier(random_state=0))


def gradient_boosting() -> ClassifierMixin:
    columns = make_column_transformer(
        ("passthrough", few_categories), ("drop", is_category), remainder="passthrough"
    ).set_output(transform="pandas")
    return make_pipeline(columns, HistGradientBoostingClassifier(random_state=0))


BASELINES: dict[str, Callable[[], ClassifierMixin]] = {
    "logistic regression": logistic_regression,
    "random forest": random_forest,
    "gradient boosting": gradient_boosting,
}


def public_client(weights: str, n_estimators: int) -> ClassifierMixin:
    """The released client with a weights file; raises ConfigError if the client is not installed."""
    try:
        from tabicl import TabICLClassifier
    except ImportError:
        raise ConfigError(["client_weights needs the public client: pip install tabicl==2.2.0"]) from None
    return TabICLClassifier(model_path=weights, allow_auto_download=False, n_estimators=n_estimators)
