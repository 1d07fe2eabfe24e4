"""needle: each query has one matching labeled row among many negatives.

This is the stress test of attention in TabICLv2 (arXiv 2602.11139). Its tables are not published; these are our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.table import MAX_CLASSES, TableSpec

CROWD = 2.0  # radius of the ball that holds the negatives
DISTANCE = 3.0  # of a needle from the center; 3 standard deviations of a negative with 2 features, 3.7 with 4
NOISE = 0.2  # standard deviation of a query around its needle; needles are at least 4.2 apart


@dataclass
class NeedlePlan:
    """The sizes of a table and the positions of its needles. All other values follow from the address."""

    address: tuple[int, ...]
    negatives: int
    queries: int
    directions: np.ndarray  # (needles, num_features), orthogonal or opposite unit vectors

    def __str__(self) -> str:
        needles, features = self.directions.shape
        sizes = f"{needles} needles, {self.negatives} negatives, {self.queries} queries, {features} features"
        return f"needle {self.address}: {sizes}\ndirections of the needles: {self.directions.round(2).tolist()}"


@dataclass
class Needle(Prior):
    """Needles in a haystack: one labeled row of each class lies outside a crowd of negatives, with queries next to it.

    Negatives are uniform in a ball around the origin and have the class of the first needle. A query has the class of
    its needle, so its class depends on a single labeled row, however many negatives there are.
    """

    needles: int = option(4, at_least=2, at_most=MAX_CLASSES)
    """Number of needles, each with its own class; at most the number of classes and twice the number of features."""

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> NeedlePlan:
        queries = spec.num_rows - spec.train_size
        needles = min(self.needles, spec.max_classes, 2 * spec.num_features)
        rng = rng_at(seed, "plan")
        axes = np.linalg.qr(rng.standard_normal((spec.num_features, spec.num_features)))[0]
        directions = rng.permutation(np.concatenate([axes, -axes]))[:needles]
        return NeedlePlan(seed, spec.train_size - needles, queries, directions)

    def execute(self, plan: NeedlePlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Draw the rows, labeled ones first; see `Prior.execute`. There are as many classes as needles."""
        rng = rng_at(plan.address, "execute")
        needles, features = plan.directions.shape

        # The crowd: random directions, and radii that make the points uniform in the ball.
        crowd = rng.standard_normal((plan.negatives, features))
        radius = CROWD * rng.random((plan.negatives, 1)) ** (1 / features)
        crowd *= radius / np.linalg.norm(crowd, axis=1, keepdims=True)

        # The labeled rows in random order. Needle i has class i, and the crowd has class 0.
        labeled = np.concatenate([DISTANCE * plan.directions, crowd])  # (train_size, M)
        classes = np.concatenate([np.arange(needles), np.zeros(plan.negatives, np.int64)])  # (train_size,)
        order = rng.permutation(len(labeled))

        # Queries are divided evenly among the needles, since a table with a class without queries would be rejected.
        needle_of_query = rng.permutation(np.arange(plan.queries) % needles)  # (queries,), also its class
        noise = NOISE * rng.standard_normal((plan.queries, features))
        queries = DISTANCE * plan.directions[needle_of_query] + noise

        columns = np.concatenate([labeled[order], queries]).astype(np.float32)  # (N, M)
        target = np.concatenate([classes[order], needle_of_query])  # (N,)
        return torch.from_numpy(columns), torch.from_numpy(target), needles
