"""A pretrained network as a scikit-learn classifier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from priors.real.features import FeatureEncoder
from priors.real.views import NORM_METHODS, Normalizer, View, draw_views
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.predict import predict_logits

EMBEDDINGS_PER_TOKEN = 16  # in float32, which a prediction has in memory; measured


class TabICLClassifier(ClassifierMixin, BaseEstimator):
    """Predicts the classes of rows from labelled rows, without training: `fit` only prepares the table.

    model: a run directory, a checkpoint, an export (a public file or a hub folder), or a network
    n_estimators: size of the ensemble, whose logits are averaged; members differ in normalization, order of features
        and numbering of classes, and the first one sees the table as it is
    norm_methods: some of "none", "power" and "quantile"; members take turns
    softmax_temperature: logits are divided by it
    memory_gb: memory that predictions may take besides the network and the table (GiB), approximately; labelled rows
        are computed in one piece, so many of them may need more
    device: "cpu", "cuda" and so on; by default CUDA if available
    random_state: seed of the ensemble

    X may be an array or a data frame, with numbers, booleans, times, strings, categories and missing values.

    With one estimator and the same normalization, the probabilities agree with the public client's to 1e-5, except if

    - a value lies about four standard deviations or more from the mean of the labelled rows: here it is clamped to that
      distance, as in the tables that networks are trained on; the client also adds the logarithm of its distance. With
      two labelled rows most rows are that far away, and "quantile" always puts the extremes there;
    - a column has a standard deviation of 0.001 or less: the client adds 1e-6 to it, so that columns in small units
      fade; here units make no difference.
    """

    def __init__(
        self,
        model: str | Path | TabICL,
        n_estimators: int = 8,
        norm_methods: tuple[str, ...] = ("none", "power"),
        softmax_temperature: float = 0.9,
        memory_gb: float = 4.0,
        device: str | None = None,
        random_state: int | None = 0,
    ):
        self.model = model
        self.n_estimators = n_estimators
        self.norm_methods = norm_methods
        self.softmax_temperature = softmax_temperature
        self.memory_gb = memory_gb
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> TabICLClassifier:
        """X (rows, features), y (rows,) with at least two classes of any type; raises ValueError or TypeError."""
        self._check_parameters()
        X = self._frame(X, y)
        if pd.isna(np.asarray(y, dtype=object)).any():
            raise ValueError("Input y contains NaN.")
        _, y = check_X_y(np.broadcast_to(0.0, X.shape), y)  # as many rows as labels, at least one
        check_classification_targets(y)
        self.classes_, self.y_ = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "This classifier needs samples of at least 2 classes in the data, but the data contains only one "
                f"class: {self.classes_[0]}"
            )
        self.encoder_ = FeatureEncoder().fit(X)
        self.X_ = self.encoder_.transform(X)
        self.normalizers_ = {method: Normalizer(method).fit(self.X_) for method in self.norm_methods}
        rng = check_random_state(self.random_state)
        self.views_ = draw_views(rng, self.n_estimators, self.norm_methods, self.X_.shape[1], len(self.classes_))
        self.device_ = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network_ = load(self.model).eval().to(self.device_)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Labels (rows,)"""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (rows, classes), float64, classes in the order of `classes_`"""
        check_is_fitted(self)
        numbers = self.encoder_.transform(self._frame(X))
        tables = {
            method: np.concatenate([normalizer.transform(self.X_), normalizer.transform(numbers)])
            for method, normalizer in self.normalizers_.items()
        }
        rows, features = next(iter(tables.values())).shape
        width = EMBEDDINGS_PER_TOKEN * 4 * self.network_.config.embed_dim
        tokens = int(self.memory_gb * 2**30 / width)
        size = max(1, tokens // (rows * features))
        total = 0.0
        for start in range(0, len(self.views_), size):
            total += self._logits(tables, self.views_[start : start + size], tokens).sum(axis=0)
        return torch.softmax(torch.from_numpy(total / len(self.views_)), dim=-1).numpy()

    def _logits(self, tables: dict[str, np.ndarray], views: list[View], tokens: int) -> np.ndarray:
        """Logits of each view, classes in the order of `classes_`: float64 (views, query rows, classes)"""
        C = len(self.classes_)
        X = np.stack([tables[view.norm_method][:, view.features] for view in views])
        y = np.stack([(self.y_ + view.shift) % C for view in views])
        logits = predict_logits(
            self.network_,
            Pack.stack(torch.from_numpy(X).to(self.device_), torch.from_numpy(y).to(self.device_)),
            C,
            self.softmax_temperature,
            tokens,
        )
        numbers = logits.unflatten(0, (len(views), -1)).double().cpu().numpy()
        return np.stack([np.roll(one, -view.shift, axis=-1) for one, view in zip(numbers, views, strict=True)])

    def _frame(self, X: Any, *y: Any) -> pd.DataFrame:
        """X as a data frame; without labels, its columns must be those of fit."""
        frame = X if isinstance(X, pd.DataFrame) else pd.DataFrame(check_array(X, dtype=None, ensure_all_finite=False))
        check_array(np.broadcast_to(0.0, frame.shape))  # raises for a frame without rows or columns
        validate_data(self, X, *y, reset=bool(y), skip_check_array=True)
        return frame

    def _check_parameters(self) -> None:
        if self.n_estimators < 1:
            raise ValueError(f"n_estimators is {self.n_estimators}; it must be at least 1")
        if not self.norm_methods or not set(self.norm_methods) <= NORM_METHODS.keys():
            raise ValueError(f"norm_methods is {self.norm_methods!r}; it must hold some of {', '.join(NORM_METHODS)}")
        if not self.softmax_temperature > 0:
            raise ValueError(f"softmax_temperature is {self.softmax_temperature}; it must be above 0")
        if not self.memory_gb > 0:
            raise ValueError(f"memory_gb is {self.memory_gb}; it must be above 0")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


def load(model: str | Path | TabICL) -> TabICL:
    """The network in a file, or a copy of a network, so that its owner may go on training it; ValueError for one that
    predicts numbers."""
    if isinstance(model, TabICL):
        network = copy.deepcopy(model)
    else:
        from tabicl_train.prediction.export import load_model

        network = load_model(str(model))
    if network.config.is_regression:
        raise ValueError("The network predicts numbers, and this is a classifier.")
    return network
