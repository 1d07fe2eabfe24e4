"""The plan printed before a run starts: its stages, tables, cells, arithmetic and memory."""

from __future__ import annotations

import statistics

import torch

from tabicl_train.config.schema import CurriculumConfig, RunConfig, StageConfig
from tabicl_train.console import text_table
from tabicl_train.curriculum import plan_step
from tabicl_train.model.families import family_of
from tabicl_train.planning.memory import stage_peak
from tabicl_train.precision import choose

COLUMNS = ("stage", "steps", "tables", "rows", "cells", "FLOPs", "pack tokens", "passes/step", "memory")


def run_plan(config: RunConfig) -> list[str]:
    """Lines: the model's parameters, and for every stage its steps, tables, rows, expected cells and FLOPs, the token
    budget of a pack, the expected forward passes of a process in a step, and the estimated peak memory of a training
    process, without the tables that its workers have drawn ahead."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in family_of(config.model)(config.model).parameters())
    lines = [f"model     {parameters:,} parameters"]
    stages = []
    for name, stage in config.curriculum.stages.items():
        cells, flops = expected_work(config, stage)
        peak = stage_peak(config.model, parameters, stage, choose(config.trainer).name)
        passes = expected_passes(config, stage)
        rows = f"{stage.rows[0]:,}..{stage.rows[1]:,}"
        sizes = f"{stage.steps:,}", f"{stage.steps * stage.tables:,}", rows, f"{cells:.2g}", f"{flops:.2g}"
        stages.append([name, *sizes, f"{stage.pack_tokens:,}", f"{passes:.1f}", f"{peak / 1e9:.2f} GB"])
    lines += [f"          {line}" for line in text_table(COLUMNS, stages).splitlines()]
    ready = config.stream.prefetch_gib * 2**30 / 1e9
    ahead = f"tables drawn ahead: at most {ready:.1f} GB per process"
    lines.append(f"          {config.total_steps:,} steps in this run; {ahead}")
    return lines


def expected_work(config: RunConfig, stage: StageConfig, sample: int = 20) -> tuple[float, float]:
    """Cells and FLOPs (forward and backward) of a stage, extrapolated from the plans of its first `sample` steps."""
    alone = CurriculumConfig({"stage": stage})
    cells = flops = 0.0
    for step in range(min(sample, stage.steps)):
        for group in plan_step(alone, config.model, config.seed, step).groups:
            cells += len(group.tables) * group.spec.num_rows * group.spec.num_features
            flops += 3 * group.cost
    scale = stage.steps / min(sample, stage.steps)
    return cells * scale, flops * scale


def expected_passes(config: RunConfig, stage: StageConfig, sample: int = 20) -> float:
    """Forward passes of the first process in a step, mean over the first `sample` steps of a stage."""
    alone = CurriculumConfig({"stage": stage})
    ranks = config.trainer.devices or 1
    plans = (plan_step(alone, config.model, config.seed, step) for step in range(min(sample, stage.steps)))
    return statistics.fmean(len(plan.packs(0, ranks)) for plan in plans)
