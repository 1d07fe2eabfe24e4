"""A step of a run once more: its tables one by one, with the very weights that it met."""

from __future__ import annotations

import math
from pathlib import Path

import lightning as L
import torch

from tabicl_train import checkpoint
from tabicl_train.config import ConfigError, RunConfig, build_prior, from_values
from tabicl_train.curriculum import plan_step
from tabicl_train.module import Pretraining
from tabicl_train.replicas import Gradients
from tabicl_train.stream import StepItem, TableBatch, draw_table
from tabicl_train.train import run_steps

COLUMNS = ("table", "rows", "labelled", "features", "max |x|", "loss", "gradient norm")


def replay(run: str, step: int) -> None:
    """Train from the newest checkpoint before the step up to it, in memory, and print what each of its tables does.

    One process: of a run of several, the weights are the same up to the order of sums.
    """
    folder = Path(run) / "checkpoints"
    start = checkpoint.newest_valid(folder, until=step)
    any_one = start or checkpoint.newest_valid(folder)
    if any_one is None:
        raise ConfigError([f"run is {run!r}; there is no checkpoint in it"])
    config = from_values(any_one[1]["config"])
    if not 0 <= step < config.total_steps:
        raise ConfigError([f"step is {step}; the run has the steps 0..{config.total_steps - 1}"])
    run_steps(config, start, step + 1, Dissection(config, step))


class Dissection(L.Callback):
    def __init__(self, config: RunConfig, step: int) -> None:
        self.config, self.step = config, step

    def on_train_batch_start(self, trainer: L.Trainer, module: Pretraining, item: StepItem, _: int) -> None:
        if item.step != self.step:
            return
        config, plan = self.config, plan_step(self.config.curriculum, self.config.model, self.config.seed, self.step)
        wrong = sum(int((~p.isfinite()).sum()) for p in module.model.parameters())
        print(f"step {self.step} (stage {plan.stage}, seed {config.seed}), {module.precision}")
        print(f"weights not finite: {wrong}")
        print("".join(f"{name:>14}" for name in COLUMNS))
        gradients = Gradients([p for p in module.model.parameters() if p.requires_grad], [])
        prior = build_prior(config)
        for batch in plan.micro_batches:
            for index in batch.tables:
                table = draw_table(prior, batch, config.seed, self.step, index)
                alone = TableBatch(table.X[None], table.y[None], table.train_size).to(module.device)
                gradients.flat.zero_()
                with module.precision.autocast(module.device.type):
                    loss = module.backward(gradients, alone, 1.0).item()
                norm = (gradients.flat[:-1].norm() / module.loss_scale.scale).item()
                mark = "" if math.isfinite(loss) and math.isfinite(norm) else "  <- not finite"
                sizes = f"{index:>14}{table.X.shape[0]:>14}{table.train_size:>14}{table.X.shape[1]:>14}"
                print(f"{sizes}{table.X.abs().max().item():>14.3g}{loss:>14.6g}{norm:>14.4g}{mark}")
        module.gradients = None  # these took its place
        torch.cuda.empty_cache()

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, _, item: StepItem, __: int) -> None:
        if item.step == self.step:
            taken = "taken" if module.finite else "not taken"
            print(f"together: loss {module.loss:.6g}, gradient norm {module.grad_norm:.4g}; the step is {taken}")
