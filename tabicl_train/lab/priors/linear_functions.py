"""linear_functions: values of a random linear function, a task of the SSA paper (arXiv 2508.14685)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.table import TableSpec


@dataclass
class LinearFunctionPlan:
    """A function a x + b. Its points x follow from the address."""

    address: tuple[int, ...]
    num_rows: int
    a: np.ndarray  # (num_features,)
    b: float

    def __str__(self) -> str:
        return (
            f"linear_functions {self.address}: {self.num_rows} rows, a = {self.a.round(2).tolist()}, b = {self.b:.2f}"
        )


@dataclass
class LinearFunctions(Prior):
    """Points x with the values a x + b of a function whose coefficients are drawn for each table."""

    sigma: float = option(1.0, above=0)
    """Standard deviation of the coefficients a and b."""
    input_sigma: float = option(1.0, above=0)
    """Standard deviation of the points x."""
    deviant: float = option(1.0, above=0)
    """Factor of the first point. Far above 1, it is a single deviant among normal points."""

    numeric_targets = True
    classes = False
    raw = True

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> LinearFunctionPlan:
        *a, b = self.sigma * rng_at(seed, "plan").standard_normal(spec.num_features + 1)
        return LinearFunctionPlan(seed, spec.num_rows, np.array(a), b)

    def execute(self, plan: LinearFunctionPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        points = rng_at(plan.address, "execute").standard_normal((plan.num_rows, len(plan.a)))
        points *= self.input_sigma
        points[0] *= self.deviant
        values = points @ plan.a + plan.b
        return torch.from_numpy(points.astype(np.float32)), torch.from_numpy(values.astype(np.float32)), 0
