"""The cost of a run, estimated before it starts: its FLOPs, its memory, and the plan that is printed.

Peak memory is the sum of

- weights, gradients of a pack and of the step, and optimizer state (20 bytes per parameter with the built-in ones),
- what the forward pass of the largest pack keeps for the backward pass (`Network.kept_bytes`),
- on a CPU, the process itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from priors import Prior
from priors.mix_scm import MixSCM
from priors.real import real_tables
from tabicl_train.config.schema import (
    CurriculumConfig,
    RunConfig,
    StageConfig,
    TrainerConfig,
    configured_prior,
    steps_of_stages,
)
from tabicl_train.console import text_table
from tabicl_train.doors import register
from tabicl_train.model.config import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.pack import Shape
from tabicl_train.stream.curriculum import FEATURE_CAPS, cap_features, plan_step
from tabicl_train.training.optimizer import REPLAYED, state_bytes
from tabicl_train.training.precision import choose_precision, memory_of_gpu, uses_cuda

COLUMNS = ("stage", "steps", "tables", "rows", "cells", "FLOPs", "pack tokens", "passes/step", "memory")
# Bytes per parameter.
WEIGHT_BYTES = 12  # weight, gradient of a pack, gradient of the step
REPLAY_BYTES = 12  # on a GPU: temporary values of our optimizers, which a CUDA graph keeps (counted on a CPU)
STATE_BYTES = WEIGHT_BYTES + 8  # with the state of our optimizers

PROCESS_BYTES = 0.5e9  # resident on a CPU before the network is built: Python, torch, the loops of priors

_counted: dict[tuple[type, str], int] = {}  # parameters, by the family of a network and its settings


def run_plan(config: RunConfig) -> list[str]:
    """Describe a run before it starts: parameters, and the work, passes and memory of a process in each stage.

    Parameters
    ----------
    config : RunConfig
        The run.

    Returns
    -------
    list of str
        Lines to print, warnings last.
    """
    # The prior, the network and the device.
    parameters = count_parameters(config.model)
    memory = memory_of(config.trainer)
    precision = choose_precision(config.trainer).name
    lines = [*mixture_lines(config), f"model     {parameters:,} parameters"]
    if plans_for_elsewhere(config.trainer):
        card = f"a GPU of {memory / 1e9:g} GB (trainer.plan_memory_gb), {precision}"
        lines.append(f"device    {card}; torch finds none on this machine")
    lines += cap_lines(config)
    lines += pass_lines(config)

    # The table of stages. If `trainer.max_steps` cuts a stage short, only its steps in this run count as work.
    stages = []
    warnings = []
    lengths = {name: stage.steps for name, stage in config.curriculum.stages.items()}
    steps_in_run = steps_of_stages(lengths, config.total_steps)
    for name, stage in config.curriculum.stages.items():
        fewest_rows, most_rows = stage.rows
        rows = f"{fewest_rows:,}..{most_rows:,}"
        if name not in steps_in_run:
            stages.append([name, "not run", "", rows, *[""] * 5])
            continue
        work = expected_work(stage, config.model, config.seed, config.trainer.devices or 1)
        peak = stage_peak(config.model, parameters, stage, precision, bytes_per_weight(config))
        if not uses_cuda(config.trainer):
            peak += PROCESS_BYTES
        if peak > memory:
            need = f"may need {peak / 1e9:,.1f} GB; a process of this run has {memory / 1e9:.1f} GB"
            warnings.append(f"warning   stage {name} {need}; lower its pack_tokens, rows or features")
        done = steps_in_run[name]
        share = done / stage.steps
        steps = f"{done:,}" if share == 1 else f"{done:,} of {stage.steps:,}"
        stages.append(
            [
                name,
                steps,
                f"{done * stage.tables:,}",
                rows,
                f"{work.cells * share:.2g}",
                "unknown" if math.isnan(work.flops) else f"{work.flops * share:.2g}",
                f"{stage.pack_tokens:,}",
                f"{work.passes:.1f}",
                "unknown" if math.isnan(peak) else f"{peak / 1e9:,.2f} GB",
            ]
        )

    # What the settings may not have meant.
    max_steps = config.trainer.max_steps
    if max_steps is not None and max_steps > config.total_steps:
        ends = f"the curriculum ends the run after {config.total_steps:,} steps"
        warnings.append(f"warning   trainer.max_steps is {max_steps:,}, but {ends}")
    warnings += [f"warning   {remark}" for remark in settings_without_effect(config)]
    lines += [f"          {line}" for line in text_table(COLUMNS, stages).splitlines()]
    return [*lines, f"          {config.total_steps:,} steps in this run", *warnings]


def settings_without_effect(config: RunConfig) -> list[str]:
    """List settings that differ from the defaults but have no effect together with the others."""
    default = StageConfig()
    remarks = []
    for name, stage in config.curriculum.stages.items():
        key = f"curriculum.stages.{name}"
        # With a constant schedule, the final learning rate may repeat the learning rate.
        as_expected = (default.final_learning_rate, stage.learning_rate)
        if stage.schedule == "constant" and stage.final_learning_rate not in as_expected:
            remarks.append(f"{key}.final_learning_rate has no effect, since schedule is constant")
        # The schedule of a plug-in may read it.
        is_own = register.schedule.plugin(stage.schedule) is None
        if is_own and stage.schedule != "wsd" and stage.decay != default.decay:
            remarks.append(f"{key}.decay has no effect, since schedule is {stage.schedule}")
    return remarks


def cap_lines(config: RunConfig) -> list[str]:
    """Describe in which stages long tables have fewer features than `features` asks for."""
    if configured_prior(config.prior).stored_sizes is not None:
        # Stored tables have their own sizes.
        return []
    lines = []
    for name, stage in config.curriculum.stages.items():
        fewest_rows, most_rows = stage.rows
        most_in_shortest = cap_features(fewest_rows, stage.features[1])
        caps = []
        for more_than, cap in reversed(FEATURE_CAPS):
            # Caps that long tables of the stage reach, unless its shortest tables have a lower one already.
            if most_rows > more_than and cap <= most_in_shortest and cap < stage.features[1]:
                caps.append(f"{cap} with more than {more_than:,} rows")
        if caps:
            lines.append(f"features  stage {name}: at most {', '.join(caps)}")
    return lines


def pass_lines(config: RunConfig) -> list[str]:
    """Describe at which steps further passes over stored tables begin."""
    lengths = {name: stage.steps for name, stage in config.curriculum.stages.items()}
    stages = {}
    for name, steps in steps_of_stages(lengths, config.total_steps).items():
        stages[name] = steps, config.curriculum.stages[name].tables
    return [f"passes    {line}" for line in configured_prior(config.prior).pass_lines(stages)]


def mixture_lines(config: RunConfig) -> list[str]:
    """Describe the shares of a mixture's components: of the run, of stages that differ, and of validation."""
    prior = configured_prior(config.prior)
    if not isinstance(prior, MixSCM):
        return []
    lines = [f"mixture   {percentages(prior.shares)}"]
    for name, stage in config.curriculum.stages.items():
        shares = prior.mixed(stage.mix).shares
        if shares != prior.shares:
            lines.append(f"          stage {name}: {percentages(shares)}")
    if len(lines) > 1 and config.validation.draws_tables:
        for kind, part in config.curriculum.priors_by_kind(prior).items():
            assert isinstance(part, MixSCM)  # as the whole is one
            lines.append(f"          {kind} tables of validation: {percentages(part.shares)}")
    return lines


