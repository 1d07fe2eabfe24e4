"""sweep.yaml: the settings of a sweep. jobs.jsonl: what was planned, started and ended in a sweep, one event per line.

sweep     a call begins; the lines of its plan follow
planned   job, trial (number of its point), params, seed, overrides
started   job
ended     job, status (finished, failed, pruned or interrupted), reason
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from tabicl_train.config.sweep import EVENTS, SETTINGS, SweepConfig
from tabicl_train.run_dir.records import Records
from tabicl_train.sweep.plan import Job


class SweepFailed(Exception):
    """A sweep that cannot go on; its jobs have saved, and the same command continues it."""


class Journal:
    """check: called before each write; raises if another process has taken over the sweep"""

    def __init__(self, folder: Path, check: Callable[[], None]) -> None:
        self.records = Records(folder, check)
        self.ends: dict[str, dict] = {}  # the last event of each job that has ended and not started again
        self.plan: list[dict] = []  # the planned events of the latest call
        for event in self.records.lines(EVENTS):
            if event["event"] == "sweep":
                self.plan = []
            elif event["event"] == "planned":
                self.plan.append(event)
            elif event["event"] == "ended":
                self.ends[event["job"]] = event
            elif event["event"] == "started":
                self.ends.pop(event["job"], None)

    def write_settings(self, sweep: SweepConfig) -> None:
        self.records.replace(SETTINGS, yaml.safe_dump(dataclasses.asdict(sweep), sort_keys=False))
        self.check_written(SETTINGS)

    def begin(self, jobs: list[tuple[Job, int]]) -> None:
        """A call with these jobs, and the numbers of their trials; nothing is written if they were planned before."""
        plan = list({job.name: plan_event(job, trial) for job, trial in jobs}.values())
        if plan != self.plan or not plan:
            for event in [{"event": "sweep", "time": now()}, *plan]:
                self.write(event)

    def planned(self, job: Job, trial: int) -> None:
        self.write(plan_event(job, trial))

    def started(self, job: Job) -> None:
        self.ends.pop(job.name, None)
        self.write({"event": "started", "job": job.name, "time": now()})

    def ended(self, job: Job, status: str, reason: str = "") -> None:
        event = {"event": "ended", "job": job.name, "status": status, "reason": reason, "time": now()}
        self.ends[job.name] = event
        self.write(event)

    def status(self, job: Job) -> str | None:
        """How the job ended; None if it has not, or has started again."""
        return self.ends[job.name]["status"] if job.name in self.ends else None

    def write(self, event: dict) -> None:
        self.records.append_line(EVENTS, event)
        self.check_written(EVENTS)

    def check_written(self, name: str) -> None:
        if name in self.records.failing:
            raise SweepFailed(f"{self.records.folder / name} cannot be written; the same command continues the sweep")


def plan_event(job: Job, trial: int) -> dict:
    what = {"job": job.name, "trial": trial, "params": job.params, "seed": job.seed, "overrides": job.overrides}
    return {"event": "planned", **what}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
