"""Loss by rows and classes, and how a run exercises the length scaling: multipliers and gates of the softmax.

Two files beside metrics.csv, written at the logged steps by the first rank, of its share of the step:

batches.csv   a row a micro-batch and number of classes: rows, labelled rows n, features, classes, tables, mean loss
scaling.csv   a row a layer: for the smallest and the largest n of the step the base multiplier, max |base(n)| over
              heads and elements, and over all queries the mean and standard deviation of the gate 1 + tanh(MLP(q))
"""

from __future__ import annotations

from functools import partial

import lightning as L
import torch
import torch.nn.functional as F

from tabicl_train.metrics import is_logged
from tabicl_train.module import Pretraining
from tabicl_train.records import Records
from tabicl_train.stream import StepItem

BATCHES = ("step", "stage", "rows", "n", "features", "classes", "tables", "loss")
SCALING = ("step", "stage", "layer", "n_smallest", "n_largest", "at_smallest", "at_largest", "gate_mean", "gate_std")


class Lengths(L.Callback):
    def __init__(self, records: Records) -> None:
        self.records = records
        self.gates: dict[str, list[torch.Tensor]] = {}
        self.hooks: list = []
        self.losses: list[dict] = []  # rows of batches.csv of the last logged step
        self.multipliers: dict[str, float] = {}  # of the last logged step, a layer, at its largest n

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        if trainer.is_global_zero:
            self.records.rewind("batches.csv", trainer.global_step, BATCHES)
            self.records.rewind("scaling.csv", trainer.global_step, SCALING)

    def on_train_batch_start(self, trainer: L.Trainer, module: Pretraining, item: StepItem, _: int) -> None:
        if not trainer.is_global_zero or not is_logged(module.config, item.step + 1):
            return
        self.gates.clear()
        for name, scaling in module.model.named_scalings():
            if scaling.query_mlp is not None:
                self.hooks.append(scaling.query_mlp.register_forward_hook(partial(self.keep_gate, name)))

    def keep_gate(self, layer: str, module, inputs, output: torch.Tensor) -> None:
        gate = 1 + torch.tanh(output.detach())
        self.gates.setdefault(layer, []).append(torch.stack([gate.mean(), gate.square().mean()]))

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, _, item: StepItem, __: int) -> None:
        step = trainer.global_step
        if not trainer.is_global_zero or not is_logged(module.config, step):
            return
        while self.hooks:
            self.hooks.pop().remove()
        self.losses = []
        for batch, losses in zip(item.batches, module.table_losses, strict=True):
            _, rows, features = batch.X.shape
            classes = F.one_hot(batch.y).amax(1).sum(1)  # (B, N, C) -> (B,)
            for c in classes.unique().tolist():
                same = losses[classes == c]
                values = (step, item.stage, rows, batch.train_size, features, c, len(same), same.mean().item())
                self.losses.append(dict(zip(BATCHES, values, strict=True)))
        self.records.append_rows("batches.csv", *self.losses)
        smallest, largest = (f(batch.train_size for batch in item.batches) for f in (min, max))
        for name, scaling in module.model.named_scalings():
            base = [scaling.multipliers(n).abs().max().item() for n in (smallest, largest)]
            if name in self.gates:
                mean, square = torch.stack(self.gates[name]).mean(0).tolist()
                std = max(square - mean**2, 0.0) ** 0.5
            else:
                mean, std = 1.0, 0.0
            self.multipliers[name] = base[1]
            values = (step, item.stage, name, smallest, largest, *base, mean, std)
            self.records.append_rows("scaling.csv", dict(zip(SCALING, values, strict=True)))
