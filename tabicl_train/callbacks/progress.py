"""The progress line of a run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from tqdm import tqdm

from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.console import info

PLAIN_LINE_EVERY = 10.0  # seconds between progress lines where the output is not a terminal


class Progress:
    """A bar on a terminal; elsewhere a plain line every ten seconds, so that logs stay readable.

    total: optimizer steps of the run
    flops: the expected FLOPs of a stage; a step of a later stage takes longer, so the remaining work is counted in them
    """

    def __init__(self, curriculum: CurriculumConfig, total: int, flops: Callable[[StageConfig], float]) -> None:
        self.curriculum, self.total, self.flops = curriculum, total, flops
        self.smooth = math.nan

    def start(self, step: int) -> None:
        stages = self.curriculum.stages.items()
        self.step_flops = {name: self.flops(stage) / stage.steps for name, stage in stages}
        self.started = self.last_line = time.perf_counter()
        self.first_work = self.work(step)
        layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=step, unit="step", dynamic_ncols=True, bar_format=layout)

    def work(self, step: int, until_stage: str | None = None) -> float:
        """Expected FLOPs of the run up to a step, or to the end of a stage if that comes first."""
        work = 0.0
        for name, stage in self.curriculum.stages.items():
            work += min(step, stage.steps) * self.step_flops[name]
            step -= min(step, stage.steps)
            if name == until_stage:
                break
        return work

    def time_left(self, row: dict) -> str:
        """Time left of the run, and of the current stage unless it is the last one."""
        done = self.work(row["step"])
        pace = (time.perf_counter() - self.started) / (done - self.first_work)
        run, stage = self.work(self.total) - done, self.work(self.total, row["stage"]) - done
        text = f"{tqdm.format_interval(pace * run)} left"
        return text if stage >= run else f"{text} ({tqdm.format_interval(pace * stage)} of {row['stage']})"

    def show(self, row: dict) -> None:
        # Single steps are noisy, as their tables may be easy or hard: half of the weight is on the last 7 rows.
        if not math.isfinite(self.smooth):
            self.smooth = row["loss"]
        elif math.isfinite(row["loss"]):
            self.smooth = 0.9 * self.smooth + 0.1 * row["loss"]
        text = f"loss {self.smooth:.3f}, {row['tables_per_s']:.0f} tables/s, data wait {row['data_wait']:.1%}"
        text += f", {row['memory_gb']:.1f} GB, {self.time_left(row)}"
        if self.bar is not None:
            self.bar.set_postfix_str(f"{row['stage']}, {text}", refresh=False)
            self.bar.update(row["step"] - self.bar.n)
        elif time.perf_counter() - self.last_line >= PLAIN_LINE_EVERY or row["step"] == self.total:
            self.last_line = time.perf_counter()
            info(f"{row['stage']} step {row['step']}/{self.total}: {text}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
