"""Some steps of a run in fp32 and in its own precision, on the same tables.

Published runs in low precision have collapsed after hours. Deviations of losses, gradient norms and multipliers from
those of fp32 show within tens of steps at the learning rate of the run. If run_dir holds a run, the steps are those
after its newest checkpoint, ideally one after the warmup. Nothing is written there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import mean, median
from typing import NamedTuple

from priors import Prior
from priors.real import hash_of_tables
from tabicl_train.check.gpu.place import CheckSkipped, Place, expect
from tabicl_train.check.gpu.steps import SMOKE
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig, TrainerConfig, configured_prior
from tabicl_train.errors import ConfigError
from tabicl_train.stream.steps import StepStream
from tabicl_train.training.callbacks.guard import MULTIPLIER_AT
from tabicl_train.training.distributed.ranks import Ranks
from tabicl_train.training.loop import build_loader
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.precision import choose_precision, set_up_gpu
from tabicl_train.training.rank_process import set_up_process
from tabicl_train.training.resume import find_checkpoint
from tabicl_train.training.state import build_module

STEPS = 50  # at most
LOSS = 0.02  # largest relative difference between the mean losses over the second half of the steps
NORM = 1.25  # largest ratio, either way, between the median gradient norms there
MULTIPLIER = 1.25  # largest ratio, either way, between the largest multipliers there
DEFAULT = (*SMOKE, "prior=mlp_scm", "trainer.precision=bf16")


class Measured(NamedTuple):
    """The values of a step that are compared: loss, gradient norm and largest base multiplier."""

    loss: float
    norm: float
    multiplier: float


def preflight(place: Place, settings: Sequence[str] = DEFAULT, config_dir: str | None = None) -> None:
    """Take steps of a run in fp32 and in its own precision, and compare losses, gradient norms and multipliers.

    Parameters
    ----------
    place : Place
        Where the check runs.
    settings : sequence of str, optional
        Settings of the run, as on the command line of tabicl-train. Default: those of a small run in bf16.
    config_dir : str, optional
        A folder of configuration files of the user.

    Raises
    ------
    CheckFailed
        If they differ by more than LOSS, NORM and MULTIPLIER allow.
    CheckSkipped
        If the run is in fp32.
    ConfigError
        If the settings are wrong, or the run cannot be continued.
    """
    # The run, from its newest checkpoint if there is one.
    config = compose(settings, config_dir)
    prior = configured_prior(config.prior)
    content = newest_content(config, prior)
    config = replace(config, trainer=replace(config.trainer, accelerator=place.device.type, devices=None))
    precision = choose_precision(config.trainer)
    if precision.name == "fp32":
        raise CheckSkipped(f"the precision is {precision}: there is nothing to compare")

    # Two trainings on the same tables. The workers are forked before CUDA starts, and each training has a copy of the
    # checkpoint, so that the optimizers share no tensors.
    first = 0 if content is None else content["global_step"]
    steps = range(config.total_steps)[first : first + STEPS]
    stream = StepStream(prior, config.curriculum, config.model, config.seed, steps)
    set_up_process(config.trainer)
    with build_loader(stream, config.stream, place.device, 1) as loader:
        trainers = [in_precision(config.trainer, name) for name in ("fp32", precision.name)]
        trained = []
        for trainer in trainers:
            trained.append(
                build_module(replace(config, trainer=trainer), copy.deepcopy(content), Ranks(), place.device)
            )
        measures: tuple[list[Measured], list[Measured]] = ([], [])
        for item in loader:
            row = {}
            for trainer, (module, optimizer), rows in zip(trainers, trained, measures, strict=True):
                set_up_gpu(trainer)  # before each step, since TF32 is a setting of the process
                module.train_on(item.to(place.device), item.step, 0, optimizer)
                rows.append(measured(module))
                row |= {f"{name}, {trainer.precision}": value for name, value in rows[-1]._asdict().items()}
            place.add("preflight", step=item.step, **row)
            if place.seconds_left() < 0:  # the steps so far must be enough
                break
    problems = problems_against_fp32(*measures, precision.name)
    expect(not problems, "; ".join(problems))


def newest_content(config: RunConfig, prior: Prior) -> dict | None:
    """Return the content of the run's newest checkpoint, or None; raises ConfigError if the run could not continue."""
    content = find_checkpoint(asdict(config), hash_of_tables(prior), config.plugins_used())
    if content is not None and content["global_step"] >= config.total_steps:
        why = "the run is finished, so no steps are left for a preflight"
        raise ConfigError([f"run_dir is {config.run_dir!r}; {why}"])
    return content


def in_precision(trainer: TrainerConfig, name: str) -> TrainerConfig:
    """Return the settings of the trainer with another precision. The reference, fp32, is without TF32."""
    return replace(trainer, precision=name, tf32=trainer.tf32 and name != "fp32")


def measured(module: TrainedNetwork) -> Measured:
    """Return what is compared of the last step of a network."""
    multipliers = [
        scaling.multipliers(MULTIPLIER_AT).abs().max().item() for _, scaling in module.model.named_scalings()
    ]
    return Measured(module.loss.item(), module.grad_norm.item(), max(multipliers, default=1.0))


def problems_against_fp32(exact_steps: list[Measured], low_steps: list[Measured], name: str) -> list[str]:
    """List the problems of a precision compared with fp32.

    Parameters
    ----------
    exact_steps, low_steps : list of Measured
        The steps in fp32 and in the precision.
    name : str
        The name of the precision.

    Returns
    -------
    list of str
    """
    for step, (loss, norm, _) in enumerate(low_steps):
        # In fp16, infinite norms are normal until the loss scale is found.
        if not math.isfinite(loss) or not (math.isfinite(norm) or name == "fp16"):
            return [f"{name} gives loss {loss} and gradient norm {norm} in step {step} of the preflight"]

    # Over the second half of the steps: mean losses, median norms, largest multipliers.
    half = len(exact_steps) // 2
    exact_half = exact_steps[half:]
    low_half = low_steps[half:]
    problems = []
    exact = mean(step.loss for step in exact_half)
    low = mean(step.loss for step in low_half)
    if not abs(low - exact) <= LOSS * exact:
        problems.append(f"the loss is {low:.4f} in {name} and {exact:.4f} in fp32; they may differ by {LOSS:.0%}")
    exact = median(step.norm for step in exact_half)
    low = median(step.norm for step in low_half)
    if not exact / NORM <= low <= exact * NORM:
        values = f"the gradient norm is {low:.4g} in {name} and {exact:.4g} in fp32"
        problems.append(f"{values}; a ratio of {NORM} is allowed")
    exact = max(step.multiplier for step in exact_half)
    low = max(step.multiplier for step in low_half)
    if not exact / MULTIPLIER <= low <= exact * MULTIPLIER:
        values = f"the largest multiplier is {low:.4g} in {name} and {exact:.4g} in fp32"
        problems.append(f"{values}; a ratio of {MULTIPLIER} is allowed")
    return problems
