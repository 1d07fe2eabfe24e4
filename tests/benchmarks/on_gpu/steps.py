"""Training with the live stream: workers draw the tables while the device computes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from on_gpu.measure import Row, Setting, synchronize
from on_gpu.roofline import predicted

from tabicl_train.callbacks.metrics import step_flops
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import CurriculumConfig, RunConfig, build_prior
from tabicl_train.distributed.launch import Launch
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.planning.flops import peak_flops
from tabicl_train.train import build_loader, build_stream, device_of, open_fabric, run_steps
from tabicl_train.workers import Loader

WARM = 3  # steps before the clock starts: memory is allocated, kernels are compiled, workers draw ahead


class Done(Exception):
    """The deadline has come, or enough steps were measured."""


class Stopwatch:
    """Ends the training at the deadline with `Done`, and measures from the end of step `WARM` on."""

    def __init__(self, deadline: float, most: int, loader: Loader) -> None:
        self.deadline, self.most, self.loader = deadline, most, loader
        self.steps = self.tables = self.tokens = 0
        self.flops = self.seconds = self.waited = 0.0

    def on_train_batch_start(self, **_) -> None:
        pass

    def on_train_batch_end(self, step, item, module, **_) -> None:
        loader = self.loader
        if step <= WARM:
            if step == WARM:
                synchronize(module.device)
                self.start, self.first_wait = time.perf_counter(), loader.waited
                if module.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
            return
        self.steps += 1
        self.tables += item.tables
        self.tokens += sum(module.tokens_of(pack) for pack in item.packs)
        self.flops += sum(step_flops(module.config.model, pack) for pack in item.packs)
        if self.steps == self.most or time.monotonic() > self.deadline:
            synchronize(module.device)
            self.seconds = time.perf_counter() - self.start
            self.waited = loader.waited - self.first_wait
            self.peak = peak_flops(module.device, module.precision.name)
            raise Done


def live(name: str) -> Callable[[Setting, float], list[Row]]:
    """The section that trains a stage of the curriculum, or on single tables of 60,000 rows."""
    return lambda setting, deadline: train(name, setting, deadline)


def configuration(name: str, setting: Setting) -> RunConfig:
    workers = max(1, (os.cpu_count() or 2) - 1)
    config = compose([*setting.overrides, f"stream.num_workers={workers}"])
    stages = config.curriculum.stages
    stage = stages["stage3"] if name == "long" else stages[name]
    if name == "long":
        stage = replace(stage, rows=[60_000, 60_000], tables=1)
    if setting.tiny:
        stage = replace(stage, rows=[40, 60], features=[1, 5], tables=4)
    return replace(config, curriculum=CurriculumConfig({name: replace(stage, steps=100_000)}))


def train(name: str, setting: Setting, deadline: float) -> list[Row]:
    config = configuration(name, setting)
    launch, ranks, steps = Launch(), Ranks(), range(config.total_steps)
    device = device_of(config.trainer, launch)
    stream = build_stream(config, build_prior(config), steps, launch)
    with build_loader(stream, config.stream, device, launch) as loader, contextlib.suppress(Done):
        watch = Stopwatch(deadline, 2 if setting.tiny else 60, loader)
        run_steps(config, None, steps, watch, ranks, open_fabric(config.trainer, launch, ranks, []), loader)
    if not watch.seconds:
        raise TimeoutError(f"fewer than {WARM + 1} steps within the limit")
    times = watch.seconds / watch.steps
    guess = sum(predicted(name, setting.rates, watch.tokens // watch.steps).values())
    note = f"{watch.steps} steps of {watch.tables // watch.steps} tables, {watch.tokens // watch.steps:,} tokens"
    rows = [
        Row(name, "step", times, "s", guess, note),
        Row(name, "tables", watch.tables / watch.seconds, "1/s"),
        Row(name, "tokens", watch.tokens / watch.seconds / 1e6, "million/s"),
        Row(name, "waiting for tables", watch.waited / watch.seconds, "of the time"),
        Row(name, "arithmetic", watch.flops / watch.seconds / 1e12, "TFLOP/s"),
    ]
    if watch.peak:
        rows.append(Row(name, "share of peak", watch.flops / watch.seconds / watch.peak, "of the data sheet"))
    if setting.device.type == "cuda":
        rows.append(Row(name, "memory", torch.cuda.max_memory_allocated() / 2**30, "GiB"))
    return rows
