"""What the jobs of a sweep have achieved, read from its folder, and results.csv.

sweep.yaml   the sweep: its name, metric, method, ...
jobs.jsonl   an event per line: `sweep` when a call begins, `planned` for each job of that call, `started`, `ended`
JOB/         the folder of each run
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from tabicl_train.config.sweep import EVENTS, SETTINGS
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.records import Records, csv_text
from tabicl_train.run_dir.status import read_status
from tabicl_train.sweep.metric import METRICS, curve

RESULTS = "results.csv"
STATUSES = ("finished", "running", "planned", "interrupted", "killed", "pruned", "failed")
OF_RUN = {"running": "running", "finished": "finished", "failed": "failed", "preempted": "interrupted"}


@dataclass
class Job:
    """A run of a sweep.

    params: values of what the sweep varies, apart from the seed
    overrides: the arguments of tabicl-train, without run_dir
    status: one of STATUSES; running: its process may still be starting; killed: it is gone, and nobody noted its end
    curve, value: the metric by steps, and its last value; None before there is one
    steps, seconds: optimizer steps done, and the time they took as far as it is known
    """

    name: str
    folder: Path
    params: dict[str, Any]
    seed: int | None
    overrides: list[str]
    status: str
    reason: str
    curve: list[tuple[int, float]]
    steps: int
    seconds: float | None

    @property
    def value(self) -> float | None:
        return self.curve[-1][1] if self.curve else None

    @property
    def has_finite_value(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


@dataclass
class Sweep:
    """settings: the content of sweep.yaml; jobs: those of the latest call, in the order of its plan"""

    folder: Path
    name: str
    metric: str
    settings: dict[str, Any]
    jobs: list[Job]

    @property
    def parameters(self) -> list[str]:
        """What was varied."""
        return list(dict.fromkeys(key for job in self.jobs for key in job.params))


def read_sweep(folder: Path) -> Sweep:
    """The present state of a sweep, which may be running; raises ConfigError if there is none in the folder."""
    try:
        settings = yaml.safe_load((folder / SETTINGS).read_text())
    except (OSError, yaml.YAMLError):
        settings = None
    if not isinstance(settings, dict) or settings.get("metric") not in METRICS:
        raise ConfigError([f"{folder}: there is no sweep in it"])
    events = Records(folder).lines(EVENTS)
    begin = max((i for i, event in enumerate(events) if event["event"] == "sweep"), default=0)
    plan = {event["job"]: event for event in events[begin:] if event["event"] == "planned"}
    history: dict[str, list[dict]] = {name: [] for name in plan}
    for event in events:
        if event["event"] in ("started", "ended") and event["job"] in plan:
            history[event["job"]].append(event)
    is_watched = owner_is_alive(folder)
    metric = settings["metric"]
    jobs = [read_job(folder / name, planned, history[name], metric, is_watched) for name, planned in plan.items()]
    return Sweep(folder, str(settings.get("name") or folder.resolve().name), metric, settings, jobs)


def read_job(folder: Path, planned: dict, history: list[dict], metric: str, is_watched: bool) -> Job:
    """history: its started and ended events; is_watched: whether the process that runs the sweep is alive"""
    run = read_status(folder) or {}
    status, reason = "planned", ""
    if history and history[-1]["event"] == "ended":
        status, reason = history[-1]["status"], history[-1].get("reason") or ""
    elif history:
        # While a job starts again, its status.json is still that of the previous start.
        status = "running" if is_watched else OF_RUN.get(run.get("status", ""), "killed")
    return Job(
        planned["job"],
        folder,
        planned["params"],
        planned["seed"],
        planned["overrides"],
        status,
        reason,
        curve(folder, metric) if history else [],
        run.get("step", 0) if history else 0,
        seconds_of(history, run.get("time")),
    )


def seconds_of(history: list[dict], heartbeat: str | None) -> float | None:
    """Sum over the starts of a job: up to its end, or for the last one, which may not have ended, to its heartbeat."""
    total, started = None, None
    for event in [*history, *([{"event": "ended", "time": heartbeat}] if heartbeat else [])]:
        # Times of this machine may lack the time zone.
        time = datetime.fromisoformat(event["time"]).astimezone()
        if event["event"] == "started":
            started = time
        elif started is not None:
            total, started = (total or 0.0) + max(0.0, (time - started).total_seconds()), None
    return total


def write_csv(sweep: Sweep) -> None:
    """Replace results.csv: a row per job in the order of the plan, with the value so far if it has not finished."""
    header = ["job", *sweep.parameters, "seed", "status", sweep.metric, "steps", "seconds", "reason"]
    rows = [
        [
            *(job.name, *map(job.params.get, sweep.parameters), job.seed, job.status, job.value, job.steps),
            *("" if job.seconds is None else round(job.seconds, 1), job.reason),
        ]
        for job in sweep.jobs
    ]
    Records(sweep.folder).replace(RESULTS, csv_text([header, *rows]))
