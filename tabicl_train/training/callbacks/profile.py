"""Profiles some steps on demand: writes a trace, and on a GPU a snapshot of its memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tabicl_train.console import info
from tabicl_train.stream.steps import StepItem
from tabicl_train.training.callbacks.callback import Callback, Reason
from tabicl_train.training.state import TrainState


class Profile(Callback):
    """Profile some steps on rank 0, and write files to `profile` in the run directory.

    steps-A-B.json.gz     the trace of steps A to B, for ui.perfetto.dev or chrome://tracing
    steps-A-B.pickle      allocations on the GPU up to the end of step B and the code that made them, for
                          pytorch.org/memory_viz
    out-of-memory.pickle  the same up to the moment when a profiled step runs out of memory
    """

    def __init__(self) -> None:
        self.profiler: profile | None = None

    @property
    def first_step(self) -> int:
        """The first step to profile."""
        step = self.context.config.profile.step
        assert step is not None  # `build_callbacks` asks
        return step

    @property
    def last_step(self) -> int:
        """The last step to profile."""
        return self.first_step + self.context.config.profile.steps - 1

    @cached_property
    def folder(self) -> Path:
        """The folder of the profile's files."""
        return self.context.records.folder / "profile"

    def before_step(self, state: TrainState, item: StepItem) -> None:
        """Start profiling at the first step."""
        if state.step == self.first_step:
            self.folder.mkdir(exist_ok=True)
            activities = [ProfilerActivity.CPU]
            if state.device.type == "cuda":
                torch.cuda.memory._record_memory_history()
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()

    def after_step(self, state: TrainState, item: StepItem) -> None:
        """Finish after the last step."""
        if self.profiler is not None and state.step > self.last_step:
            self.finish(state)

    def end(self, state: TrainState, reason: Reason) -> None:
        """Finish if the run ends or is preempted while it is profiled."""
        if self.profiler is not None:
            self.finish(state)

    def finish(self, state: TrainState) -> None:
        """Write the trace of the steps so far."""
        assert self.profiler is not None
        self.profiler.stop()
        trace = self.folder / f"steps-{self.first_step}-{state.step - 1}.json.gz"
        self.profiler.export_chrome_trace(str(trace))
        self.profiler = None
        info(f"profile   {trace}")
        self.snapshot(trace.with_suffix("").with_suffix(".pickle"), state)

    def on_exception(self, state: TrainState, error: BaseException) -> None:
        """Write a snapshot of the memory if a profiled step runs out of it."""
        if self.profiler is not None and isinstance(error, torch.OutOfMemoryError):
            self.snapshot(self.folder / "out-of-memory.pickle", state)

    def snapshot(self, path: Path, state: TrainState) -> None:
        """Write the allocations on a GPU, and stop recording them."""
        if state.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            info(f"profile   {path}")
