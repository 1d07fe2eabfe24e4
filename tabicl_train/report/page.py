"""The report: one self-contained HTML page about one or several runs.

The files of the runs are turned into data frames and figures for the sections; None stands for missing files. The
template page.html.j2 holds the text. `fill` also makes the pages of sweeps and of the lab.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
import math
import numbers
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import OWN, PROBES, REAL, REAL_SCORES, SYNTHETIC, RunConfig, flatten, judged_by, kind_of
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import FORMATS, add_elo, judged, standing, summarize
from tabicl_train.model.config import settings_of
from tabicl_train.outputs import check_output, existing_problems, input_problems, write_atomically
from tabicl_train.report.figures import (
    draw_attention,
    draw_gates,
    draw_multipliers,
    draw_optimization,
    draw_scores,
    draw_standing,
    draw_throughput,
    draw_training,
    draw_validation,
    inside,
)
from tabicl_train.run_dir.curves import OUTSIDE
from tabicl_train.saved_run import SavedRun, holds_run

TEMPLATE = Path(__file__).with_name("page.html.j2")
MAX_INCIDENTS = 50  # shown; a run may have a thousand
STAGES = "curriculum.stages."
TABLES = ("metrics", "scaling", "validation", "evaluation")  # NAME.csv
RECORDS = (  # the files of a run that are read
    *("config.yaml", "status.json", "provenance.jsonl", "incidents.jsonl", "test.json", "entropy/entropy.csv"),
    *(f"{table}.csv" for table in TABLES),
)
PAGE = "report.html"  # in a run directory, where it belongs to the report and is replaced by every new one
RATES = {
    "tables_per_s": "tables/s",
    "cells_per_s": "cells/s",
    "tflops_per_s": "TFLOP/s",
    "data_wait": "share of time waiting for tables",
    "accept_rate": "share of draws accepted",
    "memory_gb": "memory, GB",
}


@dataclass
class Run:
    """The content of a run's files; None for a file that is missing or has no rows, [] for missing lines."""

    name: str
    folder: Path
    config: dict[str, Any] | None  # by dotted names
    status: dict | None
    starts: list[dict]  # from provenance.jsonl
    incidents: list[dict]
    metrics: pd.DataFrame | None
    scaling: pd.DataFrame | None
    validation: pd.DataFrame | None
    evaluation: pd.DataFrame | None
    attention: pd.DataFrame | None  # from entropy/entropy.csv, which tabicl-lab writes
    test: dict | None  # from test.json, the final test


def write_report(folders: list[Path], output: Path, overwrite: bool = False) -> None:
    """Write a page about runs; raises ConfigError for a folder without a run, and if it cannot be written."""
    # overwrite: replace a file that is there already
    problems = [f"run_dir is '{folder}'; there is no run in it" for folder in folders if not holds_run(folder)]
    if problems:
        raise ConfigError(problems)
    inputs = [("run_dir", folder / name) for folder in folders for name in RECORDS]
    if problems := input_problems("output", output, inputs) or existing_problems("output", output, overwrite):
        raise ConfigError(problems)
    check_output(output)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        parent = os.path.commonpath([folder.resolve() for folder in folders])
        names = [str(folder.resolve().relative_to(parent)) for folder in folders]  # full paths would fill the legends
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    mark_together(runs)
    with rc_context({"text.parse_math": False}):  # a run may be called $x
        page = fill(TEMPLATE, runs=runs, **sections(runs))
    try:
        write_atomically(output.resolve(), lambda file: file.write(page.encode()))
    except OSError as error:  # a full disk
        raise ConfigError([f"output is {str(output)!r}; it cannot be written ({error.strerror})"]) from None


def read_run(folder: Path, name: str) -> Run:
    saved = SavedRun(folder)
    settings = saved.settings
    return Run(
        name,
        folder,
        None if settings is None else flatten(settings),
        saved.status,
        saved.starts,
        saved.incidents,
        *(read_table(saved, f"{table}.csv") for table in TABLES),
        read_table(saved, "entropy/entropy.csv"),
        saved.test,
    )


def read_table(saved: SavedRun, name: str) -> pd.DataFrame | None:
    """Return a table of a run; None if it has no rows."""
    table = saved.table(name)
    return None if table.empty else table


