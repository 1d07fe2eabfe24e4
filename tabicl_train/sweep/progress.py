"""The progress line of a sweep."""

from __future__ import annotations

import sys
import time
from functools import cache, partial

from tqdm import tqdm

from tabicl_train.console import tell
from tabicl_train.planning.run_plan import expected_work
from tabicl_train.run_dir.status import read_status
from tabicl_train.sweep.controller import Controller
from tabicl_train.sweep.plan import Job

EVERY = 2.0  # seconds between updates
PLAIN_LINE_EVERY = 30.0  # seconds between lines where the output is not a terminal


class Progress:
    """A bar on a terminal, elsewhere a plain line every half minute. Work is counted in FLOPs."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.started = self.updated = self.last_line = time.monotonic()
        self.first_share = self.share()
        layout = "{percentage:3.0f}%|{bar}| [{elapsed}{postfix}]"
        self.bar = tqdm(total=1.0, dynamic_ncols=True, bar_format=layout) if sys.stderr.isatty() else None
        if self.bar is not None:
            controller.tell = partial(tqdm.write, file=sys.stderr)  # above the bar

    def share(self) -> float:
        """The share of the work that is done; a search's points to come count as the mean of those known."""
        jobs = self.controller.jobs.values()
        total = sum(map(self.work, jobs))
        done = sum(self.work(job) * self.share_of(job) for job in jobs)
        sweep = self.controller.plan.sweep
        if self.controller.plan.points is None and jobs:
            total *= max(1.0, sweep.trials * len(sweep.seeds) / len(jobs))
        return done / total if total else 0.0

    @cache  # noqa: B019  of one object for each sweep
    def work(self, job: Job) -> float:
        stages = job.config.curriculum.stages.values() if job.config is not None else ()
        return sum(expected_work(job.config, stage, sample=1)[1] for stage in stages)

    def share_of(self, job: Job) -> float:
        if self.controller.is_done(job):
            return 1.0
        if job.name not in self.controller.running and job.name not in self.controller.stalls:
            return 0.0
        status = read_status(job.folder) or {}
        return status.get("step", 0) / job.config.total_steps if job.config is not None else 0.0

    def show(self, best: str) -> None:
        """best: the best point so far, in words"""
        now = time.monotonic()
        if now - self.updated < EVERY:
            return
        self.updated = now
        if self.bar is None and now - self.last_line < PLAIN_LINE_EVERY:
            return
        self.last_line = now
        share = self.share()
        text = f"{self.counts()}, {self.time_left(share, now)} left" + (f", best {best}" if best else "")
        if self.bar is None:
            tell(f"sweep     {text}")
        else:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(share - self.bar.n)

    def counts(self) -> str:
        jobs = self.controller.jobs.values()
        done = [self.controller.journal.status(job) for job in jobs if self.controller.is_done(job)]
        text = f"{len(done)}/{len(jobs)} jobs done, {len(self.controller.running)} running"
        return text + "".join(f", {done.count(s)} {s}" for s in ("failed", "pruned") if s in done)

    def time_left(self, share: float, now: float) -> str:
        if share <= self.first_share:
            return "?"
        return tqdm.format_interval((now - self.started) * (1 - share) / (share - self.first_share))

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
