"""A pretrained network as a scikit-learn classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_X_y

from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.ensemble import Ensemble
from tabicl_train.prediction.fine_tune import FineTune
from tabicl_train.prediction.predict import predict_logits


class TabICLClassifier(ClassifierMixin, Ensemble):
    """Predicts the classes of rows from labeled rows, without training: `fit` only prepares the table, unless it is to
    fine-tune the network.

    model: a run directory, a checkpoint, an export (a public file or a hub folder), or a network
    n_estimators: size of the ensemble, whose logits are averaged; members differ in normalization, order of features
        and numbering of classes, and the first one sees the table as it is
    norm_methods: some of "none", "power" and "quantile"; members take turns
    softmax_temperature: logits are divided by it
    memory_gb: memory that predictions may take besides the network and the table (GiB), approximately; labeled rows
        are computed in one piece, so many of them may need more
    device: "cpu", "cuda" and so on; by default CUDA if available
    random_state: seed of the ensemble and of fine-tuning
    fine_tune: how `fit` trains a copy of the network on the rows it is given; `fine_tuning_` then says what came of it

    X may be an array or a data frame, with numbers, booleans, times, strings, categories and missing values.

    With one estimator and the same normalization, the probabilities agree with the public client's to 1e-5, except if

    - a value lies about four standard deviations or more from the mean of the labeled rows: here it is clamped to that
      distance, as in the tables that networks are trained on; the client also adds the logarithm of its distance. With
      two labeled rows most rows are that far away, and "quantile" always puts the extremes there;
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
        fine_tune: FineTune | None = None,
    ):
        super().__init__(model, n_estimators, norm_methods, memory_gb, device, random_state, fine_tune)
        self.softmax_temperature = softmax_temperature

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
        self._prepare(X, len(self.classes_))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Labels (rows,)"""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (rows, classes), float64, classes in the order of `classes_`"""
        numbers = self._numbers(X)
        C = len(self.classes_)
        total = 0.0
        for members, pack, tokens in self._packs(numbers, lambda member: (self.y_ + member.shift) % C):
            logits = predict_logits(self.network_, pack, C, self.softmax_temperature, tokens)
            each = logits.unflatten(0, (len(members), -1)).double().cpu().numpy()  # (members, query rows, C)
            total += sum(np.roll(one, -member.shift, axis=-1) for one, member in zip(each, members, strict=True))
        return torch.softmax(torch.from_numpy(total / len(self.members_)), dim=-1).numpy()

    def _losses(self, X: pd.DataFrame, y: np.ndarray) -> np.ndarray:
        """Cross entropy of rows (rows,); y: their numbers in `classes_`"""
        p = self.predict_proba(X)[np.arange(len(y)), y]
        return -np.log(np.maximum(p, np.finfo(float).tiny))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if not self.softmax_temperature > 0:
            raise ValueError(f"softmax_temperature is {self.softmax_temperature}; it must be above 0")
