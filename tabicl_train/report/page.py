"""A run, or several beside each other, on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import math
import numbers
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from tabicl_train.config.schema import SYNTHETIC, RunConfig, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import by_task, summarise
from tabicl_train.evaluation.scores_figure import draw_scores
from tabicl_train.report.comparison_figures import draw_throughput, draw_training, draw_validation
from tabicl_train.report.run_figures import GROUPS, draw_losses, draw_scaling, last_quarter
from tabicl_train.run_dir.records import Records, csv_text
from tabicl_train.run_dir.status import read_status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINES = 50  # of incidents that are shown; a run may have a thousand
STAGES = "curriculum.stages."
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1em;
       overflow-wrap: anywhere; }
h2 { border-bottom: 1px solid #ccc; padding-bottom: .2em; margin-top: 2em; }
nav a { margin-right: 1em; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8em 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2em .7em; border-bottom: 1px solid #e4e4e4; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .text { text-align: left; }
td, th { overflow-wrap: normal; }
td.text { max-width: 42em; overflow-wrap: break-word; }
thead th { border-bottom: 1px solid #888; }
.missing { color: #777; font-style: italic; }
"""


@dataclass
class Run:
    """What the files of a run directory say; None where there is no such file."""

    name: str
    folder: Path
    config: dict[str, Any] | None  # by dotted names
    status: dict | None
    starts: list[dict]  # of provenance.jsonl
    incidents: list[dict]
    metrics: pd.DataFrame | None
    batches: pd.DataFrame | None
    validation: pd.DataFrame | None
    evaluation: pd.DataFrame | None


def write_report(folders: list[Path], output: Path) -> None:
    """Write the page of some runs; raises ConfigError for a folder that holds none."""
    problems = [f"run_dir is '{folder}'; there is no run in it" for folder in folders if not holds_run(folder)]
    if problems:
        raise ConfigError(problems)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        above = os.path.commonpath([folder.resolve() for folder in folders])
        names = [str(folder.resolve().relative_to(above)) for folder in folders]  # whole paths would fill the figures
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page([read_run(*both) for both in zip(folders, names, strict=True)]), encoding="utf-8")


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "metrics.csv").is_file()


def read_run(folder: Path, name: str) -> Run:
    config, records = folder / "config.yaml", Records(folder)
    return Run(
        name,
        folder,
        flatten(yaml.safe_load(config.read_text())) if config.is_file() else None,
        read_status(folder),
        records.lines("provenance.jsonl"),
        records.lines("incidents.jsonl"),
        *(read_table(records, f"{part}.csv") for part in ("metrics", "batches", "validation", "evaluation")),
    )


def read_table(records: Records, name: str) -> pd.DataFrame | None:
    """A CSV file; None where there are no rows."""
    rows = records.rows(name)
    return pd.read_csv(io.StringIO(csv_text([rows[0], *(row.values() for row in rows)]))) if rows else None


def page(runs: list[Run]) -> str:
    parts = {
        "Overview": overview(runs),
        "Configuration": configuration(runs),
        "Curriculum": curriculum(runs),
        "Loss": training(runs) + each(runs, losses),
        "Multipliers": each(runs, multipliers),
        "Throughput": together(runs, "metrics", draw_throughput, "metrics.csv") + throughput(runs),
        "Incidents": each(runs, incidents),
        "Validation": together(runs, "validation", draw_validation, "validation.csv") + each(runs, validation),
        "Real data": real_data(runs),
    }
    title = "tabicl-train: " + ", ".join(run.name for run in runs)
    links = " ".join(f'<a href="#{anchor(name)}">{name}</a>' for name in parts)
    body = "".join(f'<section id="{anchor(name)}"><h2>{name}</h2>{part}</section>\n' for name, part in parts.items())
    # The policy makes sure that the page is opened without network: nothing but what is inside may be loaded.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{text(title)}</h1>\n"
        f"<p>Written {time.strftime('%Y-%m-%d %H:%M')}.</p>\n<nav>{links}</nav>\n{body}</body>\n</html>\n"
    )


def anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def overview(runs: list[Run]) -> str:
    found = {run.name: facts(run) for run in runs}
    keys = dict.fromkeys(key for row in found.values() for key in row)
    columns = {name: [row.get(key) for key in keys] for name, row in found.items()}
    return table(pd.DataFrame(columns, list(keys), dtype=object))


def facts(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"folder": str(run.folder)}
    if run.status is not None:
        found["status"] = run.status["status"]
    if run.metrics is not None:
        late = run.metrics[run.metrics["step"] > 0.9 * run.metrics["step"].max()]
        found |= {
            "steps done": int(run.metrics["step"].iloc[-1]),
            "stage": run.metrics["stage"].iloc[-1],
            "loss, last tenth of the steps": late["loss"].mean(),
            "tables/s, median": run.metrics["tables_per_s"].median(),
            "steps left out": int(run.metrics["skipped"].iloc[-1]),
        }
    found["incidents"] = len(run.incidents)
    if run.validation is not None:
        found |= {f"validation: {name}": values.iloc[-1] for name, values in validation_means(run.validation).items()}
    if run.evaluation is not None:
        auc = by_task(run.evaluation, "roc_auc").mean()
        found[f"ROC AUC, mean of {run.evaluation['data'].nunique()} real tasks"] = auc.iloc[0]
    return found


