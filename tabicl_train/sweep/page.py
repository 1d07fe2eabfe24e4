"""The page of a sweep: one self-contained HTML file, also while the sweep is running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from tabicl_train.report.page import fill
from tabicl_train.run_dir.records import Records
from tabicl_train.sweep.axes import parameter_axes
from tabicl_train.sweep.figures import draw_learning_curves, draw_parallel_coordinates, draw_parameters
from tabicl_train.sweep.ranking import (
    best_job,
    command_lines,
    explanation,
    other_rows,
    ranked_rows,
    summary,
    value_of,
    value_text,
)
from tabicl_train.sweep.results import Sweep

TEMPLATE = Path(__file__).with_name("sweep.html.j2")
TOP = 20  # rows of the ranking that are shown at once
MANY = 12  # values of a parameter that are listed one by one


def write_page(sweep: Sweep, output: Path) -> None:
    """Replace the page; a full disk gives a warning. Needs matplotlib and jinja2, see `require_matplotlib`."""
    Records(output.parent).replace(output.name, fill(TEMPLATE, sweep=sweep, **contents(sweep)))


def contents(sweep: Sweep) -> dict[str, Any]:
    """The variables of the template; None stands for what there is not, or not yet."""
    ranked, best = ranked_rows(sweep), best_job(sweep)
    return {
        "summary": summary(sweep),
        "varied": varied(sweep),
        "labels": labels(sweep),
        "ranking": frame(ranked[:TOP], "rank"),
        "rest": frame(ranked[TOP:], "rank"),
        "explanation": explanation(ranked) if ranked else None,
        "best": best and (best, *command_lines(best)),
        "parallel": draw_parallel_coordinates(sweep),
        "parameters": draw_parameters(sweep),
        "curves": draw_learning_curves(sweep),
        "others": frame(other_rows(sweep), "job"),
        "jobs": jobs(sweep),
    }


def frame(rows: list[dict[str, str]], index: str) -> pd.DataFrame | None:
    return pd.DataFrame(rows).set_index(index) if rows else None


def varied(sweep: Sweep) -> pd.DataFrame | None:
    """The values of each parameter that has several, and the seeds."""
    rows = {}
    for axis in parameter_axes(sweep):
        texts = [value_text(value) for value in axis.values]
        many = f"{len(texts)} values from {texts[0]} to {texts[-1]}" if axis.is_numeric else f"{len(texts)} values"
        rows[axis.key] = ", ".join(texts) if len(texts) <= MANY else many
    seeds = sorted({job.seed for job in sweep.jobs if job.seed is not None})
    if len(seeds) > 1:
        rows["seed"] = ", ".join(map(str, seeds))
    if not rows:
        return None
    return pd.DataFrame({"values": rows.values()}, index=pd.Index(rows, name="parameter"))


def labels(sweep: Sweep) -> pd.DataFrame | None:
    """The settings behind the values of parameters that stand for several settings."""
    space = sweep.settings.get("space") or {}
    rows = {
        f"{key}={label}": " ".join(settings)
        for key, entry in space.items()
        if isinstance(entry, dict) and key in sweep.parameters
        for label, settings in entry.items()
        if isinstance(settings, list)
    }
    return pd.DataFrame({"settings": rows.values()}, index=pd.Index(rows, name="value")) if rows else None


def jobs(sweep: Sweep) -> pd.DataFrame | None:
    """A row per job."""
    rows = [
        {
            "job": job.name,
            **{key: value_text(value_of(job, key)) for key in sweep.parameters},
            "seed": job.seed,
            "status": job.status,
            sweep.metric: job.value,
            "steps": job.steps,
            "minutes": None if job.seconds is None else job.seconds / 60,
        }
        for job in sweep.jobs
    ]
    return pd.DataFrame(rows).set_index("job") if rows else None
