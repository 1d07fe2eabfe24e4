"""Profiles some steps on demand: a trace, and on a GPU a snapshot of its memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tabicl_train.config.schema import ProfileConfig
from tabicl_train.console import info
from tabicl_train.module import Pretraining


class Profile:
    """Profile some steps on rank 0, and write files to `profile` in the run directory.

    steps-A-B.json.gz     the trace of steps A to B, for ui.perfetto.dev or chrome://tracing
    steps-A-B.pickle      allocations on the GPU up to the end of step B and the code that made them, for
                          pytorch.org/memory_viz
    out-of-memory.pickle  the same up to the moment when a step runs out of memory
    """

    def __init__(self, config: ProfileConfig, run_dir: Path) -> None:
        self.config, self.folder = config, run_dir / "profile"
        self.first, self.last = config.step, config.step + config.steps - 1
        self.profiler: profile | None = None

    def on_train_batch_start(self, step: int, module: Pretraining, **_) -> None:
        if step == self.first:
            self.folder.mkdir(exist_ok=True)
            if module.device.type == "cuda":
                torch.cuda.memory._record_memory_history()
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (module.device.type == "cuda")
            self.profiler = profile(activities=activities)
            self.profiler.start()

    def on_train_batch_end(self, step: int, module: Pretraining, **_) -> None:
        if self.profiler is not None and step > self.last:
            self.finish(step, module)

    def on_train_end(self, step: int, module: Pretraining, **_) -> None:
        if self.profiler is not None:  # the run ends, or is preempted, among the steps to profile
            self.finish(step, module)

    def finish(self, step: int, module: Pretraining) -> None:
        """Write the trace of the steps so far."""
        assert self.profiler is not None
        self.profiler.stop()
        trace = self.folder / f"steps-{self.first}-{step - 1}.json.gz"
        self.profiler.export_chrome_trace(str(trace))
        self.profiler = None
        info(f"profile   {trace}")
        self.snapshot(trace.with_suffix("").with_suffix(".pickle"), module)

    def on_exception(self, error: BaseException, module: Pretraining, **_) -> None:
        """Write what is allocated if a profiled step runs out of memory."""
        if self.profiler is not None and isinstance(error, torch.OutOfMemoryError):
            self.snapshot(self.folder / "out-of-memory.pickle", module)

    def snapshot(self, path: Path, module: Pretraining) -> None:
        """Write the allocations on a GPU, and stop recording them."""
        if module.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            info(f"profile   {path}")