def mark_together(runs: list[Run]) -> None:
    """Mark in all runs what lies outside the trained range of one of them, so that means are over the same data."""
    if len(runs) == 1:
        return
    for source in ("validation", "evaluation"):
        tables = tables_of(runs, source).values()
        outside = set[str]()
        for table in tables:
            if "trained_range" in table:
                # Of validations the last one counts: a stage that was added to a run widens its range.
                last = table[table["step"] == table["step"].max()] if source == "validation" else table
                outside |= set(last["data"][last["trained_range"] == OUTSIDE])
        for table in tables:
            marks = table["trained_range"] if "trained_range" in table else pd.Series("", table.index)
            is_public = table["data"].astype(str).map(kind_of).isin([REAL, PROBES])  # a task may be called 61
            table["trained_range"] = marks.astype(object).mask(is_public & table["data"].isin(outside), OUTSIDE)


def sections(runs: list[Run]) -> dict[str, Any]:
    """Return the variables of the template."""
    metrics = tables_of(runs, "metrics")
    return {
        "overview": overview(runs),
        "starts": starts(runs),
        "settings": settings(runs),
        "training": draw_training(metrics, tables_of(runs, "validation")) if metrics else None,
        "optimization": draw_optimization(metrics) if metrics else None,
        "multipliers": per_run(runs, lambda run: None if run.scaling is None else draw_multipliers(run.scaling)),
        "gates": per_run(runs, lambda run: None if run.scaling is None else draw_gates(run.scaling)),
        "attention": per_run(runs, lambda run: None if run.attention is None else draw_attention(run.attention)),
        "unmeasured": [run for run in runs if run.attention is None],
        "throughput": throughput(metrics) if metrics else None,
        "incidents": per_run(runs, incidents),
        "tests": [(run.name, run.test) for run in runs if run.test is not None],
        "validation": draw_validation(tables) if (tables := tables_of(runs, "validation")) else None,
        "validation_scores": per_run(runs, validation_scores),
        "outside": sets_outside(tables_of(runs, "validation")),
        "unevaluated": [run for run in runs if run.evaluation is None],
        "real_data": real_data(runs),
    }


def per_run(runs: list[Run], content: Callable[[Run], Any]) -> dict[str, Any]:
    return {run.name: content(run) for run in runs}


def tables_of(runs: list[Run], source: str) -> dict[str, pd.DataFrame]:
    """Return one of the data frames, by the names of the runs that have it."""
    return {run.name: getattr(run, source) for run in runs if getattr(run, source) is not None}


def overview(runs: list[Run]) -> pd.DataFrame:
    """Return a row per fact, a column per run."""
    facts = {run.name: facts_of(run) for run in runs}
    keys = list(dict.fromkeys(key for values in facts.values() for key in values))
    columns = {name: [values.get(key) for key in keys] for name, values in facts.items()}
    return pd.DataFrame(columns, keys, dtype=object)


