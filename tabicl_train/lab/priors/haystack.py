"""haystack: some queries need one labeled row, others the mean of many.

It extends the stress test of attention in TabICLv2 (arXiv 2602.11139), see needle.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.table import MAX_CLASSES, TableSpec
from tabicl_train.lab.priors.needle import CROWD, DISTANCE, NOISE

MARGIN = 0.5  # distance of a crowd query from the plane that divides the crowd


@dataclass
class HaystackPlan:
    """The sizes of a table, its needles and the two halves of its crowd. All other values follow from the address."""

    address: tuple[int, ...]
    negatives: int
    queries: int
    directions: np.ndarray  # (needles, num_features), orthogonal or opposite unit vectors
    halves: np.ndarray  # (2,), most frequent class in each half of the crowd

    def __str__(self) -> str:
        needles, features = self.directions.shape
        sizes = f"{needles} needles, {self.negatives} negatives, {self.queries} queries, {features} features"
        return f"haystack {self.address}: {sizes}, halves of the classes {self.halves.tolist()}"


@dataclass
class Haystack(Prior):
    """Needles and a crowd whose labels are noisy: every second query lies next to a needle, the others in the crowd.

    The crowd is a ball that a plane divides into two halves. Each half has a class, which `share` of its rows have; the
    other rows have any other class. A query next to a needle has the class of that single row. A query in the crowd has
    the class of its half, which only the mean of many rows tells. The first, third, ... queries are next to needles.
    """

    needles: int = option(4, at_least=2, at_most=MAX_CLASSES)
    """Number of needles, each with its own class; at most the number of classes and twice the number of features."""
    share: float = option(0.4, above=0, at_most=1)
    """Share of the rows of a half of the crowd that have its class."""

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> HaystackPlan:
        queries = spec.num_rows - spec.train_size
        needles = min(self.needles, spec.max_classes, 2 * spec.num_features)
        rng = rng_at(seed, "plan")
        axes = np.linalg.qr(rng.standard_normal((spec.num_features, spec.num_features)))[0]
        directions = rng.permutation(np.concatenate([axes, -axes]))[:needles]
        halves = rng.permutation(needles)[:2]
        return HaystackPlan(seed, spec.train_size - needles, queries, directions, halves)

    def execute(self, plan: HaystackPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Draw the rows, labeled ones first; see `Prior.execute`. There are as many classes as needles."""
        rng = rng_at(plan.address, "execute")
        needles, features = plan.directions.shape
        # The unit normal of the plane through the origin that divides the crowd.
        normal = rng.standard_normal(features)
        normal /= np.linalg.norm(normal)

        # The crowd. A row has the class of its half or, with label noise, another one.
        crowd = draw_crowd(rng, plan.negatives, features)
        class_of_half = plan.halves[(crowd @ normal > 0).astype(int)]  # (negatives,)
        other_class = (class_of_half + rng.integers(1, needles, size=plan.negatives)) % needles
        class_of_crowd = np.where(rng.random(plan.negatives) < self.share, class_of_half, other_class)

        # The labeled rows in random order; needle i has class i.
        labeled = np.concatenate([DISTANCE * plan.directions, crowd])  # (train_size, M)
        classes = np.concatenate([np.arange(needles), class_of_crowd])  # (train_size,)
        order = rng.permutation(len(labeled))

        # Two points for each query, of which it takes one in turn. The first is next to a needle.
        is_near = np.arange(plan.queries) % 2 == 0
        needle_of_query = rng.permutation(np.arange(plan.queries) % needles)
        noise = NOISE * rng.standard_normal((plan.queries, features))
        near = DISTANCE * plan.directions[needle_of_query] + noise

        # The second is in the crowd. It keeps a distance from the plane, since next to the plane half of its neighbors
        # have the class of the other side.
        inside = draw_crowd(rng, plan.queries, features)
        height = inside @ normal  # signed distance from the plane
        sign = np.where(height > 0, 1.0, -1.0)
        inside += np.maximum(MARGIN - np.abs(height), 0)[:, None] * sign[:, None] * normal

        queries = np.where(is_near[:, None], near, inside)
        class_of_query = np.where(is_near, needle_of_query, plan.halves[(sign > 0).astype(int)])
        columns = np.concatenate([labeled[order], queries]).astype(np.float32)  # (N, M)
        target = np.concatenate([classes[order], class_of_query])  # (N,)
        return torch.from_numpy(columns), torch.from_numpy(target), needles


def draw_crowd(rng: np.random.Generator, count: int, features: int) -> np.ndarray:
    """Draw points that are uniform in a ball around the origin, (count, features)."""
    points = rng.standard_normal((count, features))
    radius = CROWD * rng.random((count, 1)) ** (1 / features)
    return points * radius / np.linalg.norm(points, axis=1, keepdims=True)
