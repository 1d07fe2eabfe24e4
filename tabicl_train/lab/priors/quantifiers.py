"""quantifiers: is every number so far positive, or some number? A task of the SSA paper (arXiv 2508.14685)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.table import TableSpec

QUANTIFIERS = ("every", "some")


@dataclass
class QuantifiersPlan:
    """The size of a table. Its numbers follow from the address."""

    address: tuple[int, ...]
    shape: tuple[int, int]  # (num_rows, num_features)
    text: str

    def __str__(self) -> str:
        return f"quantifiers {self.address}: {self.shape[0]} rows of {self.shape[1]} numbers; {self.text}"


@dataclass
class Quantifiers(Prior):
    """Sequences of numbers from N(0, sigma^2) in rows, with the truth of a sentence about all numbers so far.

    The class of a row is 1 if the sentence holds for the numbers in this row and those before it, otherwise 0.
    """

    quantifier: str = option("every", choices=QUANTIFIERS)
    """The sentence: every (every number is positive) or some (some number is positive)."""
    sigma: float = option(1.0, above=0)
    """Standard deviation of the numbers."""
    undecided: bool = False
    """Whether the last row decides: all numbers before it are positive for every, and negative for some."""
    deviant: float = option(1.0, above=0)
    """Factor of the numbers in the last row, or in the first one if undecided. Far above 1, they are deviants among
    normal numbers, and answers that follow the largest number are wrong in half of the cases."""

    raw = True

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> QuantifiersPlan:
        return QuantifiersPlan(seed, (spec.num_rows, spec.num_features), f"{self.quantifier} number is positive")

    def execute(self, plan: QuantifiersPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Draw the numbers, and find for each row whether the sentence is true so far; see `Prior.execute`."""
        numbers = self.sigma * rng_at(plan.address, "execute").standard_normal(plan.shape)  # (N, M)
        is_every = self.quantifier == "every"
        if self.undecided:
            # The numbers before the last row leave the truth open. The deviant row is one of them.
            numbers[:-1] = np.abs(numbers[:-1]) if is_every else -np.abs(numbers[:-1])
            numbers[0] *= self.deviant
        else:
            numbers[-1] *= self.deviant
        numbers = numbers.astype(np.float32)

        # Every number so far is positive if the smallest is, some number if the largest is; (N,) each.
        are_all_positive = np.minimum.accumulate(numbers.min(1)) > 0
        is_some_positive = np.maximum.accumulate(numbers.max(1)) > 0
        truth = are_all_positive if is_every else is_some_positive
        return torch.from_numpy(numbers), torch.from_numpy(truth.astype(np.int64)), 2
