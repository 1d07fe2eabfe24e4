"""Tables of our priors, and of the released generator with the same settings."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from priors.prior import Prior
from priors.random import rng_at
from priors.table import MAX_CLASSES, TableSpec

MAX_FEATURES = 100
PlainTable = tuple[np.ndarray, np.ndarray, int]  # X float32 (num_rows, M), y (num_rows,) as in Table, train_size


def own_tables(
    prior: Prior, num_rows: int, max_features: int = MAX_FEATURES, max_classes: int = MAX_CLASSES
) -> Iterator[PlainTable]:
    """Yield tables of a prior with 1..max_features features, where 10 % to 90 % of the rows are labeled.

    Parameters
    ----------
    prior : Prior
        The prior.
    num_rows : int
        Rows of each table.
    max_features, max_classes : int, optional
        The most features and classes; 0 classes give numeric targets.
    """
    rng = rng_at("bench", 0)
    for index in itertools.count():
        train_size = int(rng.integers(num_rows // 10, num_rows * 9 // 10))
        spec = TableSpec(num_rows, train_size, int(rng.integers(1, max_features + 1)), max_classes)
        table = prior.sample(spec, (0, index))
        yield table.X.cpu().numpy(), table.y.cpu().numpy(), train_size


def released_tables(name: str, num_rows: int, max_classes: int = MAX_CLASSES) -> Iterator[PlainTable]:
    """Yield tables of the released generator (tabicl 2.2.0) with the same settings, for graph_scm with its filters."""
    from tabicl.prior import PriorDataset
    from tabicl.prior._dataset import PriorConfig

    # It draws from the global generators of Python, numpy and torch.
    filtered = name == "graph_scm"
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dataset = PriorDataset(
        regression=max_classes == 0,
        batch_size=1,
        batch_size_per_gp=1,
        min_features=1,
        max_features=MAX_FEATURES,
        max_classes=max_classes,
        max_seq_len=num_rows,
        prior_type=name,
        n_jobs=1,
        config=PriorConfig(filter_unpredictable_datasets=filtered, filter_unpredictable_graphs=filtered),
    )
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            X, y, num_features, _, train_size = dataset.get_batch()
        X = X[0, :, : int(num_features[0])]
        yield X.numpy(), y[0].numpy().astype(np.int64 if max_classes else np.float32), int(train_size[0])
