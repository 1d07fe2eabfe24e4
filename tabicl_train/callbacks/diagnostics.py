"""scaling.csv: multipliers and gates of the scalable softmax, a row for each logged step and layer.

step, stage                     optimizer steps done; stage of the curriculum
layer                           name of the layer
n_smallest, n_largest           labeled rows of the tables of this rank's share of the step
at_smallest, at_largest         max |base(n)| of the base multiplier over heads and elements, for these n
gate_mean, gate_std             of the gate 1 + tanh(MLP(q)) over all queries, each pack with the same weight; empty if
                                the layer's rule has no gate
"""

from __future__ import annotations

import torch

from tabicl_train.callbacks.loggers import Log
from tabicl_train.callbacks.metrics import LoggedSteps
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem

COLUMNS = ("step", "stage", "layer", "n_smallest", "n_largest", "at_smallest", "at_largest", "gate_mean", "gate_std")


class Diagnostics:
    """Write scaling.csv, on rank 0 alone, and log the multipliers."""

    def __init__(self, records: Records, logged: LoggedSteps, log: Log) -> None:
        self.records, self.logged, self.log = records, logged, log

    def on_train_batch_start(self, item: StepItem, module: Pretraining, **_) -> None:
        """Have the gates measured in a logged step."""
        if item.step + 1 in self.logged:
            for _, scaling in module.model.named_scalings():
                scaling.gate_sums = torch.zeros(3, device=module.device)

    def on_train_batch_end(self, step: int, item: StepItem, module: Pretraining, **_) -> None:
        """Write the rows of a logged step."""
        if step not in self.logged:
            return
        smallest, largest = (f(n for pack in item.packs for _, n, _ in pack.shapes) for f in (min, max))
        rows = []
        for name, scaling in module.model.named_scalings():
            base = [scaling.multipliers(n).abs().max().item() for n in (smallest, largest)]
            gate = gate_statistics(scaling.gate_sums)
            scaling.gate_sums = None
            rows.append(dict(zip(COLUMNS, (step, item.stage, name, smallest, largest, *base, *gate), strict=True)))
        if rows:
            self.records.append_rows("scaling.csv", *rows)
            self.log({f"multiplier/{row['layer']}": row["at_largest"] for row in rows}, step)


def gate_statistics(sums: torch.Tensor) -> tuple[float, float] | tuple[str, str]:
    """Mean and standard deviation of a gate from Scaling.gate_sums; empty cells if no forward pass had a gate."""
    mean, square, passes = sums.tolist()
    if passes == 0:
        return "", ""
    mean, square = mean / passes, square / passes
    return mean, max(square - mean**2, 0.0) ** 0.5