def configuration(runs: list[Run]) -> str:
    """How the runs were started, the settings that are not the default or differ, and all of them."""
    starts = [
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
    parts = [table(pd.DataFrame(starts).set_index("run")) if starts else missing("There is no provenance.jsonl.")]
    settings = {run.name: run.config for run in runs if run.config is not None}
    if not settings:
        return parts[0] + missing("There is no config.yaml.")
    keys = [key for key in dict.fromkeys(k for each in settings.values() for k in each) if not key.startswith(STAGES)]
    defaults = flatten(dataclasses.asdict(RunConfig()))
    rows = {key: [values.get(key) for values in settings.values()] for key in keys}
    told = {key: row for key, row in rows.items() if any(v != row[0] or v != defaults.get(key) for v in row)}
    what = "Settings that are not the default" + (", or differ" if len(settings) > 1 else "")
    parts.append(f"<p>{what}:</p>" + setting_table(told, list(settings)))
    parts.append(f"<details><summary>all {len(rows)} settings</summary>{setting_table(rows, list(settings))}</details>")
    return "".join(parts)


def setting_table(rows: dict[str, list], names: list[str]) -> str:
    shown = {key: [str(value) for value in row] for key, row in rows.items()}
    return table(pd.DataFrame.from_dict(shown, orient="index", columns=names))


def curriculum(runs: list[Run]) -> str:
    """A row a setting, a column a stage; of every run where they are not the same."""
    settings = {run.name: stages(run.config) for run in runs if run.config is not None}
    if not settings:
        return missing("There is no config.yaml.")
    first, *others = settings.values()
    if all(other == first for other in others):
        return table(pd.DataFrame(first))
    return table(pd.DataFrame({f"{run}: {name}": told for run, s in settings.items() for name, told in s.items()}))


def stages(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key, value in config.items():
        if key.startswith(STAGES):
            stage, _, setting = key.removeprefix(STAGES).rpartition(".")
            found.setdefault(stage, {})[setting] = str(value)
    return found


def training(runs: list[Run]) -> str:
    metrics, batches, validation = (tables_of(runs, file) for file in ("metrics", "batches", "validation"))
    if not metrics:
        return missing("There is no metrics.csv.")
    return picture(draw_training(metrics, batches, validation), "loss, gradient norm and learning rate") + (
        "<p>Guessing gives every class its share of the labelled rows, (n_c + 1) / (n + C): a ratio of 1 means that "
        "nothing is learned, and tables of few and of many classes are comparable.</p>"
    )


def losses(run: Run) -> str:
    if run.batches is None:
        return missing("There is no batches.csv.")
    return "".join(
        picture(draw_losses(run.folder, by), f"loss by the {by} of a table") + loss_table(run.batches, by)
        for by in GROUPS
    )


def loss_table(batches: pd.DataFrame, by: str) -> str:
    """Mean loss over the tables of the last quarter of each stage, by their rows or classes."""
    group_of, name_of = GROUPS[by]
    parts = []
    for stage, mine in batches.groupby("stage", sort=False):
        late = mine[mine["step"] >= last_quarter(mine["step"])]
        weighted = late.assign(loss=late["loss"] * late["tables"])
        sums = weighted.groupby(late[by].map(group_of))[["loss", "tables"]].sum()
        parts.append((sums["loss"] / sums["tables"]).rename(stage))
    means = pd.concat(parts, axis=1).sort_index()
    means.index = [f"{name_of(group)} {by}" for group in means.index]
    return "<p>Mean loss over the last quarter of each stage:</p>" + table(means)


def multipliers(run: Run) -> str:
    if not Records(run.folder).rows("scaling.csv"):
        return missing("There is no scaling.csv: the model has no scalable softmax, or no step was logged.")
    return picture(draw_scaling(run.folder), "multipliers of the scalable softmax against labelled rows")


RATES = {
    "tables_per_s": "tables/s",
    "cells_per_s": "cells/s",
    "tflops_per_s": "TFLOP/s",
    "data_wait": "share of time waiting for tables",
    "accept_rate": "share of draws accepted",
    "memory_gb": "memory, GB",
}


def throughput(runs: list[Run]) -> str:
    medians = {run.name: run.metrics.reindex(columns=RATES).median() for run in runs if run.metrics is not None}
    return "<p>Medians:</p>" + table(pd.DataFrame(medians).rename(RATES).T) if medians else ""


def incidents(run: Run) -> str:
    if not run.incidents:
        return missing("There was no incident.")
    shown = pd.DataFrame(run.incidents[:LINES]).reindex(columns=["time", "step", "stage", "reason", "replay"])
    rest = len(run.incidents) - len(shown)
    return table(shown.set_index("time")) + (f"<p>... and {rest} more in incidents.jsonl.</p>" if rest else "")


def validation(run: Run) -> str:
    if run.validation is None:
        return missing("The run was not validated; validation.every is the number of steps between validations.")
    means = validation_means(run.validation)
    best = {"loss": "idxmin", "ROC AUC on real data": "idxmax"}
    rows = {
        name: {"last": values.iloc[-1], "best": values[step], "best at step": str(step)}
        for name, values in means.items()
        if values.notna().any() and (step := getattr(values, best[name])()) is not None
    }
    warnings = [line["reason"] for line in run.incidents if "real data fell" in line["reason"]]
    return table(pd.DataFrame(rows).T) + "".join(f"<p>Warning: {text(warning)}.</p>" for warning in warnings)


def validation_means(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """By step, those of the two that there are."""
    synthetic = rows[rows["data"] == SYNTHETIC].groupby("step")["loss"].mean()
    real = rows[rows["data"] != SYNTHETIC].groupby("step")["roc_auc"].mean()
    return {name: values for name, values in (("loss", synthetic), ("ROC AUC on real data", real)) if len(values)}


def real_data(runs: list[Run]) -> str:
    evaluated = [run for run in runs if run.evaluation is not None]
    told = "".join(
        missing(f"{run.name}: there is no evaluation.csv; tabicl-evaluate checkpoint={run.folder} "
                f"output={run.folder}/evaluation.csv writes it.")
        for run in runs if run.evaluation is None
    )  # fmt: skip
    if not evaluated:
        return told
    results = evaluated[0].evaluation if len(evaluated) == 1 else merge(evaluated)
    if results.empty:
        return told + missing("The runs were evaluated on different tasks.")
    tasks = by_task(results, "roc_auc")
    summary = summarise(results).rename(columns=lambda name: name.replace("_", " "))
    first = text(str(tasks.columns[0]))
    outside = ""
    if "trained_range" in results and (results["trained_range"] == "outside").any():
        names = ", ".join(results.loc[results["trained_range"] == "outside", "data"].unique())
        outside = f" Outside the trained range, where the network extrapolates: {text(names)}."
    return (
        f"{told}<p>Means over {len(tasks)} tasks, of {results['split'].nunique()} splits each. win rate: the share of "
        f"tasks on which {first} has the higher ROC AUC; lead: by how much; low and high: 95 % interval.{outside}</p>"
        f"{table(summary)}{picture(draw_scores(results), 'comparison of methods over tasks')}"
        f"<details open><summary>ROC AUC of every task</summary>{table(tasks)}</details>"
    )


def merge(runs: list[Run]) -> pd.DataFrame:
    """One table of results on the tasks that all runs were evaluated on: the runs' networks, and the first one's
    other methods."""
    keys = ["data", "split", "rows"]
    networks = [run.evaluation[run.evaluation["method"] == run.evaluation["method"].iloc[0]] for run in runs]
    common = set.intersection(*({*zip(*(rows[key] for key in keys), strict=True)} for rows in networks))
    first = runs[0].evaluation
    tables = [rows.assign(method=run.name) for run, rows in zip(runs, networks, strict=True)]
    tables.append(first[first["method"] != first["method"].iloc[0]])
    together = pd.concat(tables, ignore_index=True)
    return together[[key in common for key in zip(*(together[key] for key in keys), strict=True)]]


def each(runs: list[Run], part) -> str:
    """A part of every run, under its name where there are several; once where it is the same in all."""
    parts = [part(run) for run in runs]
    if len(set(parts)) == 1:
        return parts[0]
    return "".join(f"<h3>{text(run.name)}</h3>{found}" for run, found in zip(runs, parts, strict=True))


def together(runs: list[Run], source: str, draw, file: str) -> str:
    found = tables_of(runs, source)
    return picture(draw(found), source) if found else missing(f"There is no {file}.")


def tables_of(runs: list[Run], source: str) -> dict[str, pd.DataFrame]:
    return {run.name: getattr(run, source) for run in runs if getattr(run, source) is not None}


def picture(figure: Figure, what: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<p><img alt="{text(what)}" src="data:image/png;base64,{data}"></p>\n'


def table(frame: pd.DataFrame) -> str:
    kinds = [' class="text"' if any(isinstance(v, str) for v in values) else "" for _, values in frame.items()]
    head = "".join(f"<th{kind}>{text(str(column))}</th>" for kind, column in zip(kinds, frame, strict=True))
    rows = []
    for name, values in zip(frame.index, frame.itertuples(index=False), strict=True):
        rows.append(f"<tr><td>{text(str(name))}</td>{''.join(map(cell, values))}</tr>")
    head = f"<thead><tr><th>{text(frame.index.name or '')}</th>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>\n'


def cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "<td></td>"
    if isinstance(value, str):
        return f'<td class="text">{text(value)}</td>'
    exact = isinstance(value, numbers.Integral)
    return (
        f"<td>{value:,}</td>" if exact else f"<td>{value:,.0f}</td>" if abs(value) >= 1000 else f"<td>{value:.4g}</td>"
    )


def missing(what: str) -> str:
    return f'<p class="missing">{text(what)}</p>\n'


def text(value: str) -> str:
    return html.escape(value)
