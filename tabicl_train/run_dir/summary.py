"""Summaries of runs: the table of `tabicl-runs`, and what a run prints at its end."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import yaml

from tabicl_train.console import text_table
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.curves import curve, training_loss
from tabicl_train.run_dir.status import STATUS, read_status

SCORES = {"real/roc_auc": "ROC AUC", "real/r2": "R2", "own/loss": "own loss", "synthetic/loss": "validation loss"}
SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def runs_table(folder: Path) -> str:
    """List the runs in a folder and its subfolders, newest first; raises ConfigError if there is none."""
    found = [(read_status(run) or {}, run) for run in find_runs(folder)]
    if not found:
        raise ConfigError([f"{folder}: there is no run; tabicl-train experiment=demo run_dir={folder}/demo starts one"])
    rows = []
    for values, run in sorted(found, key=lambda pair: last_change(pair[0]), reverse=True):
        step, total = values.get("step", 0), total_steps(run)
        loss, changed = training_loss(run), last_change(values)
        rows.append((
            run, values.get("status", "unknown"), f"{step:,}" + (f"/{total:,}" if total else ""),
            "-" if loss is None else f"{loss:.3f}", score(run) or "-", age(time.time() - changed) if changed else "-",
        ))  # fmt: skip
    return text_table(("run", "status", "step", "loss", "score", "age"), rows)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, also those of sweeps, without descending into them."""
    for place, folders, names in os.walk(folder):
        folders[:] = [] if STATUS in names else [name for name in folders if not name.startswith(".")]
        if STATUS in names:
            yield Path(place)


def last_change(values: dict) -> float:
    """Return the time of a status in seconds since 1970, or 0."""
    try:
        return datetime.strptime(values["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, ValueError):
        return 0.0


def age(seconds: float) -> str:
    name, unit = next((name, unit) for name, unit in SECONDS.items() if seconds >= unit or unit == 1)
    return f"{max(seconds, 0) / unit:.0f} {name}"


def total_steps(run_dir: Path) -> int | None:
    """Return the steps of a run by its configuration; None if it has not begun."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        steps = sum(stage["steps"] for stage in config["curriculum"]["stages"].values())
        return min(steps, config["trainer"]["max_steps"] or steps)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def score(run_dir: Path) -> str | None:
    """Format the mean of the last validation, on real data if possible, otherwise on tables like those of training."""
    for metric, name in SCORES.items():
        values = curve(run_dir, metric)
        if values and math.isfinite(values[-1][1]):
            return f"{name} {values[-1][1]:.3f}"
    return None


def result(run_dir: Path) -> str:
    """Format the loss and the score of a run; "" if it has none yet."""
    loss = training_loss(run_dir)
    return ", ".join(filter(None, [None if loss is None else f"loss {loss:.3f}", score(run_dir)]))


def end_lines(run_dir: Path, has_estimators: bool) -> list[str]:
    """Return the last lines of a finished run: its scores, its files, and the next command."""
    then = ["tabicl-evaluate", f"checkpoint={run_dir}"] if has_estimators else ["tabicl-report", f"run_dir={run_dir}"]
    return [
        f"result    {result(run_dir)}",
        f"files     {run_dir}, with the weights in {run_dir / 'checkpoints'}",
        f"next      {shlex.join(then)}",
    ]
