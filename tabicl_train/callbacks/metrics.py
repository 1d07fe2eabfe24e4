"""What a run measures of itself: a row of metrics.csv a logged step, and the progress line."""

from __future__ import annotations

import math
import resource
import sys
import time

import lightning as L
import torch
from torch import Tensor
from tqdm import tqdm

from tabicl_train.config.schema import RunConfig
from tabicl_train.curriculum import stage_at
from tabicl_train.model.config import TabICLConfig
from tabicl_train.module import Pretraining
from tabicl_train.planning.flops import forward_flops, peak_flops
from tabicl_train.planning.run_plan import expected_work
from tabicl_train.run_dir.console import tell
from tabicl_train.run_dir.records import Records
from tabicl_train.schedules import learning_rate
from tabicl_train.stream import StepItem, TableBatch

COLUMNS = (
    "step", "stage", "loss", "grad_norm", "lr", "tables_per_s", "cells_per_s", "data_wait", "accept_rate", "skipped",
    "clipped", "tflops_per_s", "peak_share", "memory_gb",
)  # fmt: skip
PLAIN_LINE_EVERY = 10.0  # seconds between progress lines where the output is not a terminal


class Metrics(L.Callback):
    """Writes metrics.csv and shows progress, on the first rank.

    step: optimiser steps done; loss, grad_norm, lr: of that very step; tables_per_s, cells_per_s (all ranks),
    data_wait (share of the time spent waiting for tables) and accept_rate (of the prior's draws, this rank):
    since the row before; skipped: steps of non-finite gradient so far; clipped: share of the steps since the row before
    whose gradient was clipped; tflops_per_s: of the model, 10^12 counted operations a second (all ranks), recomputed
    activations not counted; peak_share: of what the device can do at most, where that is known; memory_gb: the most
    that this process has had, on the device or, on a CPU, resident.
    """

    def __init__(self, config: RunConfig, records: Records) -> None:
        self.config, self.records = config, records

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        self.start_window(trainer)
        if trainer.is_global_zero:
            self.records.rewind("metrics.csv", trainer.global_step, COLUMNS)
            self.progress = Progress(self.config, trainer.global_step)

    def start_window(self, trainer: L.Trainer) -> None:
        self.started, self.waited = time.perf_counter(), trainer.train_dataloader.waited
        self.tables = self.cells = self.drawn = self.rejected = self.steps = 0
        self.flops = 0.0
        self.clipped: Tensor | int = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, _, item: StepItem, __: int) -> None:
        self.tables += item.tables
        self.cells += sum(batch.X.numel() for batch in item.batches) * trainer.world_size
        self.drawn += sum(batch.X.shape[0] for batch in item.batches)
        self.rejected += item.rejections.total()
        self.flops += sum(step_flops(self.config.model, batch) for batch in item.batches) * trainer.world_size
        _, stage, stage_step = stage_at(self.config.curriculum, item.step)
        self.clipped = self.clipped + (module.grad_norm > stage.clip)  # stays on the device
        self.steps += 1
        step = trainer.global_step
        if is_logged(self.config, step):
            seconds = time.perf_counter() - self.started
            peak = peak_flops(module.device, module.precision.name)
            row = {
                "step": step,
                "stage": item.stage,
                "loss": module.loss.item(),
                "grad_norm": module.grad_norm.item(),
                "lr": learning_rate(stage, stage_step),
                "tables_per_s": self.tables / seconds,
                "cells_per_s": self.cells / seconds,
                "data_wait": (trainer.train_dataloader.waited - self.waited) / seconds,
                "accept_rate": self.drawn / (self.drawn + self.rejected),
                "skipped": int(module.skipped),
                "clipped": int(self.clipped) / self.steps,
                "tflops_per_s": self.flops / seconds / 1e12,
                "peak_share": "" if peak is None else self.flops / seconds / (peak * trainer.world_size),
                "memory_gb": peak_memory(module.device) / 1e9,
            }
            self.start_window(trainer)
            if trainer.is_global_zero:
                self.records.append_rows("metrics.csv", {column: row[column] for column in COLUMNS})
                self.progress.show(row)

    def on_train_end(self, trainer: L.Trainer, module: Pretraining) -> None:
        if trainer.is_global_zero:
            self.progress.close()


def step_flops(config: TabICLConfig, batch: TableBatch) -> float:
    """FLOPs of a micro-batch, forward and backward."""
    tables, rows, features = batch.X.shape
    return 3 * tables * forward_flops(config, rows, batch.train_size, features)


def peak_memory(device: torch.device) -> float:
    """Bytes, at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_logged(config: RunConfig, step: int) -> bool:
    """Whether the files of a run get rows after this many steps."""
    return step % config.trainer.log_every == 0 or step == config.total_steps


class Progress:
    """A bar on a terminal; elsewhere a plain line every ten seconds, so that logs stay readable."""

    def __init__(self, config: RunConfig, step: int) -> None:
        self.config, self.total, self.started = config, config.total_steps, time.perf_counter()
        # A step of a later stage takes longer, so what is left is counted in FLOPs.
        self.step_work = {n: expected_work(config, s)[1] / s.steps for n, s in config.curriculum.stages.items()}
        self.first_work = self.work(step)
        self.last_line, self.smooth = self.started, math.nan
        layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=step, unit="step", dynamic_ncols=True, bar_format=layout)

    def work(self, step: int, until_stage: str | None = None) -> float:
        """Expected FLOPs of the run up to a step, or to the end of a stage where that comes first."""
        work = 0.0
        for name, stage in self.config.curriculum.stages.items():
            work += min(step, stage.steps) * self.step_work[name]
            step -= min(step, stage.steps)
            if name == until_stage:
                break
        return work

    def time_left(self, row: dict) -> str:
        """Of the run, and of its stage where that is not the last one."""
        done = self.work(row["step"])
        pace = (time.perf_counter() - self.started) / (done - self.first_work)
        run, stage = self.work(self.total) - done, self.work(self.total, row["stage"]) - done
        told = f"{tqdm.format_interval(pace * run)} left"
        return told if stage >= run else f"{told} ({tqdm.format_interval(pace * stage)} of {row['stage']})"

    def show(self, row: dict) -> None:
        # Single steps are noisy (a step's tables may be easy or hard): half of the weight is on the last 7 rows.
        if not math.isfinite(self.smooth):
            self.smooth = row["loss"]
        elif math.isfinite(row["loss"]):
            self.smooth = 0.9 * self.smooth + 0.1 * row["loss"]
        told = f"loss {self.smooth:.3f}, {row['tables_per_s']:.0f} tables/s, data wait {row['data_wait']:.1%}"
        told += f", {row['memory_gb']:.1f} GB, {self.time_left(row)}"
        if self.bar is not None:
            self.bar.set_postfix_str(f"{row['stage']}, {told}", refresh=False)
            self.bar.update(row["step"] - self.bar.n)
            return
        now = time.perf_counter()
        if now - self.last_line >= PLAIN_LINE_EVERY or row["step"] == self.total:
            self.last_line = now
            tell(f"{row['stage']} step {row['step']}/{self.total}: {told}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
