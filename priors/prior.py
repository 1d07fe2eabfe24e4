"""The interface of a prior, and the loop behind it: plan, execute, finish, filter, count what was thrown away."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from priors.finish import Rejected, finish
from priors.random import Seed, as_seed, one_thread, rng_at
from priors.table import PriorError, Table, TableSpec

MAX_REJECTIONS = 1000


@dataclass
class Prior:
    """A distribution over tables. The fields of a subclass are its options, the schema of its YAML file.

    A subclass decides (`plan`) and computes (`execute`); everything that priors share happens in `sample`.
    One that takes its tables from elsewhere (mix_scm, disk) has a `sample` of its own instead.
    """

    def problems(self) -> list[str]:
        """Everything wrong with the options, in the user's terms."""
        return []

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> Any:
        """Decide a table: a small description from which `execute` computes, without further decisions."""
        raise NotImplementedError

    def execute(self, plan: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute a plan: raw columns float32 (num_rows, num_features), labels int64 (num_rows,), number of classes.

        Raises Rejected with a one-word reason where the plan leads nowhere, as `plan` may.
        """
        raise NotImplementedError

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        """Raise Rejected for a finished table that the prior's filters turn away."""

    @one_thread()
    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """The table at an address: a pure function of options, spec and seed (an int or a tuple of ints).

        Raises PriorError for an impossible spec, and after 1,000 rejections in a row.
        """
        spec.check()
        address = as_seed(seed)
        rejections: Counter[str] = Counter()
        for attempt in range(MAX_REJECTIONS):
            attempt_seed = (*address, attempt)
            try:
                plan = self.plan(spec, attempt_seed)
                columns, labels, num_classes = self.execute(plan)
                table = finish(columns, labels, num_classes, spec.train_size, rng_at(attempt_seed, "finish"))
                self.accept(table, attempt_seed)
            except Rejected as rejected:
                rejections[rejected.reason] += 1
                continue
            table.plan, table.rejections = plan, rejections
            return table
        reasons = ", ".join(f"{reason} {count}x" for reason, count in rejections.most_common())
        raise PriorError(
            f"{MAX_REJECTIONS} draws in a row were rejected for {spec} ({reasons}); {explain(rejections, spec)}"
        )


def explain(rejections: Counter[str], spec: TableSpec) -> str:
    """Which setting makes the tables impossible, from the commonest reason."""
    reason = rejections.most_common(1)[0][0]
    return {
        "split": f"rows or train_size are too few for up to {spec.max_classes} classes: raise num_rows, move the "
        "labelled share towards one half, or lower max_classes",
        "unpredictable": "the filter of unpredictable tables turns all away: raise num_rows or switch the filter off",
        "trivial": "the filter of trivial tables turns all away: switch it off",
    }.get(reason, "raise num_rows or num_features, or use the prior's default options")
