"""dummy: Gaussian features and independent uniform labels, for tests of everything that uses a prior."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from priors.prior import Prior
from priors.random import rng_at
from priors.table import TableSpec


@dataclass
class DummyPlan:
    """The size of a table of noise; its values follow from the address."""

    address: tuple[int, ...]
    num_rows: int
    num_features: int
    num_classes: int

    def __str__(self) -> str:
        return f"dummy {self.address}: {self.num_rows} rows, {self.num_features} features, {self.num_classes} classes"


@dataclass
class Dummy(Prior):
    """Gaussian noise with labels that have nothing to do with it, for tests."""

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> DummyPlan:
        num_classes = int(rng_at(seed, "plan").integers(2, spec.max_classes + 1))
        return DummyPlan(seed, spec.num_rows, spec.num_features, num_classes)

    def execute(self, plan: DummyPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        rng = rng_at(plan.address, "execute")
        columns = rng.standard_normal((plan.num_rows, plan.num_features), dtype="float32")
        labels = rng.integers(plan.num_classes, size=plan.num_rows)
        return torch.from_numpy(columns), torch.from_numpy(labels), plan.num_classes
