"""The report: one self-contained HTML page about one or several runs.

The files of the runs are turned into data frames and figures for the sections; None stands for missing files. The
template page.html.j2 holds the text. `fill_template` also makes other pages, such as those of sweeps.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import io
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
from matplotlib import rc_context
from matplotlib.figure import Figure

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import (
    OWN,
    PROBES,
    REAL,
    REAL_SCORES,
    SYNTHETIC,
    RunConfig,
    flatten,
    judged_by,
    validation_kind,
)
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.arms import arm_of_method
from tabicl_train.evaluation.compare import Arm, compare_arms, default_metrics, pair, scope, table_in_words
from tabicl_train.evaluation.scores import (
    BUCKETS,
    CLASS_METRICS,
    NUMBER_METRICS,
    judged,
    standing,
    summary_table,
    weights_of_first,
)
from tabicl_train.model.config import settings_of
from tabicl_train.outputs import check_output, existing_problems, input_problems, write_atomically
from tabicl_train.report.comparison import draw_comparison, draw_ranks
from tabicl_train.report.figures import (
    draw_gates,
    draw_multipliers,
    draw_optimization,
    draw_sizes,
    draw_standing,
    draw_throughput,
    draw_training,
    draw_validation,
    rows_in_trained_range,
)
from tabicl_train.report.saved_run import TEXTS, SavedRun, holds_run
from tabicl_train.run.curves import OUTSIDE
from tabicl_train.run.removed import as_of_now

TEMPLATE = Path(__file__).with_name("page.html.j2")
DECIMALS = 3  # of scores; means over some dozen tasks vary by 0.01 between draws of tasks
MOST_SECONDS = 1e10  # of training, three centuries
MAX_INCIDENTS = 50  # shown; a run may have a thousand
STAGES = "curriculum.stages."
RECORDS = (  # the files of a run that are read
    *("config.yaml", "status.json", "provenance.jsonl", "incidents.jsonl", "test.json"),
    *("metrics.csv", "scaling.csv", "validation.csv", "evaluation.csv"),
)
# The columns that the page needs of each file, and other columns of numbers that it shows.
NEEDED = {
    "metrics.csv": ("step", "stage", "loss", "grad_norm", "lr", "tables_per_s", "cells_per_s", "data_wait", "skipped"),
    "scaling.csv": ("step", "layer", "n_smallest", "at_smallest", "n_largest", "at_largest", "gate_mean", "gate_std"),
    "validation.csv": ("step", "data", "rows", "loss"),
    "evaluation.csv": ("data", "split", "method"),
}
NUMBERS = (
    *("guess_loss", "tflops_per_s", "accept_rate", "memory_gb", "possible", "is_best", "n_estimators"),
    *(*BUCKETS, *CLASS_METRICS, *NUMBER_METRICS),
)
PAGE = "report.html"  # in a run directory, where it belongs to the report and is replaced by every new one
RATES = {
    "tables_per_s": "tables/s",
    "cells_per_s": "cells/s",
    "tflops_per_s": "GFLOP/s",
    "data_wait": "share of time waiting for tables",
    "accept_rate": "share of draws accepted",
    "memory_gb": "memory, GB",
}


@dataclass
class RunContent:
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
    test: dict | None  # from test.json, the final test


def write_report(folders: list[Path], output: Path, overwrite: bool = False) -> None:
    """Write a page about runs; raises ConfigError for a folder without a run, and if it cannot be written.

    overwrite: replace a file that is there already
    """
    problems = [f"run_dir is '{folder}'; there is no run in it" for folder in folders if not holds_run(folder)]
    for folder in folders:
        if os.fsencode(folder) != str(folder).encode(errors="replace"):
            problems.append(f"run_dir is {str(folder)!r}, which is not UTF-8, as pages are; rename it")
    if problems:
        raise ConfigError(problems)
    files_read = []
    for folder in folders:
        files_read += [("run_dir", folder / name) for name in RECORDS]
    problems = input_problems("output", output, files_read) or existing_problems("output", output, overwrite)
    if problems:
        raise ConfigError(problems)
    check_output(output)
    runs = [read_run(folder, name) for folder, name in zip(folders, names_of_folders(folders), strict=True)]
    try:
        mark_together(runs)
        with rc_context({"text.parse_math": False}):  # a run may be called $x
            page = fill_template(TEMPLATE, runs=runs, **sections(runs))
    except ConfigError:
        raise
    except Exception as error:  # files of others, or edited by hand, which may hold anything
        files = f"the files of {', '.join(map(str, folders))} cannot be shown"
        raise ConfigError([f"{files}: {type(error).__name__}: {first_line(error)}"]) from error
    try:
        write_atomically(output.resolve(), lambda file: file.write(page.encode()))
    except OSError as error:  # a full disk
        raise ConfigError([f"output is {str(output)!r}; it cannot be written ({error.strerror})"]) from None


def names_of_folders(folders: list[Path]) -> list[str]:
    """Return the names of the directories of runs or, if two are equal, their paths below a common one."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    parent = os.path.commonpath(paths)
    return [str(path.relative_to(parent)) for path in paths]  # full paths would fill the legends


