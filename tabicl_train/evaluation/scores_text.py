"""The comparison of methods over tasks, as tables for the terminal."""

from __future__ import annotations

import math

import pandas as pd

from tabicl_train.config.monitoring import REAL_SCORES, judged_by
from tabicl_train.evaluation.scores import BUCKETS, by_bucket, by_task, judged, relative_rmse, summarize
from tabicl_train.prediction.trained_range import TrainedRange

THIS_MODEL = "this model"
Columns = dict[str, tuple[str, int, str]]  # heading, width and format of each score
TASK_COLUMNS: dict[str, Columns] = {  # by what judged_by returns
    "roc_auc": {"roc_auc": ("ROC AUC", 7, ".4f"), "log_loss": ("log loss", 10, ".3f"), "accuracy": ("acc.", 7, ".3f")},
    "r2": {
        "r2": ("R2", 7, ".3f"), "relative_rmse": ("rel. RMSE", 11, ".3f"), "pinball": ("pinball", 9, ".3f"),
        "coverage": ("cov.", 6, ".2f"),
    },
}  # fmt: skip
SUMMARY_COLUMNS: dict[str, Columns] = {
    "roc_auc": {
        "roc_auc": ("ROC AUC", 9, ".4f"), "log_loss": ("log loss", 10, ".3f"), "accuracy": ("acc.", 7, ".3f"),
        "normalized_accuracy": ("norm. acc.", 12, ".3f"), "calibration_error": ("calib. err.", 13, ".3f"),
        "mean_rank": ("rank", 7, ".2f"),
    },
    "r2": {
        "r2": ("R2", 7, ".3f"), "r2_median": ("median", 8, ".3f"), "relative_rmse": ("rel. RMSE", 11, ".3f"),
        "pinball": ("pinball", 9, ".3f"), "below_marginal": ("below marginal", 16, ".2f"),
        "width": ("width", 7, ".2f"), "coverage": ("coverage", 20, ".2f"), "mean_rank": ("rank", 7, ".2f"),
    },
}  # fmt: skip


def as_text(results: pd.DataFrame, trained: TrainedRange | None) -> str:
    """Tables of the tasks, by rows, features and classes, and of the means of each method.

    Tasks outside the range that the network was trained on have a table of their own. The means at the end are of all
    tasks, then of those inside.
    """
    headings = {
        "unknown": "The checkpoint does not say on which tables its network was trained; the checkpoint of a run does.",
        "inside": f"Inside the trained range ({trained}):",
        "outside": f"Outside the trained range ({trained}), where the network extrapolates:",
    }
    groups = dict(list(results.groupby("trained_range")))
    parts = [text for name in headings if name in groups for text in (headings[name], tasks_text(groups[name]))]
    parts += [bucket_text(results, quantity) for quantity in BUCKETS if quantity in results]
    parts.append(summary_text(results))
    if len(groups) > 1:
        parts.append(summary_text(groups["inside"], " inside"))
    return "\n\n".join(parts)


def tasks_text(results: pd.DataFrame) -> str:
    """The TASK_COLUMNS of every method: a line per task, and one of the means, in which R2 below 0 counts as 0."""
    by = judged_by(results)
    columns = TASK_COLUMNS[by]
    tables = {name: relative_rmse(results) if name == "relative_rmse" else by_task(results, name) for name in columns}
    means = {name: table.mean() for name, table in tables.items()} | {by: judged(results).mean()}
    methods = tables[by].columns
    width, wide = max(20, *(len(name) + 2 for name in tables[by].index)), 1 + sum(w for _, w, _ in columns.values())
    heading = "".join(f"{title:>{w}}" for title, w, _ in columns.values())
    lines = [" " * width + "".join(f"{method:>{wide}}" for method in methods)]
    lines.append(" " * width + f"{heading:>{wide}}" * len(methods))
    for task in tables[by].index:
        values = {name: table.loc[task] for name, table in tables.items()}
        lines.append(f"{task:{width}}" + methods_text(values, columns, methods))
    lines.append(f"{'mean':{width}}" + methods_text(means, columns, methods))
    return "\n".join(lines)


def methods_text(values: dict[str, pd.Series], columns: Columns, methods: pd.Index) -> str:
    return "".join(" " + cells(pd.DataFrame(values).loc[method], columns) for method in methods)


def cells(values: pd.Series, columns: Columns) -> str:
    """One after the other, with its confidence interval if there is one; a dash for nan."""
    line = ""
    for name, (_, width, form) in columns.items():
        bounds = name.removesuffix("_rate")
        text = "-" if math.isnan(values[name]) else f"{values[name]:{form}}"
        if len(text) > width:  # an R2 may be -1e30
            text = f"{values[name]:.0e}"
        if f"{bounds}_low" in values and text != "-":
            text += f" [{values[bounds + '_low']:{form}}, {values[bounds + '_high']:{form}}]"
        line += f"{text:>{width}}"
    return line


def bucket_text(results: pd.DataFrame, quantity: str) -> str:
    table = by_bucket(results, quantity)
    title = f"{REAL_SCORES[judged_by(results)]} by {quantity}"
    lines = [f"{title:20}" + "".join(f"{column:>21}" for column in table)]
    for bucket, (tasks, *values) in zip(table.index, table.itertuples(index=False), strict=True):
        lines.append(f"{bucket:20}{tasks:>21}" + "".join(f"{value:>21.4f}" for value in values))
    return "\n".join(lines)


def summary_text(results: pd.DataFrame, which: str = "") -> str:
    """Means over tasks, a line per method; which: what the heading adds to "means of N tasks"."""
    tasks, by = results["data"].nunique(), judged_by(results)
    title = f"means of {tasks} task{'s' if tasks > 1 else ''}{which}"
    columns, wins, lead = SUMMARY_COLUMNS[by], f"win rate of {THIS_MODEL}", f"its lead in {REAL_SCORES[by]}"
    compared = columns | {"win_rate": (wins, 23, ".2f"), "lead": (lead, 29, "+.3f")}
    lines = [f"{title:24}" + "".join(f"{name:>{w}}" for name, w, _ in compared.values())]
    for method, row in summarize(results).iterrows():
        lines.append(f"{method:24}" + cells(row, columns if method == THIS_MODEL else compared))
    return "\n".join(lines)
