"""Summaries of runs: the table of `tabicl-runs`, and what a run prints at its end."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tabicl_train.console import first_line, info, text_table
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError
from tabicl_train.run.curves import curve, training_loss
from tabicl_train.run.records import CONFIG, Records
from tabicl_train.run.status import STATUS, read_status

SCORES = {"real/roc_auc": "ROC AUC", "real/r2": "R2", "own/loss": "own loss", "synthetic/loss": "validation loss"}
DAMAGED = "damaged"  # status of a run whose files cannot be read
SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def runs_table(folder: Path) -> str:
    """List the runs in a folder and its subfolders, newest first; raises ConfigError if there is none."""
    rows = []  # (time of the last change, cells)
    for run in find_runs(folder):
        changed = 0.0
        try:
            status = read_status(run)
            changed = last_change(status)
            rows.append((changed, [run, *columns_of(run, status)]))
        except Exception as error:  # files of other programs, or edited by hand, may hold anything
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {first_line(error)}"
            info(f"warning   {run} cannot be read: {reason}")
            rows.append((changed, [run, DAMAGED, "-", "-", "-", "-"]))
    if not rows:
        raise ConfigError([f"{folder}: there is no run; tabicl-train experiment=demo run_dir={folder}/demo starts one"])
    rows.sort(key=lambda row: row[0], reverse=True)
    return text_table(("run", "status", "step", "loss", "score", "age"), [cells for _, cells in rows])


def columns_of(run: Path, status: dict | None) -> list[str]:
    """Return the columns of `runs_table` after the first one; warns if the status or the configuration is damaged."""
    # The status, and the steps done of all steps.
    if status is None:
        info(f"warning   {run / STATUS} is not the status of a run")
        name = DAMAGED
        step = "-"
    else:
        name = status["status"]
        step = f"{status['step']:,}"
        try:
            total = steps_of_run(run)
            if total:
                step += f"/{total:,}"
        except ConfigError as error:
            info(f"warning   {error}")
            step += "/?"

    # Loss, score and age, each "-" if unknown.
    loss = training_loss(run)
    changed = last_change(status)
    return [
        name,
        step,
        "-" if loss is None else f"{loss:.3f}",
        score_in_words(run) or "-",
        age_in_words(time.time() - changed) if changed else "-",
    ]


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories in a folder, also those of sweeps, without descending into them."""
    for place, folders, names in os.walk(folder):  # it descends into what is left in `folders`
        if STATUS in names:
            folders.clear()
            yield Path(place)
        else:
            folders[:] = [name for name in folders if not name.startswith(".")]


def last_change(status: dict | None) -> float:
    """Return the time of a status in seconds since 1970, or 0."""
    try:
        return datetime.strptime((status or {})["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def age_in_words(seconds: float) -> str:
    """Format a time in the largest unit that it fills at least once: 90 minutes are 2 h."""
    for name, unit in SECONDS.items():
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"


def steps_of_run(run_dir: Path) -> int | None:
    """Return the number of steps of a run from its configuration; None if the run has none yet.

    Raises ConfigError if the configuration is damaged.
    """
    records = Records(run_dir)
    config = records.config()
    if config is None:
        return None
    try:
        steps = sum(stage["steps"] for stage in config["curriculum"]["stages"].values())
        return min(steps, config["trainer"]["max_steps"] or steps)
    except (AttributeError, KeyError, TypeError):
        raise ConfigError([f"{records.folder / CONFIG} is not the configuration of a run"]) from None


def score_in_words(run_dir: Path) -> str | None:
    """Format the mean of the last validation, on real data if possible, otherwise on tables like those of training."""
    for metric, name in SCORES.items():
        validations = curve(run_dir, metric)
        if validations:
            _, last = validations[-1]
            if math.isfinite(last):
                return f"{name} {last:.3f}"
    return None


def result_in_words(run_dir: Path) -> str:
    """Format the loss and the score of a run; "" if it has none yet."""
    texts = []
    loss = training_loss(run_dir)
    if loss is not None:
        texts.append(f"loss {loss:.3f}")
    last_score = score_in_words(run_dir)
    if last_score is not None:
        texts.append(last_score)
    return ", ".join(texts)


def end_lines(run_dir: Path, has_estimators: bool) -> list[str]:
    """Return the last lines of a finished run: its scores, its files, and the next command."""
    if has_estimators:
        next_command = ["tabicl-evaluate", f"checkpoint={run_dir}"]
    else:
        next_command = ["tabicl-report", f"run_dir={run_dir}"]
    next_command += plugins.arguments(hashes=False)
    return [
        f"result    {result_in_words(run_dir)}",
        f"files     {run_dir}, with the weights in {run_dir / 'checkpoints'}",
        f"next      {shlex.join(next_command)}",
    ]