def eligible_tables(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> list[str]:
    """Say for each stage how many real tables are long enough; [] if the prior has no real tables."""
    lines = []
    for name, stage in curriculum.stages.items():
        real = real_tables(prior.mixed(stage.mix))
        if real is None:
            continue
        lowest, highest = stage.rows
        with_lowest = real.eligible(lowest, is_regression)
        with_highest = real.eligible(highest, is_regression)
        # If the length of tables does not matter, there is nothing to say.
        if with_lowest is None or with_highest is None:
            continue
        lines.append(
            f"stage {name}: {with_lowest.long_enough} of {with_lowest.tables} tables have at least {lowest:,} rows, "
            f"and {with_highest.long_enough} at least {highest:,}"
        )
    return lines


def percentages(shares: dict[str, float]) -> str:
    largest_first = sorted(shares, key=lambda name: -shares[name])
    return ", ".join(f"{name} {100 * shares[name]:.3g} %" for name in largest_first)


def memory_problems(config: RunConfig, local_rank: int = 0) -> list[str]:
    """Return why a run cannot fit into the memory of this machine, however small its tables, in a list."""
    parameters = count_parameters(config.model)
    memory = memory_of(config.trainer, local_rank)
    state = bytes_per_weight(config) * parameters
    if state <= memory:
        return []
    need = f"{parameters:,} parameters need {state / 1e9:,.1f} GB with gradients and optimizer state"
    return [f"model: its {need}; a process of this run has {memory / 1e9:.1f} GB"]


def bytes_per_weight(config: RunConfig) -> float:
    """Return the bytes per parameter of weight, gradients and the state of the run's optimizer."""
    is_replayed = uses_cuda(config.trainer) and register.optimizer[config.optimizer.name].optimizer in REPLAYED
    return WEIGHT_BYTES + state_bytes(config.optimizer) + (REPLAY_BYTES if is_replayed else 0)


def count_parameters(model: NetworkConfig) -> int:
    """Count the parameters of a network, once for equal settings: a sweep asks for each of its points."""
    family = family_of(model)
    key = family, repr(model)
    if key not in _counted:
        # 10 ms for demo, 35 ms for tabicl_v2.
        with torch.device("meta"):
            _counted[key] = sum(p.numel() for p in family(model).parameters())
    return _counted[key]


def plans_for_elsewhere(trainer: TrainerConfig) -> bool:
    """Return whether these settings need a GPU that this machine lacks: it can plan the run, but not start it."""
    return uses_cuda(trainer) and not torch.cuda.is_available()


def memory_of(trainer: TrainerConfig, local_rank: int = 0) -> float:
    """Return the bytes of memory of a rank: that of its GPU, or on a CPU the machine's divided by `trainer.devices`."""
    if plans_for_elsewhere(trainer):
        return 1e9 * trainer.plan_memory_gb
    if uses_cuda(trainer):
        return memory_of_gpu(local_rank)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (trainer.devices or 1)


class Work(NamedTuple):
    """Cells and FLOPs of a stage, and the mean number of passes of rank 0 in a step."""

    cells: float
    flops: float
    passes: float


def expected_work(stage: StageConfig, model: NetworkConfig, seed: int, ranks: int = 1, sample: int = 20) -> Work:
    """Extrapolate the work of a stage from the plans of its first steps.

    Parameters
    ----------
    stage : StageConfig
        The stage.
    model : NetworkConfig
        The settings of the network.
    seed : int
        The seed of the run.
    ranks : int
        The number of ranks.
    sample : int
        The number of steps to plan.

    Returns
    -------
    Work
        The work of the whole stage.
    """
    # Its first steps, as if the run began with this stage.
    alone = CurriculumConfig({"stage": stage})
    steps = min(sample, stage.steps)
    cells = flops = passes = 0.0
    for step in range(steps):
        plan = plan_step(alone, model, seed, step)
        cells += sum(len(group.tables) * group.spec.num_rows * group.spec.num_features for group in plan.groups)
        for group in plan.groups:
            shape = (group.spec.num_rows, group.spec.train_size, group.spec.num_features)
            flops += training_flops(model, [shape] * len(group.tables))
        passes += len(plan.packs(0, ranks))
    # Cells and FLOPs of all its steps; passes are a mean.
    scale = stage.steps / steps
    return Work(cells * scale, flops * scale, passes / steps)


def training_flops(model: NetworkConfig, tables: Iterable[Shape]) -> float:
    """Count the FLOPs of the forward and backward pass of tables; NaN if the network has no formula for FLOPs."""
    # The backward pass costs twice the forward pass.
    return 3 * sum(family_of(model).forward_flops(model, N, n, M) for N, n, M in tables)


def peak_bytes(
    config: NetworkConfig,
    parameters: int,
    tables: Sequence[Shape],
    precision: str = "fp32",
    weight_bytes: float = STATE_BYTES,
) -> float:
    """Estimate the peak memory of an optimizer step.

    Parameters
    ----------
    config : NetworkConfig
        The settings of the network.
    parameters : int
        The number of its parameters.
    tables : sequence of (int, int, int)
        Rows, labeled rows and features of the tables of the largest pack.
    precision : str
        fp32, bf16 or fp16.
    weight_bytes : float
        Bytes per parameter of weight, gradients and optimizer state.

    Returns
    -------
    float
        Bytes; NaN if the network has no formula for memory.
    """
    family = family_of(config)
    recomputed = 0 < config.checkpoint_rows < max(N for N, _, _ in tables)
    in_16_bits = precision != "fp32"
    kept = sum(family.kept_bytes(config, N, n, M, recomputed, in_16_bits) for N, n, M in tables)
    return weight_bytes * parameters + kept


def stage_peak(
    config: NetworkConfig, parameters: int, stage: StageConfig, precision: str, weight_bytes: float = STATE_BYTES
) -> float:
    """Bound `peak_bytes` for the packs that a stage can draw.

    A pack is filled to its token budget with copies of one of the extreme tables, fractions of a table included.
    """
    # A stage may have its own values of some settings of the network.
    if stage.checkpoint_rows is not None:
        config = replace(config, checkpoint_rows=stage.checkpoint_rows)  # type: ignore[type-var]  # a dataclass
    if stage.col_attention_fp32 is not None:
        # "auto" counts as fp32, which needs the most memory.
        in_fp32 = bool(stage.col_attention_fp32)
        config = replace(config, col_attention_fp32=in_fp32)  # type: ignore

    # The worst of the extreme tables.
    state = weight_bytes * parameters
    peaks = []
    for N, n, M in extreme_tables(config, stage):
        tables = stage.pack_tokens / family_of(config).pack_tokens(config, N, M)
        tables = min(max(tables, 1.0), stage.tables)
        peaks.append(state + tables * peak_bytes(config, 0, [(N, n, M)], precision))
    return max(peaks)


def extreme_tables(config: NetworkConfig, stage: StageConfig) -> Iterator[Shape]:
    """Yield candidates for the table that needs the most memory, in total or per token.

    Memory and tokens are linear in rows, in labeled rows and in features. So the maximum is at

    - an end of a range,
    - a number of rows where recomputation or a cap of features begins, or
    - a size at which all tables of a step just fill a pack.
    """
    low, high = stage.rows
    thresholds = [config.checkpoint_rows, *(rows for rows, _ in FEATURE_CAPS)]
    limits = {low, high, *(rows for rows in thresholds if low <= rows <= high)}
    # The tokens of a table if all tables of a step share a pack.
    share = stage.pack_tokens // stage.tables

    def tokens(rows: int, features: int) -> int:
        return family_of(config).pack_tokens(config, rows, features)

    # For each number of rows, both ends of the features, and the most features with which all tables fit into a pack.
    shapes = set()  # rows and features
    for rows in limits:
        fewest = cap_features(rows, stage.features[0])
        most = cap_features(rows, stage.features[1])
        shapes |= {(rows, fewest), (rows, most)}
        fitting = [features for features in range(fewest, most + 1) if tokens(rows, features) <= share]
        if fitting:
            shapes.add((rows, fitting[-1]))
    # For both ends of the features, the most rows with which all tables fit into a pack.
    for features in stage.features:
        rows = min(max(share // tokens(1, features), low), high)
        shapes.add((rows, cap_features(rows, features)))
    # Each with the fewest and the most labeled rows.
    for rows, features in sorted(shapes):
        for labeled_share in stage.train_share:
            labeled = min(max(round(rows * labeled_share), 2), rows - 2)
            yield rows, labeled, features
