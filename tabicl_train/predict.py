"""Predictions of a network for tables of any size and number of classes, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tabicl_train.model import TabICL
from tabicl_train.model.column import group_features
from tabicl_train.model.many_class import class_probabilities, label_digits
from tabicl_train.model.scaling import log_count

CLIP = 10.0  # standard deviations; the prior's columns hardly leave them
SMALLEST = 1e-6  # added to the probabilities of many classes before their logarithm is taken


@torch.no_grad()
def predict_logits(
    model: TabICL, X: Tensor, y_train: Tensor, num_classes: int, temperature: float = 1.0, tokens: int = 2**22
) -> Tensor:
    """Logits of query rows over the temperature; logarithms of probabilities of more classes than the network has.

    X: (B, N, M) float32
    y_train: (B, n) int64, labels of the first n rows, in 0..num_classes-1; where these are more than the network's
        max_classes, each must occur in every table
    tokens: about so many (table, row, feature) are computed at a time, and at most twice the labelled ones are kept
    returns: (B, N - n, num_classes)
    """
    n = y_train.shape[1]
    labelled, queries = X[:, :n], X[:, n:]
    # query rows do not see each other; a part of fewer than n of them would mostly compute the labelled rows again
    part = max(n, tokens // (X.shape[0] * X.shape[2]) - n)
    logits = [
        forward(model, torch.cat([labelled, some], dim=1), y_train, num_classes, temperature, tokens)
        for some in queries.split(part, dim=1)
    ]
    return torch.cat(logits, dim=1)


def forward(model: TabICL, X: Tensor, y_train: Tensor, num_classes: int, temperature: float, tokens: int) -> Tensor:
    """What predict_logits returns, of all query rows at once."""
    config, column = model.config, model.col_embedder
    log_n = log_count(y_train.shape[1], X)
    groups = group_features(X, config.col_grouping, config.group_size)  # (B, G, N, group_size)
    B, G, N, _ = groups.shape
    views = label_digits(y_train, num_classes, config.max_classes) if config.col_target_aware else [y_train]

    def embed(some: Tensor) -> Tensor:
        return sum(column.embed(some, view, log_n) for view in views) / len(views)

    embedded = in_parts(embed, groups, dim=1, size=tokens // (B * N))  # (B, G, N, E)
    rows = in_parts(model.row_interactor, embedded, dim=2, size=tokens // (B * G))  # (B, N, D)
    if num_classes <= config.max_classes:
        return model.icl_predictor(rows, y_train, log_n)[..., :num_classes] / temperature
    tables = zip(rows, y_train, strict=True)
    p = [class_probabilities(model.icl_predictor, *table, num_classes, temperature) for table in tables]
    return torch.log(torch.stack(p) + SMALLEST)


def in_parts(stage: Callable[[Tensor], Tensor], x: Tensor, dim: int, size: int) -> Tensor:
    """stage(x), computed for at most `size` entries along a dimension at a time; these come out as dimension 1."""
    return torch.cat([stage(some) for some in x.split(max(1, size), dim)], dim=1)


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
