"""Whether several ranks compute the same steps as one process: a part of the preflight.

In each of a few steps in fp32, rank 0 also computes the share of every rank, and the whole step as a single process
would. Compared are

1. the weights of all ranks, bit by bit
2. the gradients of each rank before the exchange, with those that rank 0 has computed in its place
3. the gradients of all ranks after the exchange, bit by bit
4. and these with the gradients of one process
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from tabicl_train.config.schema import RunConfig
from tabicl_train.console import info
from tabicl_train.curriculum import stage_at
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.gradients import Gradients
from tabicl_train.module import Pretraining
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.train import run_steps
from tabicl_train.workers import Loader

STEPS = 3
# Norm of a parameter's difference over the norm of all gradients. Sums in another order differ by 1e-7 to 1e-6; a table
# of 512 that is missing or counted twice makes a difference of 2e-3 or more.
TOLERANCE = 1e-4


class Mismatch(NamedTuple):
    """What a rank has found, in the order in which it is reported: one mismatch leads to those after it."""

    step: int
    comparison: int
    text: str


class ExchangeCheck:
    """Makes the comparisons in each step, and keeps the first mismatch of this rank.

    rounding: the largest difference from the gradients of one process
    """

    def __init__(self, config: RunConfig, stream: StepStream) -> None:
        self.rank, self.size = stream.rank, stream.ranks
        self.curriculum = config.curriculum
        self.shares = [replace(stream, rank=rank) for rank in range(self.size)]
        self.whole = replace(stream, rank=0, ranks=1)
        self.mismatch: Mismatch | None = None
        self.rounding = 0.0

    def on_train_batch_start(self, item: StepItem, module: Pretraining, **_) -> None:
        for name, value in module.state_dict().items():
            if not torch.equal(value, of_first(value)):
                self.note(item.step, 1, f"rank {self.rank} has other weights than rank 0 in {name}")
        _, stage, _ = stage_at(self.curriculum, item.step)
        gradients = module.gradients_of(stage)

        def from_first(stream: StepStream) -> Tensor:
            """The gradients of what a stream has for this step, computed by rank 0."""
            if self.rank == 0:
                gradients.flat.zero_()
                part = stream.draw(item.step).to(module.device)
                for number in range(len(part.packs)):
                    module.accumulate(gradients, part, number, stage.checkpoint_rows)
            return of_first(gradients.flat)

        whole = from_first(self.whole)
        for rank, stream in enumerate(self.shares):
            computed = from_first(stream)
            if rank == self.rank:
                share = computed
        names = {parameter: name for name, parameter in module.named_parameters()}
        labels = [*(names[parameter] for parameter in gradients.parameters), "the loss"]
        # In place of the method, whose result cannot be seen later: the step goes on to clip the gradients.
        gradients.exchange = lambda: self.exchange(item.step, gradients, labels, share, whole)

    def on_train_batch_end(self, **_) -> None:
        pass

    def exchange(self, step: int, gradients: Gradients, labels: list[str], share: Tensor, whole: Tensor) -> None:
        """The exchange of a step, with the comparisons before and after it.

        labels: names of the parameters, and of the loss
        share, whole: what rank 0 has computed for this rank and for all ranks, like `gradients.flat`
        """
        flat, allowed = gradients.flat, f"{TOLERANCE:.0e} is allowed"
        size, label = largest(gradients, labels, flat - share, share)
        if not size <= TOLERANCE:
            what = f"the gradients of rank {self.rank} differ from those that rank 0 computes for it"
            self.note(step, 2, f"{what}, most in {label}, by {size:.1e} of their norm; {allowed}")
        Gradients.exchange(gradients)
        first = of_first(flat)
        if not torch.equal(flat.view(torch.int32), first.view(torch.int32)):  # nan is equal to nan
            size, label = largest(gradients, labels, flat - first, first)
            what = f"rank {self.rank} holds other gradients than rank 0 after the exchange"
            self.note(step, 3, f"{what}, most different in {label}, by {size:.1e} of their norm")
        size, label = largest(gradients, labels, flat - whole, whole)
        self.rounding = max(self.rounding, size)
        if not size <= TOLERANCE:
            what = "after the exchange all ranks hold gradients that differ from those of one process"
            self.note(step, 4, f"{what}, most in {label}, by {size:.1e} of their norm; {allowed}")

    def note(self, step: int, comparison: int, text: str) -> None:
        if self.mismatch is None:
            self.mismatch = Mismatch(step, comparison, f"preflight, step {step}: {text}")


def of_first(tensor: Tensor) -> Tensor:
    """Rank 0's tensor, a copy."""
    copy = tensor.detach().clone()
    dist.broadcast(copy, 0)
    return copy


def largest(gradients: Gradients, labels: list[str], difference: Tensor, reference: Tensor) -> tuple[float, str]:
    """The largest difference among the parameters and the loss, and where it is.

    difference, reference: as `gradients.flat`
    Returns the norm of a parameter's difference over the norm of all gradients; for the loss, the relative difference.
    """
    starts = [view.storage_offset() for view in gradients.views]
    pieces = [difference[at : at + view.numel()] for at, view in zip(starts, gradients.views, strict=True)]
    sizes = torch.stack([*torch._foreach_norm(pieces), difference[-1].abs()])
    sizes[:-1] /= torch.linalg.vector_norm(reference[:-1])
    sizes[-1] /= reference[-1].abs()
    number = int(sizes.argmax())
    return sizes[number].item(), labels[number]


def check_exchange(
    config: RunConfig, content: dict | None, steps: range, ranks: Ranks, fabric: Fabric, loader: Loader
) -> None:
    """Make the comparisons in the first of the steps, and print the result. Raises ConfigError on all ranks."""
    steps = steps[:STEPS]
    # Dropout differs between the ranks.
    model, trainer = replace(config.model, dropout=0.0), replace(config.trainer, precision="fp32")
    config = replace(config, model=model, trainer=trainer)
    check = ExchangeCheck(config, loader.stream)
    run_steps(config, content, steps, check, ranks, fabric, loader)
    mismatches = [mismatch for mismatch in ranks.gather(check.mismatch) if mismatch is not None]

    def conclude() -> None:
        if mismatches:
            earliest = min(mismatches)[:2]
            texts = [mismatch.text for mismatch in mismatches if mismatch[:2] == earliest]
            raise ConfigError(list(dict.fromkeys(texts)))
        info(
            f"preflight {ranks.size} ranks hold the same weights and gradients, and the gradients match those of "
            f"one process to {check.rounding:.0e}, in steps {steps[0]}..{steps[-1]}"
        )

    ranks.from_first(conclude)