def facts_of(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {"run directory": str(run.folder)}
    if run.status is not None:
        facts["status"] = ": ".join(filter(None, (run.status["status"], run.status.get("cause"))))
    if run.metrics is not None:
        late = run.metrics[run.metrics["step"] > 0.9 * run.metrics["step"].max()]
        facts["steps done"] = int(run.metrics["step"].iloc[-1])
        if (done := effort(run.metrics, run.config or {})) is not None:
            time_spent = datetime.timedelta(seconds=round(done[1]))
            facts |= {"tables seen": done[0], "training time": str(time_spent)}
        facts["mean loss, last 10% of the steps"] = late["loss"].mean()
        facts["skipped steps"] = int(run.metrics["skipped"].iloc[-1])
    facts["incidents"] = len(run.incidents)
    if run.validation is not None:
        facts |= {f"last validation: {name}": v.iloc[-1] for name, v in validation_means(run.validation).items()}
        if "is_best" in run.validation and (run.validation["is_best"] == 1).any():
            # Which weights the other commands take of the run: see run_dir/choice.py.
            facts["best weights by validation: step"] = int(
                run.validation["step"][run.validation["is_best"] == 1].iloc[-1]
            )
    if run.evaluation is not None:
        name, (counting, _) = REAL_SCORES[judged_by(run.evaluation)], counting_tasks(run.evaluation)
        scores = judged(counting)
        facts[f"mean {name} on {len(scores)} real tasks"] = scores.iloc[:, 0].mean()
    return facts


def effort(metrics: pd.DataFrame, config: dict[str, Any]) -> tuple[int, float] | None:
    """Tables of the logged steps, and the seconds they took; None without a configuration."""
    per_step = metrics["stage"].map(lambda stage: config.get(f"{STAGES}{stage}.tables", math.nan))
    tables = metrics["step"].diff().fillna(metrics["step"]) * per_step
    return None if tables.isna().any() else (int(tables.sum()), (tables / metrics["tables_per_s"]).sum())


def starts(runs: list[Run]) -> pd.DataFrame | None:
    """Return a row per start of a run."""
    rows = [
        {
            "run": run.name,
            "step": start["step"],
            "time": start["time"],
            "commit": (start["commit"] or "")[:12] + (" with changes" if start["diff"] else ""),
            "command": shlex.join([Path(start["command"][0]).name, *start["command"][1:]]),
            "versions": ", ".join(f"{name} {version}" for name, version in start["versions"].items()),
        }
        for run in runs
        for start in run.starts
    ]
    return pd.DataFrame(rows).set_index("run") if rows else None


def settings(runs: list[Run]) -> dict[str, Any] | None:
    """Return all settings, a column per run, and those that differ between runs or from the origin."""
    configs = {run.name: run.config for run in runs if run.config is not None}
    if not configs:
        return None
    origin, given = chosen(next(iter(configs.values())))
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    rows = {key: [config.get(key) for config in configs.values()] for key in keys}
    changed = [key for key, row in rows.items() if any(v != row[0] or v != given.get(key) for v in row)]
    shown = {key: [str(value) for value in row] for key, row in rows.items()}
    table = pd.DataFrame.from_dict(shown, orient="index", columns=list(configs))
    return {"origin": origin, "all": table, "changed": table.loc[changed]}


def chosen(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what a run's settings are compared with: its experiment as it is today, or the defaults."""
    try:
        origin = f"experiment={config['name']}"
        return origin, flatten(dataclasses.asdict(compose([origin])))
    except (ConfigError, KeyError):
        family = {"family": config["model.family"]} if "model.family" in config else {}
        return "the defaults", flatten(dataclasses.asdict(RunConfig(model=settings_of(family)())))


def throughput(metrics: dict[str, pd.DataFrame]) -> tuple[Figure, pd.DataFrame]:
    """Return curves, and the medians of each run."""
    medians = {name: rows.reindex(columns=list(RATES)).median() for name, rows in metrics.items()}
    return draw_throughput(metrics), pd.DataFrame(medians).rename(RATES).T


def incidents(run: Run) -> tuple[pd.DataFrame, int] | None:
    """Return the first incidents, and the number of those that are not shown."""
    if not run.incidents:
        return None
    shown = pd.DataFrame(run.incidents[:MAX_INCIDENTS]).reindex(columns=["time", "step", "stage", "reason", "replay"])
    return shown.set_index("time"), len(run.incidents) - len(shown)


def validation_scores(run: Run) -> tuple[pd.DataFrame, list[str]] | None:
    """Return the last and the best mean scores, and warnings about falling ones."""
    if run.validation is None:
        return None
    rows = {}
    for name, values in validation_means(run.validation).items():
        if values.notna().any():
            best = values.idxmin() if "loss" in name else values.idxmax()
            rows[name] = {"last": values.iloc[-1], "best": values[best], "best at step": best}
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table, [line["reason"] for line in run.incidents if "real data fell" in line["reason"]]


def validation_means(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return mean scores by step, for the kinds of tables that were scored inside the trained range."""
    rows = inside(rows)
    kinds = rows["data"].map(kind_of)
    means = {f"loss on {kind} tables": rows[kinds == kind].groupby("step")["loss"].mean() for kind in (OWN, SYNTHETIC)}
    for kind, what in ((REAL, "real data"), (PROBES, "probes")):
        of_kind = rows[kinds == kind].groupby("step")
        means |= {f"{name} on {what}": of_kind[score].mean() for score, name in REAL_SCORES.items() if score in rows}
    return {name: values for name, values in means.items() if len(values)}


def sets_outside(validations: dict[str, pd.DataFrame]) -> list[str]:
    """Describe the sets of tables that lie outside the trained range, and which are in no mean."""
    found = []
    for rows in validations.values():
        others = rows.drop(inside(rows).index)
        for data, number in zip(others["data"], others["rows"], strict=True):
            found.append(data if kind_of(data) in (REAL, PROBES) else f"{data} tables of {number:,} rows")
    return list(dict.fromkeys(found))


def real_data(runs: list[Run]) -> dict[str, Any] | None:
    """Compare methods on the tasks that all evaluated runs have in common; {} if there are none."""
    evaluated = [run for run in runs if run.evaluation is not None]
    if not evaluated:
        return None
    results = evaluated[0].evaluation if len(runs) == 1 else merge(evaluated)
    if results.empty or len({judged_by(run.evaluation) for run in evaluated}) > 1:
        return {}
    scores = judged(results)
    counting, outside = counting_tasks(results)
    first = str(scores.columns[0])
    if outside:
        scores = scores.assign(**{"trained range": ["outside" if task in outside else "" for task in scores.index]})
    return {
        "scores": scores,
        "score": REAL_SCORES[judged_by(results)],
        "splits": results["split"].nunique(),
        "first": first,
        "tasks": counting["data"].nunique(),
        "outside": outside,
        "summary": add_elo(summarize(counting), counting).rename(columns=column_name),
        "figure": draw_scores(counting),
        "standing": standing(counting),
        "picture": draw_standing(counting),
    }


def counting_tasks(results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the results on tasks inside the trained range, or on all if there are none, and the tasks outside."""
    outside = list(dict.fromkeys(results.drop(inside(results).index)["data"]))
    counting = results[~results["data"].isin(outside)]
    return (results if counting.empty else counting), outside


def column_name(column: str) -> str:
    """Return the heading of a column of `summarize`, such as lead or lead_low."""
    for end in ("low", "high"):
        if column.endswith(f"_{end}"):
            name = column.removesuffix(f"_{end}")
            return f"{FORMATS['win_rate' if name == 'win' else name][0]}, {end}"
    return FORMATS[column][0]


def merge(runs: list[Run]) -> pd.DataFrame:
    """Merge results on the tasks of all runs: the networks of the runs, and the other methods of the first run."""
    keys = ["data", "split", "rows"]
    networks = [run.evaluation[run.evaluation["method"] == run.evaluation["method"].iloc[0]] for run in runs]
    common = set.intersection(*({*zip(*(rows[key] for key in keys), strict=True)} for rows in networks))
    first = runs[0].evaluation
    tables = [rows.assign(method=run.name) for run, rows in zip(runs, networks, strict=True)]
    tables.append(first[first["method"] != first["method"].iloc[0]])
    merged = pd.concat(tables, ignore_index=True)
    return merged[[key in common for key in zip(*(merged[key] for key in keys), strict=True)]]


def fill(template: Path, **variables: Any) -> str:
    """Fill a template that extends the layout of this folder, with the filters `table`, `png` and `command`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"table": table, "png": png, "command": shlex.join}
    written = time.strftime("%Y-%m-%d %H:%M")
    return environment.get_template(template.name).render(written=written, **variables)


def png(figure: Figure) -> str:
    """Convert a figure to a PNG file, in base64."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()


def table(frame: pd.DataFrame) -> Markup:
    """Convert a frame to an HTML table, with empty cells for None and nan; aligned to the left if it holds any text."""
    has_text = frame.map(lambda value: isinstance(value, str)).any(axis=None)
    kind, formatters = "text" if has_text else "numbers", [cell] * frame.shape[1]
    frame = frame.rename_axis(index=None, columns=frame.index.name)  # otherwise the name has its own row
    frame = frame.astype(object).where(frame.notna(), "")
    html = frame.to_html(formatters=formatters, classes=kind, border=0, justify="left")
    return Markup(html.replace(' style="text-align: left;"', ""))  # the page's style sheet aligns the head


def cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
