"""What the filter of unpredictable tables decides, and what the test of the paper does."""

import numpy as np

from priors.graph.predictability import check_predictability
from priors.finish import Rejected
from priors.random import rng_at
from priors.table import Table


def verdict(table: Table, seed: int, unpredictable: bool = True, trivial: bool = False) -> str:
    try:
        check_predictability(table, rng_at("filter", seed), unpredictable, trivial)
    except Rejected as rejected:
        return rejected.reason
    return "kept"


def reference_verdict(mean: np.ndarray, model: np.ndarray, seed: int) -> str:
    """The test of the paper, 200 bootstrap resamples of the rows, on the squared errors (N,) of mean and model."""
    improvement = mean - model
    rows = np.random.default_rng(seed).integers(len(improvement), size=(200, len(improvement)))
    return "unpredictable" if np.mean(improvement[rows].mean(1) <= 0) >= 0.05 else "kept"


def assert_same_verdicts(tables: list[Table], reference: list[str]) -> None:
    """Of 60 tables, those that are close to the border may be judged differently."""
    ours = [verdict(table, seed) for seed, table in enumerate(tables)]
    assert np.mean([a == b for a, b in zip(ours, reference, strict=True)]) >= 0.95
    assert 20 <= reference.count("kept") <= 40
