"""A check before a long run: a few steps in the configured precision and in fp32, on the same tables and weights.

Published runs in low precision have collapsed after hours. Losses, gradient norms and multipliers that deviate from
those of fp32 show within tens of steps at the learning rate of the run; with the run_dir of a run, the preflight starts
from its newest checkpoint, ideally one after the warm-up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import lightning as L

from tabicl_train.callbacks.guard import MULTIPLIER_AT
from tabicl_train.config.schema import RunConfig
from tabicl_train.console import tell
from tabicl_train.errors import ConfigError
from tabicl_train.precision import choose
from tabicl_train.run_dir import checkpoint
from tabicl_train.train import run_steps

LOSS = 0.02  # largest relative difference between the mean losses over the second half of the steps
NORM = 1.25  # largest ratio, either way, between the median gradient norms there
MULTIPLIER = 1.25  # largest ratio, either way, between the largest multipliers there


class Recorder(L.Callback):
    """Records loss, gradient norm and largest base multiplier of every step."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module, *_) -> None:
        multipliers = [s.multipliers(MULTIPLIER_AT).abs().max().item() for _, s in module.model.named_scalings()]
        self.rows.append((module.loss.item(), module.grad_norm.item(), max(multipliers, default=1.0)))


def preflight(config: RunConfig) -> None:
    """Run the check and print a comparison; raises ConfigError if the precision is unfit for the run."""
    precision = choose(config.trainer)
    if precision.name == "fp32":
        tell(f"preflight the precision is {precision}: there is nothing to compare")
        return
    start = checkpoint.newest_valid(Path(config.run_dir) / "checkpoints")
    first = 0 if start is None else checkpoint.step_of(start[0])
    steps = min(config.preflight_steps, config.total_steps - first)
    if steps < 1:
        raise ConfigError([f"run_dir is {config.run_dir!r}; the run is finished, no steps are left for a preflight"])
    rows = {}
    for name in ("fp32", precision.name):
        recorder = Recorder()
        run_steps(replace(config, trainer=replace(config.trainer, precision=name)), start, first + steps, recorder)
        rows[name] = recorder.rows
    reference, mixed = rows.values()
    tell(f"preflight fp32 and {precision}, steps {first}..{first + steps - 1}")
    tell(f"          {'step':>8}{'loss':>20}{'gradient norm':>22}{'multiplier':>22}")
    for i in sorted({round(k * (steps - 1) / 9) for k in range(10)}):
        pairs = "".join(f"{a:>{w}.4g}{b:>10.4g}" for a, b, w in zip(reference[i], mixed[i], (10, 12, 12), strict=True))
        tell(f"          {first + i:>8}{pairs}")
    if problems := differences(reference, mixed, precision.name):
        raise ConfigError([f"preflight: {problem}" for problem in problems])
    tell(f"preflight {precision.name} is fit for this run")


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
