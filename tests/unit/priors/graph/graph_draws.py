"""What the tests of graph_scm's parts draw."""

import numpy as np

from priors import TableSpec, build_prior
from priors.graph.scalars import Scalars
from priors.random import rng_at

PRESETS = ("corrected", "released")
SPEC = TableSpec(num_rows=60, train_size=30, num_features=8)


def draw_scalars(seed: int, skewed_choices: bool = False) -> Scalars:
    return Scalars(rng_at("parts", seed), skewed_choices)


def draw_plans(count: int, spec: TableSpec = SPEC, **options) -> list:
    prior = build_prior("graph_scm", **options)
    return [prior.plan(spec, (seed,)) for seed in range(count)]


def columns_of(plan) -> list:
    """All (node, column) of a plan."""
    return [(node, column) for node in plan.nodes for column in node.columns]


def draw_points(n: int, size: int, seed: int = 0) -> np.ndarray:
    """Standard normal points, float32 (n, size)."""
    return rng_at("plan points", seed).standard_normal((n, size)).astype(np.float32)
