"""A picture of the comparison of methods over tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from tabicl_train.evaluation.scores import BUCKETS, bootstrap, by_bucket, by_task, summarise


def save_figure(results: pd.DataFrame, path: Path) -> None:
    """Writes a picture; the format is that of the ending, such as .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_scores(results).savefig(path, dpi=110)


def unknown_format(path: str) -> list[str]:
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") in formats:
        return []
    return [f"figure is {path!r}; its name must end in one of {', '.join('.' + name for name in formats)}"]


def draw_scores(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (means, wins, leads), buckets = figure.subplots(2, 3)
    draw_means(means, results)
    draw_wins(wins, results)
    draw_leads(leads, results)
    for axes, quantity in zip(buckets, BUCKETS, strict=True):
        draw_buckets(axes, results, quantity)
    return figure


def draw_means(axes: Axes, results: pd.DataFrame) -> None:
    auc = by_task(results, "roc_auc")
    for i, method in enumerate(auc):
        low, high = bootstrap(auc[method].to_numpy())
        axes.plot([low, high], [i, i], color=f"C{i}")
        axes.plot(auc[method].mean(), i, "o", color=f"C{i}")
    axes.set_yticks(range(auc.shape[1]), auc.columns)
    axes.margins(y=0.2)
    axes.invert_yaxis()
    axes.set_title(f"mean ROC AUC of {len(auc)} tasks, 95 % interval over tasks")


def draw_wins(axes: Axes, results: pd.DataFrame) -> None:
    first, *others = by_task(results, "roc_auc")
    summary = summarise(results)
    for i, method in enumerate(others, start=1):
        row = summary.loc[method]
        axes.plot([row.win_low, row.win_high], [i, i], color=f"C{i}")
        axes.plot(row.win_rate, i, "o", color=f"C{i}")
    axes.axvline(0.5, color="grey", linewidth=1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_yticks(range(1, len(others) + 1), others)
    axes.margins(y=0.2)
    axes.invert_yaxis()
    axes.set_title(f"share of tasks on which {first} has the higher ROC AUC")


def draw_leads(axes: Axes, results: pd.DataFrame) -> None:
    auc = by_task(results, "roc_auc")
    first, *others = auc
    for i, method in enumerate(others, start=1):
        axes.plot(np.sort(auc[first] - auc[method]), ".-", color=f"C{i}", label=f"minus {method}")
    axes.axhline(0, color="grey", linewidth=1)
    axes.set_xlabel("tasks, each line in its own order")
    axes.set_title(f"ROC AUC of {first}, task by task")
    axes.legend()


def draw_buckets(axes: Axes, results: pd.DataFrame, quantity: str) -> None:
    table = by_bucket(results, quantity)
    tasks = table.pop("tasks")
    for i, method in enumerate(table):
        axes.plot(range(len(table)), table[method], "o-", color=f"C{i}", label=method)
    axes.set_xticks(range(len(table)), [f"{bucket}\n{count} tasks" for bucket, count in tasks.items()])
    axes.set_title(f"ROC AUC by {quantity}")
    axes.legend()
