"""dummy: Gaussian features and an independent target, for tests of everything that uses a prior."""

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
        target = f"{self.num_classes} classes" if self.num_classes else "numeric target"
        return f"dummy {self.address}: {self.num_rows} rows, {self.num_features} features, {target}"


@dataclass
class Dummy(Prior):
    """Gaussian noise with an independent uniform or Gaussian target, for tests."""

    numeric_targets = True

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> DummyPlan:
        num_classes = 0
        if spec.max_classes:
            num_classes = int(rng_at(seed, "plan").integers(2, spec.max_classes + 1))
        return DummyPlan(seed, spec.num_rows, spec.num_features, num_classes)

    def execute(self, plan: DummyPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        rng = rng_at(plan.address, "execute")
        columns = rng.standard_normal((plan.num_rows, plan.num_features), dtype="float32")
        if plan.num_classes:
            target = torch.from_numpy(rng.integers(plan.num_classes, size=plan.num_rows))
        else:
            target = torch.from_numpy(rng.standard_normal(plan.num_rows, dtype="float32"))
        return torch.from_numpy(columns), target, plan.num_classes
