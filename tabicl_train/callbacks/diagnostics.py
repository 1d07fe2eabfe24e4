"""What a run looks like from inside: losses by rows and classes, and multipliers and gates of the scalable softmax.

Two files beside metrics.csv, written by rank 0 at the logged steps, about its share of the step:

batches.csv   a row per kind of table: rows, labeled rows n, features, classes (0 for regression), number of tables,
              mean loss, and the mean loss of guessing from labels alone (see the network's guess_loss)
scaling.csv   a row per layer: for the smallest and the largest n of the step the base multiplier, max |base(n)| over
              heads and elements, and the mean and standard deviation of the gate 1 + tanh(MLP(q)) over all queries,
              each pack with the same weight; empty if the layer's rule has no gate
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import torch

from tabicl_train.callbacks.loggers import Log, multiplier_values
from tabicl_train.callbacks.metrics import is_logged
from tabicl_train.config.schema import RunConfig
from tabicl_train.module import Pretraining
from tabicl_train.run_dir.records import Records
from tabicl_train.stream import StepItem

BATCHES = ("step", "stage", "rows", "n", "features", "classes", "tables", "loss", "guess_loss")
SCALING = ("step", "stage", "layer", "n_smallest", "n_largest", "at_smallest", "at_largest", "gate_mean", "gate_std")


class Diagnostics:
    """Writes batches.csv and scaling.csv, on rank 0 alone, and logs the multipliers."""

    def __init__(self, config: RunConfig, records: Records, log: Log) -> None:
        self.config, self.records, self.log = config, records, log

    def on_train_batch_start(self, item: StepItem, module: Pretraining, **_) -> None:
        if not is_logged(self.config, item.step + 1):
            return
        for _, scaling in module.model.named_scalings():
            scaling.gate_sums = torch.zeros(3, device=module.device)

    def on_train_batch_end(self, step: int, item: StepItem, module: Pretraining, **_) -> None:
        if not is_logged(self.config, step):
            return
        rows = []
        for kind, losses in by_kind(item, module.table_losses, module.model.guess_loss).items():
            means = (statistics.fmean(some) for some in zip(*losses, strict=True))
            rows.append(dict(zip(BATCHES, (step, item.stage, *kind, len(losses), *means), strict=True)))
        self.records.append_rows("batches.csv", *rows)
        smallest, largest = (f(n for pack in item.packs for _, n, _ in pack.shapes) for f in (min, max))
        layers = []
        for name, scaling in module.model.named_scalings():
            base = [scaling.multipliers(n).abs().max().item() for n in (smallest, largest)]
            gate = gate_statistics(scaling.gate_sums)
            scaling.gate_sums = None
            values = (step, item.stage, name, smallest, largest, *base, *gate)
            layers.append(dict(zip(SCALING, values, strict=True)))
        if layers:
            self.records.append_rows("scaling.csv", *layers)
            self.log(multiplier_values(layers), step)


def by_kind(
    item: StepItem, table_losses: list[torch.Tensor], guess_loss: Callable[[torch.Tensor, int], float]
) -> dict[tuple[int, ...], list[tuple[float, float]]]:
    """The loss of each table, and that of guessing, by rows, n, features and classes of the tables."""
    kinds = defaultdict(list)
    for pack, losses in zip(item.packs, table_losses, strict=True):
        labels = pack.y.cpu().split([N for N, _, _ in pack.shapes])  # one wait for the device, not one for each table
        for (N, n, M), y, loss in zip(pack.shapes, labels, losses.tolist(), strict=True):
            kinds[N, n, M, num_classes(y)].append((loss, guess_loss(y, n)))
    return kinds


def gate_statistics(sums: torch.Tensor) -> tuple[float, float] | tuple[str, str]:
    """Mean and standard deviation of a gate from Scaling.gate_sums; empty cells if no forward pass had a gate."""
    mean, square, passes = sums.tolist()
    if passes == 0:
        return "", ""
    mean, square = mean / passes, square / passes
    return mean, max(square - mean**2, 0.0) ** 0.5


def num_classes(y: torch.Tensor) -> int:
    """The number of different labels of a table, 0 if they are numbers; y: (N,) on the CPU."""
    return 0 if y.is_floating_point() else len(y.unique())
