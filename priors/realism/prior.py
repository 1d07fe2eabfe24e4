"""A prior whose tables may be made more like real ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from priors.finish import finish
from priors.prior import Prior
from priors.random import rng_at
from priors.realism.gaps import draw_gaps, fill
from priors.realism.options import Realism
from priors.realism.raw import Raw
from priors.realism.rows import DRAWN_ROWS, duplicate, shift, unbalance
from priors.realism.values import make_tails_heavy, round_numbers
from priors.table import Table, TableSpec

CHANGES = {  # of a raw table, in this order
    "imbalance": unbalance,
    "tails": make_tails_heavy,
    "rounding": round_numbers,
    "duplicates": duplicate,
    "shift": shift,
}


@dataclass(frozen=True)
class RealisticPlan:
    """The plan of a table, and what was done to the table, in lines."""

    plan: Any
    applied: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *(f"realism: {line}" for line in self.applied)])


@dataclass
class Realistic(Prior):
    """A prior of synthetic tables."""

    realism: Realism = field(default_factory=Realism, kw_only=True)
    """What tables may have in common with real ones."""

    def problems(self) -> list[str]:
        return self.realism.problems()

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        strengths = self.realism.draw(seed, is_numeric=spec.max_classes == 0)
        if not strengths:
            return super().attempt(spec, seed)
        drawn_rows = spec.num_rows * (DRAWN_ROWS if "imbalance" in strengths else 1)
        plan = self.plan(replace(spec, num_rows=drawn_rows), seed)
        columns, target, num_classes = self.execute(plan)
        device = columns.device
        raw = Raw(columns.cpu().numpy(), target.cpu().numpy(), num_classes, spec.num_rows, spec.train_size)
        applied = [
            change(raw, strengths[name], rng_at(seed, f"realism {name}"))
            for name, change in CHANGES.items()
            if name in strengths
        ]
        columns, target = torch.from_numpy(raw.columns).to(device), torch.from_numpy(raw.target).to(device)
        table = finish(columns, target, num_classes, spec.train_size, rng_at(seed, "finish"))
        gaps = None
        if "missing" in strengths:
            X = table.X.cpu().numpy()
            gaps, text = draw_gaps(X, spec.train_size, strengths["missing"], rng_at(seed, "realism missing"))
            fill(X, gaps, spec.train_size)
            table.X, table.missing = torch.from_numpy(X).to(device), float(gaps.mean())
            applied.append(text)
        self.accept(table, seed)
        if gaps is not None and spec.keeps_missing:
            table.X[torch.from_numpy(gaps).to(device)] = np.nan
        table.plan = RealisticPlan(plan, tuple(applied))
        return table
