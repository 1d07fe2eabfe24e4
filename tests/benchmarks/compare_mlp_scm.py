"""Does mlp_scm draw from the distribution of the released generator? A classifier tries to tell their tables apart.

    python tests/benchmarks/compare_mlp_scm.py [tables=500] [rows=512] [causal=0]

Prints what compare_graph_scm.py prints. With causal=1 the features are hidden units on both sides, which is not the
default of the released generator.
"""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from compare_graph_scm import report, statistics
from generators import PlainTable, own_tables

from priors import build_prior

MAX_FEATURES = 40


def released_tables(num_rows: int, causal: bool) -> Iterator[PlainTable]:
    """Yield tables of the released generator with `num_rows` rows."""
    from tabicl.prior import PriorDataset

    # It draws from the global generators of Python, numpy and torch.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    defaults = inspect.signature(PriorDataset).parameters["scm_fixed_hp"].default
    dataset = PriorDataset(
        batch_size=1,
        batch_size_per_gp=1,
        min_features=1,
        max_features=MAX_FEATURES,
        max_seq_len=num_rows,
        prior_type="mlp_scm",
        n_jobs=1,
        scm_fixed_hp=defaults | {"is_causal": causal},
    )
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            X, y, num_features, _, train_size = dataset.get_batch()
        yield X[0, :, : int(num_features[0])].numpy(), y[0].numpy().astype(np.int64), int(train_size[0])


if __name__ == "__main__":
    args = {"tables": 500, "rows": 512, "causal": 0}
    args |= {name: int(value) for name, value in (argument.split("=") for argument in sys.argv[1:])}
    tables, rows, causal = args["tables"], args["rows"], args["causal"]
    torch.set_num_threads(1)
    prior = build_prior("mlp_scm", causal=bool(causal))
    report(
        [statistics(table) for table in islice(own_tables(prior, rows, MAX_FEATURES), tables)],
        [statistics(table) for table in islice(released_tables(rows, bool(causal)), tables)],
    )
