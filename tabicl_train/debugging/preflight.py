"""A check before a long run: a few steps in the configured precision and in fp32, on the same tables and weights. With
several ranks it runs on all of them, and first checks their gradients (`exchange_check.py`).

Published runs in low precision have collapsed after hours. Losses, gradient norms and multipliers that deviate from
those of fp32 show within tens of steps at the learning rate of the run; with the run_dir of a run, the preflight starts
from its newest checkpoint, ideally one after the warm-up.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from lightning.fabric import Fabric

from tabicl_train.callbacks.guard import MULTIPLIER_AT
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.console import info, text_table
from tabicl_train.debugging.exchange_check import check_exchange
from tabicl_train.distributed.launch import read_launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.errors import ConfigError
from tabicl_train.module import Pretraining
from tabicl_train.precision import Precision, choose
from tabicl_train.run_dir import checkpoint
from tabicl_train.train import (
    build_loader,
    build_stream,
    close_process_group,
    device_of,
    open_fabric,
    run_steps,
    set_up_process,
)
from tabicl_train.workers import Loader

LOSS = 0.02  # largest relative difference between the mean losses over the second half of the steps
NORM = 1.25  # largest ratio, either way, between the median gradient norms there
MULTIPLIER = 1.25  # largest ratio, either way, between the largest multipliers there


class Recorder:
    """Records loss, gradient norm and largest base multiplier of every step."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, **_) -> None:
        pass

    def on_train_batch_end(self, module: Pretraining, **_) -> None:
        multipliers = [s.multipliers(MULTIPLIER_AT).abs().max().item() for _, s in module.model.named_scalings()]
        self.rows.append((module.loss.item(), module.grad_norm.item(), max(multipliers, default=1.0)))


def preflight(config: RunConfig) -> None:
    """Run the checks and print what they find; nothing is written. Raises ConfigError, on all ranks, if one fails."""
    launch, precision = read_launch(), choose(config.trainer)
    ranks, device = Ranks(launch), device_of(config.trainer, launch)
    set_up_process(config)
    passes = (ranks.size > 1) + 2 * (precision.name != "fp32")
    stream = build_stream(config, build_prior(config.prior), range(config.total_steps), launch)
    with contextlib.ExitStack() as stack:  # workers are forked before the process group opens, idle
        loaders = [stack.enter_context(build_loader(stream, config.stream, device, launch)) for _ in range(passes)]
        fabric = open_fabric(config.trainer, launch, ranks, [])
        ranks.raise_on_all_ranks([*launch.problems(config.trainer.devices), *config.too_few_tables(ranks.size)[:1]])
        content = ranks.from_first(lambda: find_content(config))
        first = 0 if content is None else content["global_step"]
        steps = range(first, min(first + config.preflight_steps, config.total_steps))
        if ranks.size > 1:
            check_exchange(config, content, steps, ranks, fabric, loaders[0])
        if precision.name != "fp32":
            compare_precisions(config, precision, content, steps, ranks, fabric, loaders[-2:])
        elif ranks.rank == 0:
            info(f"preflight the precision is {precision}: there is nothing to compare")
        close_process_group(ranks)


def find_content(config: RunConfig) -> dict | None:
    """The content of the run's newest checkpoint, if there is one."""
    path, content = checkpoint.newest_valid(Path(config.run_dir) / "checkpoints") or (None, None)
    if path is not None and checkpoint.step_of(path) >= config.total_steps:
        why = "the run is finished, no steps are left for a preflight"
        raise ConfigError([f"run_dir is {config.run_dir!r}; {why}"])
    return content


def compare_precisions(
    config: RunConfig,
    precision: Precision,
    content: dict | None,
    steps: range,
    ranks: Ranks,
    fabric: Fabric,
    loaders: list[Loader],
) -> None:
    """Train the steps in fp32 and in the precision; on rank 0, print a comparison. Raises ConfigError on all ranks."""
    rows = []
    for name, loader in zip(("fp32", precision.name), loaders, strict=True):
        recorder = Recorder()
        tf32 = config.trainer.tf32 and name != "fp32"  # the reference is exact
        in_precision = replace(config, trainer=replace(config.trainer, precision=name, tf32=tf32))
        run_steps(in_precision, content, steps, recorder, ranks, fabric, loader)
        rows.append(recorder.rows)

    def conclude() -> None:
        reference, mixed = rows
        info(f"preflight fp32 and {precision}, steps {steps[0]}..{steps[-1]}")
        compared = []
        for i in sorted({round(k * (len(steps) - 1) / 9) for k in range(10)}):
            compared.append([steps[i], *(f"{a:.4g} {b:.4g}" for a, b in zip(reference[i], mixed[i], strict=True))])
        info(text_table(["step", "loss", "gradient norm", "multiplier"], compared))
        if problems := differences(reference, mixed, precision.name):
            raise ConfigError([f"preflight: {problem}" for problem in problems])
        info(f"preflight {precision.name} is fit for this run")

    ranks.from_first(conclude)


def differences(reference: list, mixed: list, name: str) -> list[str]:
    """Problems of a precision compared with fp32.

    reference, mixed: of fp32 and of the precision, (loss, gradient norm, multiplier) per step
    """
    for step, (loss, norm, _) in enumerate(mixed):
        # For fp16 infinite norms are normal: this is how it finds its loss scale.
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
