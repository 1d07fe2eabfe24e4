"""Folders of sweeps that never ran, with results that are known in closed form."""

import itertools
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from tabicl_train.callbacks.validation import COLUMNS
from tabicl_train.run_dir.records import Records

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = ["experiment=smoke", "validation.every=5", "trainer.accelerator=cpu"]


def begin(folder: Path, metric: str = "loss", name: str = "invented", **settings) -> None:
    """sweep.yaml, and the line of a new call."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"name": name, "metric": metric, **settings}))
    Records(folder).append_line("jobs.jsonl", {"event": "sweep", "time": START.isoformat()})


def plan(folder: Path, job: str, params: dict, seed: int = 0, overrides: list[str] | None = None) -> None:
    if overrides is None:
        overrides = [*SETTINGS, *(f"{key}={value}" for key, value in params.items()), f"seed={seed}"]
    line = {"event": "planned", "job": job, "trial": 0, "params": params, "seed": seed, "overrides": overrides}
    Records(folder).append_line("jobs.jsonl", line)


def start(folder: Path, job: str, after: float = 0.0) -> None:
    (folder / job).mkdir(exist_ok=True)
    time = (START + timedelta(seconds=after)).isoformat()
    Records(folder).append_line("jobs.jsonl", {"event": "started", "job": job, "time": time})


def end(folder: Path, job: str, status: str = "finished", reason: str = "", after: float = 60.0) -> None:
    time = (START + timedelta(seconds=after)).isoformat()
    line = {"event": "ended", "job": job, "status": status, "reason": reason, "time": time}
    Records(folder).append_line("jobs.jsonl", line)


def write_run(run: Path, values: dict[int, float], metric: str = "loss", status: str = "finished") -> None:
    """The files of a run whose metric has these values by step."""
    run.mkdir(exist_ok=True)
    records = Records(run)
    rows = [{"step": step, "stage": "one", "loss": value} for step, value in values.items()]
    if metric != "loss":
        kind, score = metric.split("/")
        blank = dict.fromkeys(COLUMNS) | {"data": "synthetic" if kind == "synthetic" else "iris", "rows": 100}
        rows = [blank | {"step": step, score: value} for step, value in values.items()]
    if rows:
        records.append_rows("metrics.csv" if metric == "loss" else "validation.csv", *rows)
    records.replace("status.json", json.dumps({"status": status, "step": max(values, default=0)}))


def job(folder: Path, name: str, params: dict, value: float, seed: int = 0, metric: str = "loss", **ending) -> None:
    """A job that was planned, ran for 100 steps and ended with this value, or with what `ending` says."""
    plan(folder, name, params, seed)
    start(folder, name)
    write_run(folder / name, {100: value}, metric)
    end(folder, name, **ending)


def grid(folder: Path, params: dict[str, list], seeds: int, quality: Callable[..., float], metric: str, **settings):
    """A finished grid with curves: `quality` is the value after many steps, to which seeds add up to 0.005."""
    begin(folder, metric, method="grid", seeds=list(range(seeds)), **settings)
    for i, combination in enumerate(itertools.product(*params.values())):
        point = dict(zip(params, combination, strict=True))
        for seed in range(seeds):
            noise = 0.005 * math.sin(17 * i + 5 * seed)
            name = f"{i}-seed{seed}"
            plan(folder, name, point, seed)
            start(folder, name)
            far = 1.0 if metric.endswith("loss") else -0.4
            curve = {s: quality(**point) + noise + far * math.exp(-s / 150) for s in range(50, 1001, 50)}
            write_run(folder / name, curve, metric)
            end(folder, name)
