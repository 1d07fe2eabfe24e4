"""Predictions of a model on a table of numbers."""

from __future__ import annotations

import numpy as np
import torch

from tabicl_train.model import TabICL

CLIP = 10.0  # standard deviations; the prior's columns hardly leave them


@torch.no_grad()
def predict_proba(model: TabICL, X_train: np.ndarray, y_train: np.ndarray, X_query: np.ndarray) -> np.ndarray:
    """Class probabilities (n_query, n_classes) of query rows, given labelled rows.

    X_train: (n_train, M), X_query: (n_query, M), numbers
    y_train: (n_train,) labels in 0..n_classes-1, at most the model's max_classes

    Features are standardised by the labelled rows; columns that are constant there are dropped.
    """
    mean, std = X_train.mean(axis=0), X_train.std(axis=0)
    kept = std > 0
    rows = (np.concatenate([X_train, X_query])[:, kept] - mean[kept]) / std[kept]
    X = torch.from_numpy(np.clip(rows, -CLIP, CLIP)).float()[None]  # (1, N, M)
    logits = model(X, torch.from_numpy(y_train).long()[None])[0]  # (n_query, C)
    classes = int(y_train.max()) + 1
    return logits[:, :classes].double().softmax(dim=-1).numpy()