def read_run(folder: Path, name: str) -> RunContent:
    """Read the files of a run."""
    saved = SavedRun(folder)
    status = saved.status
    test = saved.test
    for file, content in (("status.json", status), ("test.json", test)):
        if content is None and (folder / file).exists():
            info(f"warning   {folder / file} is left out: it is damaged, or was not written by a run")
    return RunContent(
        name=name,
        folder=folder,
        config=None if saved.settings is None else flatten(as_of_now(saved.settings)),
        status=status,
        starts=saved.starts,
        incidents=saved.incidents,
        metrics=table_of_run(saved, "metrics.csv"),
        scaling=table_of_run(saved, "scaling.csv"),
        validation=table_of_run(saved, "validation.csv"),
        evaluation=table_of_run(saved, "evaluation.csv"),
        test=test,
    )


def table_of_run(saved: SavedRun, name: str) -> pd.DataFrame | None:
    """Return a table of a run; None if it has no rows.

    Raises ConfigError if a column is missing, or holds something else than numbers.
    """
    table = saved.table(name)
    if table.empty:
        return None
    path = saved.folder / name
    if missing := [column for column in NEEDED[name] if column not in table]:
        raise ConfigError([f"{path} has no column {', '.join(missing)}"])
    for column in {*NEEDED[name], *NUMBERS}.difference(TEXTS).intersection(table):
        numbers = pd.to_numeric(table[column], errors="coerce")
        wrong = table[column][numbers.isna() & table[column].notna()]
        if len(wrong) or not pd.api.types.is_numeric_dtype(table[column]):
            text = wrong.iloc[0] if len(wrong) else table[column].iloc[0]
            raise ConfigError([f"{path}: the column {column} holds {text!r}, which is not a number"])
    return table


def mark_together(runs: list[RunContent]) -> None:
    """Mark in all runs what lies outside the trained range of one of them, so that means are over the same data."""
    if len(runs) == 1:
        return
    for source in ("validation", "evaluation"):
        tables = tables_by_run(runs, source).values()
        outside: set[str] = set()
        for table in tables:
            if "trained_range" in table:
                counting = table
                if source == "validation":  # the last one counts: a stage that was added to a run widens its range
                    counting = table[table["step"] == table["step"].max()]
                outside.update(counting["data"][counting["trained_range"] == OUTSIDE])
        for table in tables:
            marks = table["trained_range"] if "trained_range" in table else pd.Series("", table.index)
            is_public = table["data"].astype(str).map(validation_kind).isin([REAL, PROBES])  # a task may be called 61
            table["trained_range"] = marks.astype(object).mask(is_public & table["data"].isin(outside), OUTSIDE)


