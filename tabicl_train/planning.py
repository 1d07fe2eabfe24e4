"""What a run will cost, computed before it starts: the plan that is printed, its arithmetic, and its memory.

Peak memory = weights, gradients, their sum and optimizer state (20 bytes per parameter), plus what the forward pass of
the largest pack keeps for the backward pass (`Network.kept_values`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tabicl_train.config.schema import CurriculumConfig, RunConfig, StageConfig
from tabicl_train.console import text_table
from tabicl_train.curriculum import FEATURE_CAPS, cap_features, plan_step
from tabicl_train.model.config import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.pack import Shape
from tabicl_train.precision import choose

COLUMNS = ("stage", "steps", "tables", "rows", "cells", "FLOPs", "pack tokens", "passes/step", "memory")
STATE_BYTES = 20  # per parameter: weight, gradient of a pack and of the step, Adam's two moments; Muon has one
VALUE_BYTES = {"fp32": 4, "bf16": 2.2, "fp16": 2.2}  # per value kept; autocast leaves cells and labels in fp32


def run_plan(config: RunConfig) -> list[str]:
    """Describe a run before it starts: parameters, and work, passes and memory of a process in every stage."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in family_of(config.model)(config.model).parameters())
    lines = [f"model     {parameters:,} parameters"]
    stages = []
    for name, stage in config.curriculum.stages.items():
        work = expected_work(stage, config.model, config.seed, config.trainer.devices or 1)
        peak = stage_peak(config.model, parameters, stage, choose(config.trainer).name)
        rows = f"{stage.rows[0]:,}..{stage.rows[1]:,}"
        sizes = f"{stage.steps:,}", f"{stage.steps * stage.tables:,}", rows, f"{work.cells:.2g}", f"{work.flops:.2g}"
        stages.append([name, *sizes, f"{stage.pack_tokens:,}", f"{work.passes:.1f}", f"{peak / 1e9:.2f} GB"])
    lines += [f"          {line}" for line in text_table(COLUMNS, stages).splitlines()]
    ready = config.stream.prefetch_gib * 2**30 / 1e9
    ahead = f"tables drawn ahead: at most {ready:.1f} GB per process"
    lines.append(f"          {config.total_steps:,} steps in this run; {ahead}")
    return lines


class Work(NamedTuple):
    """Cells and FLOPs (forward and backward) of a stage, and the passes of the first process in each of its steps."""

    cells: float
    flops: float
    passes: float


def expected_work(stage: StageConfig, model: NetworkConfig, seed: int, ranks: int = 1, sample: int = 20) -> Work:
    """Extrapolate the work of a stage from the plans of its first `sample` steps."""
    alone, steps = CurriculumConfig({"stage": stage}), min(sample, stage.steps)
    cells = flops = passes = 0.0
    for plan in (plan_step(alone, model, seed, step) for step in range(steps)):
        cells += sum(len(g.tables) * g.spec.num_rows * g.spec.num_features for g in plan.groups)
        flops += sum(3 * g.cost for g in plan.groups)
        passes += len(plan.packs(0, ranks))
    scale = stage.steps / steps
    return Work(cells * scale, flops * scale, passes / steps)


def peak_bytes(config: NetworkConfig, parameters: int, tables: Sequence[Shape], precision: str = "fp32") -> float:
    """Estimate the bytes at the peak of an optimizer step whose largest pack has these tables."""
    recomputed = 0 < config.checkpoint_rows < max(N for N, _, _ in tables)
    values = sum(family_of(config).kept_values(config, N, n, M, recomputed) for N, n, M in tables)
    return STATE_BYTES * parameters + VALUE_BYTES[precision] * values


def stage_peak(config: NetworkConfig, parameters: int, stage: StageConfig, precision: str) -> float:
    """Bound peak_bytes of the packs that a stage can draw.

    A pack holds one of the tables that may be worst, as often as the token budget allows, in fractions of a table.
    """
    if stage.checkpoint_rows is not None:
        config = replace(config, checkpoint_rows=stage.checkpoint_rows)  # type: ignore[type-var]  # a dataclass
    state = STATE_BYTES * parameters
    peaks = []
    for N, n, M in extreme_tables(config, stage):
        tables = stage.pack_tokens / family_of(config).pack_tokens(config, N, M)
        peaks.append(state + min(max(tables, 1.0), stage.tables) * peak_bytes(config, 0, [(N, n, M)], precision))
    return max(peaks)


def extreme_tables(config: NetworkConfig, stage: StageConfig) -> Iterator[Shape]:
    """Yield the tables among which those are that need the most memory, alone or for each of their tokens.

    Memory and tokens are linear in each of rows, labeled rows and features, so these are at the ends of their ranges:
    at the limits of rows for recomputation and features, or where all tables of a step just fill a pack.
    """
    low, high = stage.rows
    if stage.small_share > 0:
        low, high = min(low, stage.small_rows[0]), max(high, stage.small_rows[1])
    limits = {low, high, *(rows for rows in (config.checkpoint_rows, *dict(FEATURE_CAPS)) if low <= rows <= high)}
    share = stage.pack_tokens // stage.tables  # tokens of a table

    def tokens(rows: int, features: int) -> int:
        return family_of(config).pack_tokens(config, rows, features)

    shapes = set()
    for rows in limits:
        few, many = (cap_features(rows, features) for features in stage.features)
        fitting = [features for features in range(few, many + 1) if tokens(rows, features) <= share]
        shapes |= {(rows, few), (rows, many), *((rows, features) for features in fitting[-1:])}
    for features in stage.features:
        rows = min(max(share // tokens(1, features), low), high)
        shapes.add((rows, cap_features(rows, features)))
    for rows, features in sorted(shapes):
        for labeled in stage.train_share:
            yield rows, min(max(round(rows * labeled), 2), rows - 2), features
