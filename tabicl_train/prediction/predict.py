"""Predictions for tables of any size and any number of classes, in bounded memory.

B tables, N rows of which the first n are labelled, M features, G feature groups, E embedding, D row representation,
C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from tabicl_train.model.column import group_features
from tabicl_train.model.many_class import class_probabilities, label_digits
from tabicl_train.model.scaling import log_count
from tabicl_train.model.tabicl import TabICL

SMALLEST = 1e-6  # added to the probabilities of many classes before their logarithm is taken
CPU_PART = 2**19  # embedding values computed at once on a CPU: 2 MB stay in its cache, 1.3 to 1.7 times faster


@torch.no_grad()
def predict_logits(
    model: TabICL, X: Tensor, y_train: Tensor, num_classes: int, temperature: float = 1.0, tokens: int = 2**22
) -> Tensor:
    """Logits of the query rows divided by the temperature, (B, N - n, C).

    With more classes than the network's max_classes, they are logarithms of probabilities instead.

    X: (B, N, M) float32
    y_train: (B, n) int64, labels of the first n rows, in 0..C-1; with more than max_classes classes, each class must
        occur in every table
    num_classes: C
    tokens: tokens (table, row, feature) in memory at a time, approximately; or twice those of the labelled rows, if
        that is more
    """
    n = y_train.shape[1]
    labelled, queries = X[:, :n], X[:, n:]
    # Query rows do not see each other. A part of fewer than n of them would mostly recompute the labelled rows.
    part = max(n, tokens // (X.shape[0] * X.shape[2]) - n)
    logits = [
        forward(model, torch.cat([labelled, some], dim=1), y_train, num_classes, temperature, tokens)
        for some in queries.split(part, dim=1)
    ]
    return torch.cat(logits, dim=1)


def forward(model: TabICL, X: Tensor, y_train: Tensor, num_classes: int, temperature: float, tokens: int) -> Tensor:
    """What predict_logits returns, for all query rows at once."""
    config, column = model.config, model.col_embedder
    log_n = log_count(y_train.shape[1], X)
    groups = group_features(X, config.col_grouping, config.group_size)  # (B, G, N, group_size)
    B, G, N, _ = groups.shape
    views = label_digits(y_train, num_classes, config.max_classes) if config.col_target_aware else [y_train]

    def embed(some: Tensor) -> Tensor:
        per_view = (column.embed(some, view, log_n) for view in views)
        return reduce(torch.add, per_view) / len(views)  # (B, some of G, N, E)

    part = tokens if X.is_cuda else min(tokens, CPU_PART // config.embed_dim)
    embedded = in_parts(embed, groups, dim=1, size=part // (B * N))  # (B, G, N, E)
    rows = in_parts(model.row_interactor, embedded, dim=2, size=part // (B * G))  # (B, N, D)
    if num_classes <= config.max_classes:
        return model.icl_predictor(rows, y_train, log_n)[..., :num_classes] / temperature
    tables = zip(rows, y_train, strict=True)
    p = [class_probabilities(model.icl_predictor, *table, num_classes, temperature) for table in tables]
    return torch.log(torch.stack(p) + SMALLEST)


def in_parts(stage: Callable[[Tensor], Tensor], x: Tensor, dim: int, size: int) -> Tensor:
    """stage(x), computed for at most `size` entries of dimension `dim` at a time; in the result it is dimension 1."""
    return torch.cat([stage(some) for some in x.split(max(1, size), dim)], dim=1)