def sections(runs: list[RunContent]) -> dict[str, Any]:
    """Return the variables of the template."""
    metrics = tables_by_run(runs, "metrics")
    validations = tables_by_run(runs, "validation")
    scalings = tables_by_run(runs, "scaling")
    names = [run.name for run in runs]
    scores = why_no_scores = None
    try:
        scores = real_data(runs)
    except ConfigError as error:
        why_no_scores = str(error)
    other_losses = {run.name: loss for run in runs if (loss := other_loss(run.config or {})) is not None}
    return {
        "decimals": DECIMALS,
        "overview": overview(runs),
        "settings": settings(runs),
        "training": draw_training(metrics, validations, other_losses) if metrics else None,
        "other_losses": other_losses,
        "optimization": draw_optimization(metrics) if metrics else None,
        "multipliers": draw_each(draw_multipliers, scalings, names),
        "gates": draw_each(draw_gates, scalings, names),
        "throughput": throughput(metrics) if metrics else None,
        "incidents": {run.name: incidents(run) for run in runs},
        "tests": [(run.name, run.test) for run in runs if run.test is not None],
        "validation": draw_validation(validations) if validations else None,
        "validation_scores": {run.name: validation_scores(run) for run in runs},
        "outside": sets_outside(validations),
        "unevaluated": [run for run in runs if run.evaluation is None],
        "real_data": scores,
        "why_no_scores": why_no_scores,
    }


