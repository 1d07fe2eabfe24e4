"""The comparison of methods over tasks, as tables for the terminal."""

from __future__ import annotations

import math

import pandas as pd

from tabicl_train.config.schema import REAL_SCORES, judged_by
from tabicl_train.console import counted, text_table
from tabicl_train.evaluation.scores import BUCKETS, FORMATS, by_bucket, by_task, judged, relative_rmse, summarize
from tabicl_train.prediction.origin import TrainedRange

THIS_MODEL = "this model"
COMPARED = ("win_rate", "lead")  # of other methods
TASK_SCORES = {"roc_auc": ("roc_auc", "log_loss", "accuracy"), "r2": ("r2", "relative_rmse", "pinball", "coverage")}


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
    """The TASK_SCORES of every task and method, and their means, in which R2 below 0 counts as 0."""
    by = judged_by(results)
    names = TASK_SCORES[by]
    tables = {name: relative_rmse(results) if name == "relative_rmse" else by_task(results, name) for name in names}
    means = {name: table.mean() for name, table in tables.items()} | {by: judged(results).mean()}
    lines = [
        [task, method, *(cell(table.loc[task, method], FORMATS[name][1]) for name, table in tables.items())]
        for task in tables[by].index
        for method in tables[by]
    ]
    for method in tables[by]:
        lines.append(["mean", method, *(cell(means[name][method], FORMATS[name][1]) for name in names)])
    return text_table(["task", "method", *(FORMATS[name][0] for name in names)], lines)


def cell(value: float, form: str) -> str:
    """A number; a dash for nan, and few digits for a long one, since an R2 may be -1e30."""
    if math.isnan(value):
        return "-"
    text = f"{value:{form}}"
    return text if len(text) <= 9 else f"{value:.0e}"


def bucket_text(results: pd.DataFrame, quantity: str) -> str:
    table = by_bucket(results, quantity)
    title = f"{REAL_SCORES[judged_by(results)]} by {quantity}"
    rows = zip(table.index, table.itertuples(index=False), strict=True)
    lines = [[bucket, tasks, *(f"{value:.4f}" for value in values)] for bucket, (tasks, *values) in rows]
    return text_table([title, *table], lines)


def summary_text(results: pd.DataFrame, which: str = "") -> str:
    """Means over tasks, a line per method; which: what the heading adds to "means of N tasks"."""
    by = judged_by(results)
    summary = summarize(results)
    columns = {name: FORMATS[name] for name in FORMATS if name in summary}
    columns["win_rate"] = f"win rate of {THIS_MODEL}", ".2f"
    columns["lead"] = f"its lead in {REAL_SCORES[by]}", "+.3f"
    lines = []
    for method, row in summary.iterrows():
        texts = []
        for name, (_, form) in columns.items():
            ends = [row.get(f"{name.removesuffix('_rate')}_{end}", math.nan) for end in ("low", "high")]
            interval = "" if any(map(math.isnan, ends)) else f" [{ends[0]:{form}}, {ends[1]:{form}}]"
            texts.append(cell(row[name], form) + interval if method != THIS_MODEL or name not in COMPARED else "")
        lines.append([method, *texts])
    title = f"means of {counted(results['data'].nunique(), 'task')}{which}"
    return text_table([title, *(heading for heading, _ in columns.values())], lines)
