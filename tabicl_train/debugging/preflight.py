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

import torch
import torch.distributed as dist
from torch import Tensor

from priors import Prior
from priors.real import hash_of_tables
from tabicl_train.callbacks.guard import MULTIPLIER_AT
from tabicl_train.config.schema import CurriculumConfig, RunConfig, TrainerConfig, build_prior
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

Row = tuple[float, float, float]  # loss, gradient norm and largest base multiplier of a step


def preflight(config: RunConfig) -> None:
    """Run the checks and print what they find; nothing is written. Raises ConfigError, on all ranks, if one fails."""
    set_up_process(config.trainer)  # before CUDA starts
    launch, precision = read_launch(), choose(config.trainer)
    ranks, device = Ranks(launch), device_of(config.trainer, launch)
    steps = range(config.total_steps)
    prior = build_prior(config.prior)
    stream = StepStream(prior, config.curriculum, config.model, config.seed, steps, launch.rank, launch.size)
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
            check_exchange(*build(plain), replace(stream, steps=steps[:EXCHANGES]), ranks)
        if precision.name == "fp32":
            info(f"preflight the precision is {precision}: there is nothing to compare")
            close_process_group(ranks)
            return
        start_drawing(loader, first, Stop(), ranks)
        configs = (exact, replace(config, trainer=in_precision(config.trainer, precision.name)))
        trained = [(changed.trainer, *build(changed)) for changed in configs]
        rows: list[list[Row]] = [[], []]
        for step in steps:
            if (item := loader.next()) is None:
                raise ConfigError(["no tables can be drawn any more"])
            for (trainer, module, optimizer), values in zip(trained, rows, strict=True):
                set_up_gpu(trainer)
                module.training_step(item.to(device), step, ranks.rank, optimizer)
                values.append(measured(module))
        ranks.from_first(lambda: conclude(*rows, steps, str(precision)))
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


def measured(module: Pretraining) -> Row:
    scalings = (scaling for _, scaling in module.model.named_scalings())
    multipliers = [scaling.multipliers(MULTIPLIER_AT).abs().max().item() for scaling in scalings]
    return module.loss.item(), module.grad_norm.item(), max(multipliers, default=1.0)


def conclude(reference: list[Row], mixed: list[Row], steps: range, precision: str) -> None:
    """Print the rows of fp32 and of the other precision; raises ConfigError if they differ too much."""
    name = precision.split()[0]
    info(f"preflight fp32 and {precision}, steps {steps[0]}..{steps[-1]}")
    shown = sorted({round(k * (len(steps) - 1) / 9) for k in range(10)})
    pairs = ([f"{a:.4g} {b:.4g}" for a, b in zip(reference[i], mixed[i], strict=True)] for i in shown)
    lines = [[steps[i], *values] for i, values in zip(shown, pairs, strict=True)]
    info(text_table(["step", "loss", "gradient norm", "multiplier"], lines))
    if problems := differences(reference, mixed, name):
        raise ConfigError([f"preflight: {problem}" for problem in problems])
    info(f"preflight {name} is fit for this run")


def differences(reference: list[Row], mixed: list[Row], name: str) -> list[str]:
    """List the problems of a precision compared with fp32."""
    for step, (loss, norm, _) in enumerate(mixed):
        # In fp16 infinite norms are normal until the loss scale is found.
        if not math.isfinite(loss) or not (math.isfinite(norm) or name == "fp16"):
            return [f"{name} gives loss {loss} and gradient norm {norm} in step {step} of the preflight"]
    problems = []
    half = len(reference) // 2
    exact, loss = (mean(row[0] for row in rows[half:]) for rows in (reference, mixed))
    if not abs(loss - exact) <= LOSS * exact:
        problems.append(f"the loss of {name} is {loss:.4f}, of fp32 {exact:.4f}; they may differ by {LOSS:.0%}")
    for column, ratio, what, middle in ((1, NORM, "gradient norm", median), (2, MULTIPLIER, "largest multiplier", max)):
        exact, value = (middle(row[column] for row in rows[half:]) for rows in (reference, mixed))
        if not exact / ratio <= value <= exact * ratio:
            problems.append(f"the {what} of {name} is {value:.4g}, of fp32 {exact:.4g}; a ratio of {ratio} is allowed")
    return problems


def check_exchange(module: Pretraining, optimizer: torch.optim.Optimizer, stream: StepStream, ranks: Ranks) -> None:
    """Take the steps of a stream; raises ConfigError on all ranks if weights or gradients are not as they should be."""
    # Weights and gradients must be equal on all ranks, and gradients those that rank 0 computes as a single process.
    whole, rounding = replace(stream, rank=0, ranks=1), 0.0
    for step in stream.steps:
        where = f"preflight, step {step}"
        other = [name for name, value in module.state_dict().items() if not torch.equal(value, of_first(value))]
        ranks.raise_on_all_ranks([f"{where}: the weights differ from those of rank 0 in {name}" for name in other[:1]])
        gradients = module.gradients_of(stage_at(stream.curriculum, step)[1])
        if ranks.rank == 0:
            add_all(module, gradients, whole.draw(step).to(module.device))
        alone = of_first(gradients.flat)
        module.training_step(stream.draw(step).to(module.device), step, ranks.rank, optimizer)
        names = {parameter: name for name, parameter in module.named_parameters()}
        labels = [*(names[parameter] for parameter in gradients.parameters), "the loss"]
        problems, first = [], of_first(gradients.flat)
        if not torch.equal(gradients.flat, first):
            size, label = largest(gradients, labels, gradients.flat - first, first)
            what = f"the exchanged gradients differ from those of rank 0, most in {label}, by {size:.1e} of their norm"
            problems = [f"{where}: {what}"]
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


def of_first(tensor: Tensor) -> Tensor:
    """Return a copy of rank 0's tensor."""
    copied = tensor.detach().clone()
    dist.broadcast(copied, 0)
    return copied


def largest(gradients: Gradients, labels: list[str], difference: Tensor, reference: Tensor) -> tuple[float, str]:
    """Return the largest difference of flat gradients, relative to the norm of all, or of the loss, and its label."""
    starts = [view.storage_offset() for view in gradients.views]
    pieces = [difference[at : at + view.numel()] for at, view in zip(starts, gradients.views, strict=True)]
    sizes = torch.stack([*torch._foreach_norm(pieces), difference[-1].abs()])
    sizes[:-1] /= torch.linalg.vector_norm(reference[:-1])
    sizes[-1] /= reference[-1].abs()
    number = int(sizes.argmax())
    return sizes[number].item(), labels[number]
