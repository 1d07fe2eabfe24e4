"""What the classifier and the regressor share: tables as numbers, the members of the ensemble, and the network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from priors.real.preprocessing import NORM_METHODS, FeatureEncoder, Member, Normalizer, draw_members
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.fine_tune import FineTune, fine_tune

EMBEDDINGS_PER_TOKEN = 16  # in float32, which a prediction has in memory; measured


@dataclass(repr=False, eq=False)
class Ensemble(BaseEstimator):
    """A pretrained network that predicts for each member of an ensemble; TabICLClassifier describes the parameters."""

    model: str | Path | TabICL
    n_estimators: int = 8
    norm_methods: tuple[str, ...] = ("none", "power")
    memory_gb: float = 4.0
    device: str | None = None
    random_state: int | None = 0
    fine_tune: FineTune | None = None

    def _prepare(self, X: pd.DataFrame, num_classes: int) -> None:
        """Fit everything but the labels, `y_`, which are known already; a regressor has num_classes=0."""
        self.network_ = load(self.model, regression=num_classes == 0).eval()
        self.encoder_ = FeatureEncoder(self.network_.config.missing_values).fit(X)
        self.X_ = self.encoder_.transform(X)
        self.normalizers_ = {method: Normalizer(method).fit(self.X_) for method in self.norm_methods}
        rng = check_random_state(self.random_state)
        self.members_ = draw_members(rng, self.n_estimators, self.norm_methods, self.X_.shape[1], num_classes)
        self.device_ = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.network_.to(self.device_)
        self.fine_tuning_ = None  # also if fine-tuning is interrupted
        if self.fine_tune is not None:
            self.fine_tuning_ = fine_tune(self, self.fine_tune, X)

    def _numbers(self, X: Any) -> np.ndarray:
        """Query rows as numbers, float64 (rows, features), NaN where missing if the network sees that; called by the
        public methods themselves, so that a warning names the line that calls them."""
        check_is_fitted(self)
        return self.encoder_.transform(self._frame(X))

    def _packs(
        self, numbers: np.ndarray, labels: Callable[[Member], np.ndarray]
    ) -> Iterator[tuple[list[Member], Pack, int]]:
        """Some members at a time, their tables on the device, and the tokens that may be in memory.

        numbers: query rows, (rows, features)
        labels: those of the labeled rows, as a member sees them
        """
        tables = {
            method: np.concatenate([normalizer.transform(self.X_), normalizer.transform(numbers)])
            for method, normalizer in self.normalizers_.items()
        }
        rows, features = next(iter(tables.values())).shape
        config = self.network_.config
        width = EMBEDDINGS_PER_TOKEN * config.embed_dim + config.outputs / features  # a row also keeps 999 quantiles
        tokens = int(self.memory_gb * 2**30 / (4 * width))
        size = max(1, tokens // (rows * features))
        for start in range(0, len(self.members_), size):
            members = self.members_[start : start + size]
            stacked = np.stack([tables[member.norm_method][:, member.features] for member in members])
            y = np.stack([labels(member) for member in members])
            pack = Pack.stack(torch.from_numpy(stacked).to(self.device_), torch.from_numpy(y).to(self.device_))
            yield members, pack, tokens

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
            raise ValueError(f"norm_methods is {self.norm_methods!r}; it must be some of {', '.join(NORM_METHODS)}")
        if not self.memory_gb > 0:
            raise ValueError(f"memory_gb is {self.memory_gb}; it must be above 0")
        if not isinstance(self.fine_tune, FineTune | None):
            raise TypeError(f"fine_tune is {self.fine_tune!r}; it must be None or FineTune(...), with its options")
        if self.fine_tune is not None:
            self.fine_tune.check()

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags


def load(model: str | Path | TabICL, regression: bool) -> TabICL:
    """The network in a file, or a copy of a network, so that its owner may go on training it, in float32.

    Raises ValueError if it is of the other task.
    """
    if isinstance(model, TabICL):
        network = copy.deepcopy(model).float()
    else:
        from tabicl_train.prediction.export import load_model

        network = load_model(str(model))
    if network.config.is_regression != regression:
        found, needed = ("classes", "a regressor") if regression else ("numbers", "a classifier")
        raise ValueError(f"The network predicts {found}, and this is {needed}.")
    return network
