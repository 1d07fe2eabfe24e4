"""Metrics of a run at logged steps, and the progress line.

metrics.csv, a row for each logged step:

step, stage                optimizer steps done, including this one; stage of the curriculum
loss, grad_norm, lr        of this step: mean loss of the tables, gradient norm before clipping, learning rate
guess_loss                 mean loss of predicting the tables of this step from labels alone
tables_per_s, cells_per_s  on all ranks, since the previous row
data_wait                  share of the time spent waiting for tables since the previous row, on rank 0
accept_rate                share of the prior's draws that were accepted since the previous row, on all ranks
skipped                    steps with a non-finite loss or gradient norm so far
clipped                    share of the steps since the previous row whose gradient was clipped
tflops_per_s               10^12 FLOPs of the model per second on all ranks, without recomputed activations; empty if
                           the network has no formula for FLOPs
peak_share                 share of the peak performance of the devices in the format of the run, if both are known: for
                           trainer.precision=fp32 that of TF32, or that of fp32 if trainer.tf32=false
memory_gb                  peak memory of rank 0 so far, on its device, or resident on a CPU

scaling.csv, a row for each logged step and each layer with a scaling rule:

step, stage, layer         as above; name of the layer
n_smallest, n_largest      fewest and most labeled rows of the tables of the step on rank 0
at_smallest, at_largest    largest |base(n)| of the base multiplier over heads and elements, for these n
gate_mean, gate_std        of the gate 1 + tanh(MLP(q)) over all queries, with padding (model/padding.py) and with equal
                           weights of packs; empty without a gate
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from tqdm import tqdm

from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.console import counted, info, one_line
from tabicl_train.stream.curriculum import stage_at
from tabicl_train.stream.schedules import learning_rate
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback, Reason
from tabicl_train.training.module import TrainedNetwork
from tabicl_train.training.planning import expected_work, training_flops
from tabicl_train.training.precision import peak_flops
from tabicl_train.training.state import TrainState

COLUMNS = (
    "step", "stage", "loss", "guess_loss", "grad_norm", "lr", "tables_per_s", "cells_per_s", "data_wait",
    "accept_rate", "skipped", "clipped", "tflops_per_s", "peak_share", "memory_gb",
)  # fmt: skip
PLAIN_LINE_EVERY = 60.0  # seconds between progress lines where the output is not a terminal


class Progress:
    """A progress bar on a terminal; elsewhere a plain line every minute, so that logs stay readable.

    Parameters
    ----------
    curriculum : CurriculumConfig
        The stages.
    total : int
        Optimizer steps of the run.
    stage_work : callable
        Returns the expected work of a stage. Steps of later stages take longer, so the time left is that of the work
        left.
    """

    def __init__(self, curriculum: CurriculumConfig, total: int, stage_work: Callable[[StageConfig], float]) -> None:
        self.curriculum = curriculum
        self.total = total
        self.stage_work = stage_work
        self.smooth = math.nan  # the moving average of the loss

    def start(self, step: int) -> None:
        """Begin to show progress, after `step` optimizer steps."""
        self.step_work = {}  # expected work of one step, by stage
        for name, stage in self.curriculum.stages.items():
            self.step_work[name] = self.stage_work(stage) / stage.steps
        self.started = time.perf_counter()
        self.last_line = -math.inf  # when the last plain line was printed
        self.first_work = self.work(step)
        self.rows = 0
        layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=step, unit="step", dynamic_ncols=True, bar_format=layout)

    def work(self, step: int, until_stage: str | None = None) -> float:
        """Return the expected work of the run up to a step, or to the end of a stage if that comes first."""
        work = 0.0
        steps_left = step
        for name, stage in self.curriculum.stages.items():
            steps_in_stage = min(steps_left, stage.steps)
            work += steps_in_stage * self.step_work[name]
            steps_left -= steps_in_stage
            if name == until_stage:
                break
        return work

    def time_left(self, row: dict) -> str:
        """Format the time left for the run, and for the current stage unless it is the last one."""
        done = self.work(row["step"])
        seconds_per_work = (time.perf_counter() - self.started) / (done - self.first_work)
        left_of_run = self.work(self.total) - done
        left_of_stage = self.work(self.total, row["stage"]) - done
        text = f"{tqdm.format_interval(seconds_per_work * left_of_run)} left"
        if left_of_stage < left_of_run:
            text += f" ({tqdm.format_interval(seconds_per_work * left_of_stage)} of {row['stage']})"
        return text

    def show(self, row: dict) -> None:
        """Show a row of metrics.csv."""
        # A moving average, since the tables of a step may be easy or hard: half of the weight is on the last 7 rows.
        if not math.isfinite(self.smooth):
            self.smooth = row["loss"]
        elif math.isfinite(row["loss"]):
            self.smooth = 0.9 * self.smooth + 0.1 * row["loss"]
        text = f"loss {self.smooth:.3f}, {row['tables_per_s']:.0f} tables/s, data wait {row['data_wait']:.1%}"
        text += f", {row['memory_gb']:.1f} GB"
        if row["skipped"]:
            text += f", {counted(row['skipped'], 'step')} skipped"

        # The time left. Time before the first row does not count, since workers start and blocks are compiled then.
        self.rows += 1
        if self.rows > 1:
            text += f", {self.time_left(row)}"
        else:
            self.started = time.perf_counter()
            self.first_work = self.work(row["step"])

        # The bar or the line.
        if self.bar is not None:
            self.bar.set_postfix_str(one_line(f"{row['stage']}, {text}"), refresh=False)
            self.bar.update(row["step"] - self.bar.n)
        elif (
            self.rows <= 2  # the first row, and the first estimate of the time left
            or time.perf_counter() - self.last_line >= PLAIN_LINE_EVERY
            or row["step"] == self.total
        ):
            self.last_line = time.perf_counter()
            info(f"{row['stage']} step {row['step']}/{self.total}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Metrics(Callback):
    """Write and log metrics.csv and show progress, on rank 0."""

    files = ("metrics.csv",)
    on_all_ranks = True

    @cached_property
    def progress(self) -> Progress:
        """The progress line."""
        config = self.context.config

        def stage_work(stage: StageConfig) -> float:
            work = expected_work(stage, config.model, config.seed)
            return work.cells if math.isnan(work.flops) else work.flops

        return Progress(config.curriculum, config.total_steps, stage_work)

    def start(self, state: TrainState) -> None:
        """Start counting, and show progress."""
        self.start_window()
        if self.context.ranks.rank == 0:
            self.progress.start(state.step)

    def start_window(self) -> None:
        """Start counting for the next row."""
        self.started = time.perf_counter()
        self.waited = self.context.loader.waited
        self.steps = 0
        self.tables = 0
        self.cells = 0
        self.drawn = 0
        self.rejected = 0
        self.flops = 0.0
        self.clipped: Tensor | int = 0

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Count a step, and write a row if it is logged."""
        # Count.
        module = state.module
        self.steps += 1
        self.tables += item.tables
        self.cells += sum(pack.cells for pack in item.packs)
        self.drawn += sum(len(pack) for pack in item.packs)
        self.rejected += item.rejections.total()
        self.flops += sum(training_flops(module.model.config, pack.shapes) for pack in item.packs)
        _, stage, stage_step = stage_at(self.context.config.curriculum, item.step)
        self.clipped = self.clipped + (module.grad_norm > stage.clip)  # stays on the device
        if state.step not in self.context.logged:
            return

        # The row, which all ranks compute and rank 0 writes.
        row = self.row(state.step, item, module)
        row["lr"] = learning_rate(stage, stage_step)
        if self.context.ranks.rank == 0:
            row = {column: row[column] for column in COLUMNS}
            self.context.records.append_rows("metrics.csv", row)
            values = {column: value for column, value in row.items() if column != "step" and value != ""}
            self.context.records.log_metrics(values, state.step)
            self.progress.show(row)
        self.start_window()

    def row(self, step: int, item: StepItem, module: TrainedNetwork) -> dict[str, object]:
        """Return the row of a logged step; all ranks call this."""
        # Sums over all ranks.
        seconds = time.perf_counter() - self.started
        guess = sum(guess_losses(module, item))
        sums = torch.tensor([self.cells, self.flops, self.drawn, self.rejected, guess], dtype=torch.float64)
        cells, flops, drawn, rejected, guess = self.context.ranks.sum(sums).tolist()

        # Means over the steps since the previous row, or empty cells.
        has_flops = not math.isnan(flops)
        peak = peak_flops(module.device, module.precision.name, self.context.config.trainer.tf32)
        return {
            "step": step,
            "stage": item.stage,
            "loss": module.loss.item(),
            "guess_loss": guess / item.tables,
            "grad_norm": module.grad_norm.item(),
            "tables_per_s": self.tables / seconds,
            "cells_per_s": cells / seconds,
            "data_wait": (self.context.loader.waited - self.waited) / seconds,
            "accept_rate": drawn / (drawn + rejected),
            "skipped": int(module.skipped),
            "clipped": int(self.clipped) / self.steps,
            "tflops_per_s": flops / seconds / 1e12 if has_flops else "",
            "peak_share": flops / seconds / (peak * self.context.ranks.size) if has_flops and peak is not None else "",
            "memory_gb": peak_memory(module.device) / 1e9,
        }

    def end(self, state: TrainState, reason: Reason) -> None:
        """End the progress bar."""
        if self.context.ranks.rank == 0:
            self.progress.close()