def other_loss(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the training loss of a run is, by its dotted names; None if it is the network's own loss alone."""
    objective = config.get("objective.name")
    auxiliary = any(weight != 0 for key, weight in config.items() if key.startswith("auxiliary_losses."))
    return {"objective": objective, "auxiliary": auxiliary} if objective or auxiliary else None


def draw_each(
    draw: Callable[[pd.DataFrame], list[Figure] | None], tables: dict[str, pd.DataFrame], names: list[str]
) -> dict[str, list[Figure] | None]:
    """Draw the figures of each run, by name; None for a run without a table."""
    figures: dict[str, list[Figure] | None] = dict.fromkeys(names)
    for name, table in tables.items():
        figures[name] = draw(table)
    return figures


def tables_by_run(runs: list[RunContent], source: str) -> dict[str, pd.DataFrame]:
    """Return one of the data frames, by the names of the runs that have it."""
    tables = {}
    for run in runs:
        table = getattr(run, source)
        if table is not None:
            tables[run.name] = table
    return tables


def overview(runs: list[RunContent]) -> pd.DataFrame:
    """Return a row per fact, a column per run."""
    facts = {run.name: run_facts(run) for run in runs}
    keys: list[str] = []  # of all runs, in the order of the first run that has them
    for facts_of_run in facts.values():
        keys += [key for key in facts_of_run if key not in keys]
    columns = {}
    for name, facts_of_run in facts.items():
        columns[name] = [facts_of_run.get(key) for key in keys]
    return pd.DataFrame(columns, keys, dtype=object)


def run_facts(run: RunContent) -> dict[str, Any]:
    """Return what the overview says about a run."""
    facts: dict[str, Any] = {"run directory": str(run.folder)}
    if run.status is not None:
        cause = run.status.get("cause")
        facts["status"] = f"{run.status['status']}: {cause}" if cause else run.status["status"]
    if run.metrics is not None:
        late = run.metrics[run.metrics["step"] > 0.9 * run.metrics["step"].max()]
        facts["steps done"] = int(run.metrics["step"].iloc[-1])
        done = effort(run.metrics, run.config or {})
        if done is not None:
            tables, seconds = done
            facts["tables seen"] = tables
            facts["training time"] = str(datetime.timedelta(seconds=round(seconds)))
        facts["mean loss, last 10% of the steps"] = late["loss"].mean()
        facts["skipped steps"] = run.metrics["skipped"].iloc[-1]
    facts["incidents"] = len(run.incidents)
    if run.validation is not None:
        facts["last validation: step"] = int(run.validation["step"].max())
        for name, means in validation_means(run.validation).items():
            facts[f"last validation: {name}"] = means.iloc[-1]
        if "is_best" in run.validation:
            # Which weights the other commands take of the run: see weights/choice.py.
            best_steps = run.validation["step"][run.validation["is_best"] == 1]
            if len(best_steps):
                facts["best weights by validation: step"] = int(best_steps.iloc[-1])
    if run.evaluation is not None:
        counting, _ = counting_tasks(run.evaluation)
        scores = judged(counting)
        score = REAL_SCORES[judged_by(run.evaluation)]
        facts[f"mean {score} on {len(scores)} real tasks"] = scores.iloc[:, 0].mean()
        facts["weights scored on real tasks"] = scored_weights(run.evaluation)
    return facts


def effort(metrics: pd.DataFrame, config: dict[str, Any]) -> tuple[int, float] | None:
    """Tables of the logged steps, and the seconds they took; None without a configuration."""
    tables_per_step = metrics["stage"].map(lambda stage: config.get(f"{STAGES}{stage}.tables"))
    tables_per_step = pd.to_numeric(tables_per_step, errors="coerce")
    steps = metrics["step"].diff().fillna(metrics["step"])  # since the last logged step
    tables = steps * tables_per_step
    seconds = (tables / metrics["tables_per_s"]).sum()
    if tables.isna().any() or not seconds < MOST_SECONDS:
        return None
    return int(tables.sum()), seconds


def settings(runs: list[RunContent]) -> dict[str, Any] | None:
    """Return all settings, a column per run, and those that differ between runs or from the origin."""
    configs = {run.name: run.config for run in runs if run.config is not None}
    if not configs:
        return None
    first, *_ = configs.values()
    origin, values_of_origin = compared_settings(first)
    keys: dict[str, None] = {}
    for config in configs.values():
        keys |= dict.fromkeys(config)
    texts = {}  # of each setting, those of the runs
    changed = []
    for key in keys:
        values = [config.get(key) for config in configs.values()]
        texts[key] = [str(value) for value in values]
        if any(value != values_of_origin.get(key) for value in values):  # also if runs differ from each other
            changed.append(key)
    table = pd.DataFrame.from_dict(texts, orient="index", columns=list(configs))
    return {"origin": origin, "all": table, "changed": table.loc[changed]}


def compared_settings(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what a run's settings are compared with: its experiment as it is today, or the defaults."""
    try:
        origin = f"experiment={config['name']}"
        return origin, flatten(dataclasses.asdict(compose([origin])))
    except (ConfigError, KeyError):
        family = {"family": config["model.family"]} if "model.family" in config else {}
        return "the defaults", flatten(dataclasses.asdict(RunConfig(model=settings_of(family)())))


def throughput(metrics: dict[str, pd.DataFrame]) -> tuple[list[Figure], pd.DataFrame]:
    """Return curves, and the medians of each run."""
    medians = pd.DataFrame({name: rows.reindex(columns=list(RATES)).median() for name, rows in metrics.items()})
    medians.loc["tflops_per_s"] *= 1000  # two CPU cores have 0.01 TFLOP/s
    return draw_throughput(metrics), medians.rename(RATES)


def incidents(run: RunContent) -> tuple[pd.DataFrame, int] | None:
    """Return the first incidents, and the number of those that are not shown."""
    if not run.incidents:
        return None
    shown = pd.DataFrame(run.incidents[:MAX_INCIDENTS]).reindex(columns=["time", "step", "stage", "reason", "replay"])
    return shown.set_index("time"), len(run.incidents) - len(shown)


def validation_scores(run: RunContent) -> tuple[pd.DataFrame, list[str]] | None:
    """Return the last and the best mean scores, and warnings about falling ones."""
    if run.validation is None:
        return None
    rows = {}
    for name, values in validation_means(run.validation).items():
        if values.notna().any():
            best = values.idxmin() if "loss" in name else values.idxmax()
            rows[name] = {"last": values.iloc[-1], "best": values[best], "best at step": best}
    warnings = [incident["reason"] for incident in run.incidents if "real data fell" in (incident.get("reason") or "")]
    return pd.DataFrame.from_dict(rows, orient="index"), warnings


def validation_means(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return mean scores by step, for the kinds of tables that were scored inside the trained range."""
    rows = rows_in_trained_range(rows)
    kinds = rows["data"].map(validation_kind)
    means = {}
    for kind in (OWN, SYNTHETIC):
        means[f"loss on {kind} tables"] = rows[kinds == kind].groupby("step")["loss"].mean()
    for kind, what in ((REAL, "real data"), (PROBES, "probes")):
        steps = rows[kinds == kind].groupby("step")
        for score, name in REAL_SCORES.items():
            if score in rows:
                means[f"{name} on {what}"] = steps[score].mean()
    return {name: values for name, values in means.items() if len(values)}


def sets_outside(validations: dict[str, pd.DataFrame]) -> list[tuple[str, int | None]]:
    """Return the sets of tables outside the trained range, which no mean includes, and the rows of drawn ones."""
    sets = []
    for rows in validations.values():
        outside = rows.drop(rows_in_trained_range(rows).index)
        for data, number in zip(outside["data"], outside["rows"], strict=True):
            sets.append((data, None if validation_kind(data) in (REAL, PROBES) else number))
    return list(dict.fromkeys(sets))


def real_data(runs: list[RunContent]) -> dict[str, Any] | None:
    """Return the scores of the evaluated runs on real data, and their comparison; None without any.

    They are of the tasks that all of them have in common; raises ConfigError if there are none.
    """
    evaluated = [run for run in runs if run.evaluation is not None]
    if not evaluated:
        return None
    networks = []
    for run in evaluated:
        method = run.evaluation["method"].iloc[0]  # the network comes first
        networks.append(arm_of_method(run.evaluation, method, method if len(runs) == 1 else run.name))
    scores_of_first = evaluated[0].evaluation
    arms = list(networks)
    for method in scores_of_first["method"].unique()[1:]:
        arms.append(arm_of_method(scores_of_first, method, method))
    metric, *_ = default_metrics(networks)
    common = pair(networks, outside=True).index
    tables = []
    for arm in arms:
        rows = arm.frame(None)
        tables.append(rows[rows.index.isin(common)].reset_index().assign(method=arm.name))
    results = pd.concat(tables, ignore_index=True)
    counting, outside = counting_tasks(results)
    scores = judged(results)
    are_all_outside = len(outside) == len(scores)
    compared = why_not = None
    if len(arms) > 1:
        try:
            compared = comparison_section(arms, metric, are_all_outside)
        except ConfigError as error:  # a baseline may lack scores
            why_not = str(error)
    if outside:
        scores = scores.copy()
        scores["trained range"] = ["outside" if task in outside else "" for task in scores.index]
    return {
        "scores": scores,
        "score": REAL_SCORES[metric],
        "splits": results["split"].nunique(),
        "first": networks[0].name,
        "tasks": counting["data"].nunique(),
        "outside": outside,
        "summary": summary_table(counting),
        "figures": draw_sizes(counting),
        "standing": standing(counting),
        "picture": draw_standing(counting),
        "comparison": compared,
        "why_not_compared": why_not,
    }


def comparison_section(arms: list[Arm], metric: str, outside: bool) -> dict[str, Any]:
    """Compare the first arm with the others; outside: whether tasks outside the trained range count."""
    paired = pair(arms, outside)
    found = compare_arms(paired, metric)
    (title, *header), lines = table_in_words(found)
    figures = [draw_comparison(found)]
    if found.ranks is not None:
        figures.append(draw_ranks(found))
    return {
        "scope": scope(paired, [found]).splitlines(),
        "warnings": found.warnings,
        "table": pd.DataFrame(lines, columns=[title, *header]).set_index(title),
        "sentences": [pair.sentence for pair in found.pairs],
        "figures": figures,
    }


def counting_tasks(results: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the results on tasks inside the trained range, or on all if there are none, and the tasks outside."""
    outside = list(dict.fromkeys(results.drop(rows_in_trained_range(results).index)["data"]))
    counting = results[~results["data"].isin(outside)]
    return (results if counting.empty else counting), outside


def scored_weights(results: pd.DataFrame) -> str:
    """Name the weights whose scores a table holds."""
    return weights_of_first(results) or "not recorded in evaluation.csv"


def fill_template(template: Path, **variables: Any) -> str:
    """Fill a template that extends the layout of this folder, with the filters `cell`, `png` and `command`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cell": page_cell, "png": png, "command": shlex.join}
    written = time.strftime("%Y-%m-%d %H:%M")
    return environment.get_template(template.name).render(written=written, **variables)


def png(figure: Figure) -> str:
    """Convert a figure to a PNG file, in base64."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)  # sharp at the 90 to 110 pixels per inch at which pages show it
    return base64.b64encode(file.getvalue()).decode()


def page_cell(value: Any, decimals: int | None = None) -> str:
    """Format the value of a cell, an empty one for None and nan.

    Parameters
    ----------
    value : object
        A text or a number.
    decimals : int, optional
        Of numbers below 1000 that are not whole. Default: four digits.
    """
    if isinstance(value, str | list | dict):
        return str(value)
    if pd.isna(value):
        return ""
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if decimals is None else f"{value:.{decimals}f}"
