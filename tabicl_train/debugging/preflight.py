"""Checks before a long run: of the precision, and of the exchange of gradients between ranks.

Published runs in low precision have collapsed after hours. Deviations of losses, gradient norms and multipliers from
those of fp32 show within tens of steps at the learning rate of the run. With the run_dir of a run, the preflight starts
from its newest checkpoint, ideally one after the warmup.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from priors import Prior
from priors.real import hash_of_tables
from tabicl_train.callbacks.guard import MULTIPLIER_AT
from tabicl_train.config.schema import CurriculumConfig, RunConfig, TrainerConfig, configured_prior
from tabicl_train.console import info, text_table
from tabicl_train.curriculum import stage_at
from tabicl_train.distributed.processes import Stop, read_launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.module import Gradients, Pretraining
from tabicl_train.planning import memory_problems
from tabicl_train.precision import choose, set_up_gpu
from tabicl_train.process import close_process_group, device_of, open_fabric, set_up_process
from tabicl_train.resume import refuse_changes
from tabicl_train.run_dir import checkpoint
from tabicl_train.state import build_module
from tabicl_train.stream import StepItem, StepStream
from tabicl_train.training import build_loader, start_drawing

LOSS = 0.02  # largest relative difference between the mean losses over the second half of the steps
NORM = 1.25  # largest ratio, either way, between the median gradient norms there
MULTIPLIER = 1.25  # largest ratio, either way, between the largest multipliers there
EXCHANGES = 3  # steps in which the exchange is checked
# Norm of a parameter's difference over the norm of all gradients. Another order of sums changes it by 1e-7 to 1e-6, and
# a missing or repeated table among 512 by 2e-3 or more.
TOLERANCE = 1e-4


class Measured(NamedTuple):
    """What is compared of a step."""

    loss: float
    norm: float  # of the gradient
    multiplier: float  # the largest base multiplier


def preflight(config: RunConfig) -> None:
    """Run the checks and print what they find; nothing is written. Raises ConfigError, on all ranks, if one fails."""
    set_up_process(config.trainer)  # before CUDA starts
    launch = read_launch()
    ranks = Ranks(launch)
    precision = choose(config.trainer)
    device = device_of(config.trainer, launch)
    steps = range(config.total_steps)
    prior = configured_prior(config.prior)
    stream = StepStream(prior, config.curriculum, config.model, config.seed, steps, launch.rank, launch.size)
    # The loader forks, so it is built before the process group is opened and CUDA is used, as in a run.
    with build_loader(stream, config.stream, device, launch.local_size) as loader:
        fabric = open_fabric(config.trainer, launch, ranks)
        problems = [*launch.problems(config.trainer.devices), *config.too_few_tables(ranks.size)[:1]]
        ranks.raise_on_all_ranks(problems + memory_problems(config))
        content = ranks.from_first(lambda: newest_content(config, prior))
        first = 0 if content is None else content["global_step"]
        steps = steps[first : first + config.preflight_steps]

        def build(changed: RunConfig) -> tuple[Pretraining, torch.optim.Optimizer]:
            return build_module(changed, copy.deepcopy(content), ranks, fabric)  # so that optimizers share no tensors

        exact = replace(config, trainer=in_precision(config.trainer, "fp32"))
        if ranks.size > 1:
            # No dropout, which differs between the ranks, and no clipping, since raw gradients are compared.
            stages = {name: replace(stage, clip=math.inf) for name, stage in config.curriculum.stages.items()}
            plain = replace(exact, model=replace(config.model, dropout=0.0), curriculum=CurriculumConfig(stages))
            module, optimizer = build(plain)
            check_exchange(module, optimizer, replace(stream, steps=steps[:EXCHANGES]), ranks)
        if precision.name == "fp32":
            info(f"preflight the precision is {precision}: there is nothing to compare")
            close_process_group(ranks)
            return
        start_drawing(loader, first, Stop(), ranks)
        low = replace(config, trainer=in_precision(config.trainer, precision.name))
        exact_module, exact_optimizer = build(exact)
        low_module, low_optimizer = build(low)
        exact_steps: list[Measured] = []
        low_steps: list[Measured] = []
        for step in steps:
            item = loader.next()
            if item is None:
                raise ConfigError(["no tables can be drawn any more"])
            # The same step in both precisions; TF32 is a setting of the process.
            set_up_gpu(exact.trainer)
            exact_module.training_step(item.to(device), step, ranks.rank, exact_optimizer)
            exact_steps.append(measured(exact_module))
            set_up_gpu(low.trainer)
            low_module.training_step(item.to(device), step, ranks.rank, low_optimizer)
            low_steps.append(measured(low_module))
        ranks.from_first(lambda: conclude(exact_steps, low_steps, steps, str(precision)))
        close_process_group(ranks)


def newest_content(config: RunConfig, prior: Prior) -> dict | None:
    """Return the content of the run's newest checkpoint, if there is one; raises ConfigError if it is another run's."""
    newest = checkpoint.newest_valid(Path(config.run_dir) / "checkpoints")
    if newest is None:
        return None
    path, content = newest
    refuse_changes(content, asdict(config), hash_of_tables(prior), config.plugins_used())
    checkpoint.refuse_non_finite(path, content)
    if content["global_step"] >= config.total_steps:
        why = "the run is finished, no steps are left for a preflight"
        raise ConfigError([f"run_dir is {config.run_dir!r}; {why}"])
    return content


def in_precision(trainer: TrainerConfig, name: str) -> TrainerConfig:
    """Return the settings with this precision; fp32, the reference, is without TF32."""
    return replace(trainer, precision=name, tf32=trainer.tf32 and name != "fp32")


def measured(module: Pretraining) -> Measured:
    """Return the values of the last step of a network."""
    multipliers = [
        scaling.multipliers(MULTIPLIER_AT).abs().max().item() for _, scaling in module.model.named_scalings()
    ]
    return Measured(module.loss.item(), module.grad_norm.item(), max(multipliers, default=1.0))


def conclude(exact_steps: list[Measured], low_steps: list[Measured], steps: range, precision: str) -> None:
    """Print ten steps of fp32 and of the other precision; raises ConfigError if they differ too much."""
    name = precision.split()[0]
    info(f"preflight fp32 and {precision}, steps {steps[0]}..{steps[-1]}")
    lines = []
    for i in sorted({round(k * (len(steps) - 1) / 9) for k in range(10)}):
        pairs = [f"{exact:.4g} {low:.4g}" for exact, low in zip(exact_steps[i], low_steps[i], strict=True)]
        lines.append([steps[i], *pairs])
    info(text_table(["step", "loss", "gradient norm", "multiplier"], lines))
    problems = differences(exact_steps, low_steps, name)
    if problems:
        raise ConfigError([f"preflight: {problem}" for problem in problems])
    info(f"preflight {name} is fit for this run")


def differences(exact_steps: list[Measured], low_steps: list[Measured], name: str) -> list[str]:
    """List the problems of a precision compared with fp32."""
    for step, (loss, norm, _) in enumerate(low_steps):
        # In fp16 infinite norms are normal until the loss scale is found.
        if not math.isfinite(loss) or not (math.isfinite(norm) or name == "fp16"):
            return [f"{name} gives loss {loss} and gradient norm {norm} in step {step} of the preflight"]

    # Over the second half of the steps: mean losses, median norms, largest multipliers
    half = len(exact_steps) // 2
    exact_half = exact_steps[half:]
    low_half = low_steps[half:]
    problems = []
    exact = mean(step.loss for step in exact_half)
    low = mean(step.loss for step in low_half)
    if not abs(low - exact) <= LOSS * exact:
        problems.append(f"the loss of {name} is {low:.4f}, of fp32 {exact:.4f}; they may differ by {LOSS:.0%}")
    exact = median(step.norm for step in exact_half)
    low = median(step.norm for step in low_half)
    if not exact / NORM <= low <= exact * NORM:
        problems.append(f"the gradient norm of {name} is {low:.4g}, of fp32 {exact:.4g}; a ratio of {NORM} is allowed")
    exact = max(step.multiplier for step in exact_half)
    low = max(step.multiplier for step in low_half)
    if not exact / MULTIPLIER <= low <= exact * MULTIPLIER:
        values = f"the largest multiplier of {name} is {low:.4g}, of fp32 {exact:.4g}"
        problems.append(f"{values}; a ratio of {MULTIPLIER} is allowed")
    return problems


def check_exchange(module: Pretraining, optimizer: torch.optim.Optimizer, stream: StepStream, ranks: Ranks) -> None:
    """Take the steps of a stream; raises ConfigError on all ranks if weights or gradients are not as they should be."""
    # Weights and gradients must be equal on all ranks, and gradients those that rank 0 computes as a single process.
    whole_stream = replace(stream, rank=0, ranks=1)
    rounding = 0.0
    for step in stream.steps:
        where = f"preflight, step {step}"

        # The weights: each rank compares its own with those of rank 0, tensor by tensor.
        problems = []
        for name, value in module.state_dict().items():
            if not torch.equal(value, of_rank_0(value)) and not problems:
                problems.append(f"{where}: the weights differ from those of rank 0 in {name}")
        ranks.raise_on_all_ranks(problems)

        # The gradients that a single process computes, and then those of all ranks
        _, stage, _ = stage_at(stream.curriculum, step)
        gradients = module.gradients_of(stage)
        if ranks.rank == 0:
            add_all(module, gradients, whole_stream.draw(step).to(module.device))
        alone = of_rank_0(gradients.flat)
        module.training_step(stream.draw(step).to(module.device), step, ranks.rank, optimizer)
        names = {parameter: name for name, parameter in module.named_parameters()}
        labels = [names[parameter] for parameter in gradients.parameters]
        labels.append("the loss")  # the last value of the flat gradients

        problems = []
        reference = of_rank_0(gradients.flat)
        if not torch.equal(gradients.flat, reference):
            size, label = largest(gradients, labels, gradients.flat - reference, reference)
            what = f"the exchanged gradients differ from those of rank 0, most in {label}, by {size:.1e} of their norm"
            problems.append(f"{where}: {what}")
        ranks.raise_on_all_ranks(problems)
        size, label = largest(gradients, labels, gradients.flat - alone, alone)
        rounding = max(rounding, size)
        if not size <= TOLERANCE:
            what = f"the gradients of {ranks.size} ranks differ from those of one process, most in {label}"
            raise ConfigError([f"{where}: {what}, by {size:.1e} of their norm; {TOLERANCE:.0e} is allowed"])
    info(
        f"preflight {ranks.size} ranks hold the same weights and gradients, and the gradients match those of one "
        f"process to {rounding:.0e}, in steps {stream.steps[0]}..{stream.steps[-1]}"
    )


def add_all(module: Pretraining, gradients: Gradients, item: StepItem) -> None:
    """Compute the gradients of all packs of an item."""
    _, stage, _ = stage_at(module.curriculum, item.step)
    gradients.flat.zero_()
    for number in range(len(item.packs)):
        module.accumulate(gradients, item, number, stage.checkpoint_rows)


def of_rank_0(tensor: Tensor) -> Tensor:
    """Return a copy of rank 0's tensor; all ranks call this."""
    copied = tensor.detach().clone()
    dist.broadcast(copied, 0)
    return copied


def largest(gradients: Gradients, labels: list[str], difference: Tensor, reference: Tensor) -> tuple[float, str]:
    """Return the largest difference of flat gradients, relative to the norm of all, or of the loss, and its label."""
    pieces = []
    for view in gradients.views:  # of each parameter
        start = view.storage_offset()
        pieces.append(difference[start : start + view.numel()])
    sizes = torch.stack([*torch._foreach_norm(pieces), difference[-1].abs()])
    sizes[:-1] /= torch.linalg.vector_norm(reference[:-1])
    sizes[-1] /= reference[-1].abs()
    number = int(sizes.argmax())
    return sizes[number].item(), labels[number]