def guess_losses(module: TrainedNetwork, item: StepItem) -> list[float]:
    """Return the loss of predicting each table of this rank from labels alone; waits for the device once per pack."""
    losses = []
    for pack in item.packs:
        targets = pack.y[: pack.rows].cpu().split([rows for rows, _, _ in pack.shapes])  # of each table
        for (_, labeled, _), y in zip(pack.shapes, targets, strict=True):
            losses.append(module.model.guess_loss(y, labeled))
    return losses


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process so far, in bytes: reserved on a GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Diagnostics(Callback):
    """Write scaling.csv and log the multipliers, on rank 0."""

    files = ("scaling.csv",)

    def __init__(self) -> None:
        self.gate_sums: dict[str, Tensor] = {}  # by layer; the tensors are kept, since CUDA graphs add to them

    def before_step(self, state: TrainState, item: StepItem) -> None:
        """Let the layers measure their gates in a logged step."""
        if item.step + 1 in self.context.logged:
            for name, scaling in state.network.named_scalings():
                if name not in self.gate_sums:
                    self.gate_sums[name] = torch.zeros(3, device=state.device)
                scaling.gate_sums = self.gate_sums[name].zero_()

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Write the rows of a logged step."""
        step = state.step
        if step not in self.context.logged:
            return

        # The multipliers for the fewest and the most labeled rows, and what the gates measured.
        labeled = [n for pack in item.packs for _, n, _ in pack.shapes]
        smallest = min(labeled)
        largest = max(labeled)
        rows = []
        for name, scaling in state.network.named_scalings():
            # Gates are measured in logged steps only, see before_step.
            gate_mean, gate_std = gate_statistics(scaling.gate_sums)
            scaling.gate_sums = None
            rows.append(
                {
                    "step": step,
                    "stage": item.stage,
                    "layer": name,
                    "n_smallest": smallest,
                    "n_largest": largest,
                    "at_smallest": scaling.multipliers(smallest).abs().max().item(),
                    "at_largest": scaling.multipliers(largest).abs().max().item(),
                    "gate_mean": gate_mean,
                    "gate_std": gate_std,
                }
            )
        if rows:
            self.context.records.append_rows("scaling.csv", *rows)
            self.context.records.log_metrics({f"multiplier/{row['layer']}": row["at_largest"] for row in rows}, step)


def gate_statistics(sums: Tensor) -> tuple[float, float] | tuple[str, str]:
    """Return mean and standard deviation of a gate from `Scaling.gate_sums`, (3,); empty cells without a gate."""
    sum_of_means, sum_of_squares, passes = sums.tolist()
    if passes == 0:
        return "", ""
    mean = sum_of_means / passes
    square = sum_of_squares / passes
    return mean, max(square - mean**2, 0.0) ** 0.5
