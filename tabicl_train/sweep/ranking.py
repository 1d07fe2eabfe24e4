"""The jobs of a sweep compared: seeds grouped, ranked, and shown as a table."""

from __future__ import annotations

import collections
import json
import math
import re
import shlex
import statistics
from dataclasses import dataclass
from typing import Any

from scipy import stats

from tabicl_train.console import counted
from tabicl_train.sweep.metric import METRICS, is_better_lower
from tabicl_train.sweep.results import STATUSES, Job, Sweep

CONFIDENCE = 0.95
INTERVAL = f"{CONFIDENCE:.0%} interval"
BROKEN = ("failed", "pruned")  # these have ended without a result


@dataclass
class Point:
    """The jobs with equal parameters, which differ in their seeds.

    mean, interval: of the finite values of its finished jobs, one per seed; nan without any, and an interval needs two
    is_whole: none of its jobs failed, was pruned or ended with a value that is not finite
    """

    params: dict[str, Any]
    jobs: list[Job]

    def __post_init__(self) -> None:
        finished = {job.seed: job.value for job in self.jobs if job.status == "finished" and job.value is not None}
        self.values = [value for value in finished.values() if math.isfinite(value)]
        self.has_result = bool(finished)
        self.is_whole = len(self.values) == len(finished) and not any(job.status in BROKEN for job in self.jobs)
        self.mean = statistics.fmean(self.values) if self.values else math.nan
        self.interval = interval(self.values)


def interval(values: list[float]) -> tuple[float, float] | None:
    """The t interval of the mean of independent values; None for a single one."""
    if len(values) < 2:
        return None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def rank(sweep: Sweep) -> list[Point]:
    """The points, best first. Those with a failed, pruned or diverged seed follow after the others, then those without
    a finite result, then those without any."""
    jobs: dict[str, list[Job]] = collections.defaultdict(list)
    for job in sweep.jobs:
        numbers = {key: float(value) if type(value) is int else value for key, value in job.params.items()}
        jobs[json.dumps(numbers, sort_keys=True)].append(job)
    sign = 1 if is_better_lower(sweep.metric) else -1

    def order(point: Point) -> tuple:
        is_finite = math.isfinite(point.mean)
        return not point.has_result, not is_finite, not point.is_whole, sign * point.mean if is_finite else 0.0

    return sorted((Point(group[0].params, group) for group in jobs.values()), key=order)


def best_job(sweep: Sweep) -> Job | None:
    """The best run of the best point; None before there is any result."""
    point = next(iter(rank(sweep)), None)
    if point is None or not point.values:
        return None
    better = min if is_better_lower(sweep.metric) else max
    best = better(point.values)
    return next(job for job in point.jobs if job.status == "finished" and job.value == best)


def command_lines(job: Job) -> tuple[str, str]:
    """The command that trains this run again or continues it, and the one that exports it, as typed into a shell."""
    train = ["tabicl-train", *job.overrides, f"run_dir={hydra_text(str(job.folder))}"]
    export = ["tabicl-export", f"checkpoint={job.folder}", f"output={job.folder}/model", "format=hub"]
    return shlex.join(train), shlex.join(export)


def hydra_text(text: str) -> str:
    """A text as Hydra's grammar reads it back, in quotes where needed: 'lr=0.1,width=2' would be several values."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)  # backslashes count as such, except before quotes and at the end
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def short_names(keys: list[str]) -> dict[str, str]:
    """For each dotted key, the shortest end that no other has: lr for curriculum.stages.a.lr."""

    def ends(key: str) -> list[str]:
        parts = key.split(".")
        return [".".join(parts[i:]) for i in reversed(range(len(parts)))]

    counts = collections.Counter(end for key in keys for end in ends(key))
    return {key: next((end for end in ends(key) if counts[end] == 1), key) for key in keys}


def value_of(job: Job | Point, key: str) -> Any:
    """A parameter's value; a search may leave out a parameter that does not matter with the values of others."""
    return job.params.get(key, "-")


def value_text(value: Any) -> str:
    """A parameter's value as it is shown: 0.001 rather than 0.0010000000000000002."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def status_counts(jobs: list[Job]) -> str:
    """For example: 4 finished, 1 running, 1 failed"""
    counts = collections.Counter(job.status for job in jobs)
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def ranked_rows(sweep: Sweep) -> list[dict[str, str]]:
    """The points with a result as rows of text, best first; equal ones share a rank."""
    names = short_names(sweep.parameters)
    rows: list[dict[str, str]] = []
    points = [point for point in rank(sweep) if point.has_result]
    for i, point in enumerate(points):
        is_tie = i > 0 and (point.mean, point.is_whole) == (points[i - 1].mean, points[i - 1].is_whole)
        row = {"rank": rows[-1]["rank"] if is_tie else str(i + 1)}
        row |= {names[key]: value_text(value_of(point, key)) for key in names}
        row[sweep.metric] = f"{point.mean:.4f}"
        if any(point.interval for point in points):
            row[INTERVAL] = "[{:.4f}, {:.4f}]".format(*point.interval) if point.interval else "-"
        steps = [f"{job.steps:,}" for job in point.jobs if job.status == "finished"]
        row |= {"seeds": str(len(point.values)), "steps": " ".join(dict.fromkeys(steps))}
        row["status"] = status_counts(point.jobs) if len(point.jobs) > 1 else point.jobs[0].status
        rows.append(row)
    return rows


def explanation(rows: list[dict[str, str]]) -> str:
    """What the columns of the ranked rows mean."""
    words = "Rows with a failed, pruned or diverged seed come after the others."
    if INTERVAL not in rows[0]:
        return f"Each row is one seed, so there is no interval. {words}"
    return f"Means over the seeds that finished, and the {CONFIDENCE:.0%} t intervals of these means. {words}"


def other_rows(sweep: Sweep) -> list[dict[str, str]]:
    """The jobs that have started and not finished, or finished without a value, as rows of text."""
    return [
        {
            "job": job.name,
            "status": job.status,
            f"{sweep.metric} so far": "-" if job.value is None else f"{job.value:.4f}",
            "steps": f"{job.steps:,}",
            "reason": job.reason,
        }
        for status in STATUSES
        for job in sweep.jobs
        if job.status == status != "planned" and not (status == "finished" and job.curve)
    ]


def summary(sweep: Sweep) -> str:
    direction = "lower" if is_better_lower(sweep.metric) else "higher"
    jobs = f"{counted(len(sweep.jobs), 'job')}: {status_counts(sweep.jobs) or 'none planned yet'}"
    return f"{jobs}. Metric: {sweep.metric}, the {METRICS[sweep.metric]} ({direction} is better)."


def table(sweep: Sweep) -> str:
    """What a person wants to know of a sweep at its end, or meanwhile."""
    parts = [f"{sweep.name}: {summary(sweep)}"]
    if ranked := ranked_rows(sweep):
        parts += [aligned(ranked), explanation(ranked)]
    if others := other_rows(sweep):
        parts.append(aligned(others))
    if best := best_job(sweep):
        train, export = command_lines(best)
        parts.append(f"best run: {best.name} ({best.value:.4f})\n  {train}\nexport it with\n  {export}")
    return "\n\n".join(parts)


def aligned(rows: list[dict[str, str]]) -> str:
    """Rows with equal keys, as columns below their names."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
