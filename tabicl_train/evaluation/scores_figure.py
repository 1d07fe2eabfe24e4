"""The comparison of methods over tasks, as a figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tabicl_train.config.schema import REAL_SCORES, judged_by
from tabicl_train.evaluation.scores import BUCKETS, COVERAGE, by_bucket, by_task, judged, summarize
from tabicl_train.statistics import mean_interval


def save_figure(results: pd.DataFrame, path: Path) -> None:
    """Write the figure in the format of the file name extension, such as .png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_scores(results).savefig(path, dpi=110)


def unknown_format(path: str) -> list[str]:
    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") in formats:
        return []
    return [f"figure is {path!r}; its name must end in one of {', '.join('.' + name for name in formats)}"]


def draw_scores(results: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12)  # inches
    (means, wins, leads), others = figure.subplots(2, 3)
    draw_means(means, results)
    draw_wins(wins, results)
    draw_leads(leads, results)
    quantities = [quantity for quantity in BUCKETS if quantity in results]
    for axes, quantity in zip(others, quantities, strict=False):
        draw_buckets(axes, results, quantity)
    if "coverage" in results:
        draw_coverage(others[-1], results)
    return figure


def score_name(results: pd.DataFrame) -> str:
    return REAL_SCORES[judged_by(results)]


def draw_means(axes: Axes, results: pd.DataFrame) -> None:
    scores = judged(results)
    draw_intervals(axes, scores)
    axes.set_title(f"mean {score_name(results)} over {len(scores)} task{'s' if len(scores) > 1 else ''}")
    axes.set_xlabel("with 95 % confidence intervals" + (", values below 0 count as 0" if "r2" in results else ""))


def draw_intervals(axes: Axes, table: pd.DataFrame) -> None:
    """Means of the columns without nan, and their intervals."""
    shown = [(i, method) for i, method in enumerate(table) if table[method].notna().all()]
    for place, (i, method) in enumerate(shown):
        found = mean_interval(table[method].to_numpy(), 0, 1)
        axes.plot([found.low, found.high], [place, place], color=f"C{i}")
        axes.plot(found.mean, place, "o", color=f"C{i}")
    axes.set_yticks(range(len(shown)), [method for _, method in shown])
    axes.margins(y=0.2)
    axes.invert_yaxis()


def draw_coverage(axes: Axes, results: pd.DataFrame) -> None:
    draw_intervals(axes, by_task(results, "coverage"))
    axes.axvline(COVERAGE, color="gray", linewidth=1)
    axes.set_title(f"coverage of {COVERAGE:.0%} intervals")
    axes.set_xlabel("means with 95 % confidence intervals over tasks")


def draw_wins(axes: Axes, results: pd.DataFrame) -> None:
    first, *others = judged(results)
    summary = summarize(results)
    for i, method in enumerate(others, start=1):
        row = summary.loc[method]
        axes.plot([row.win_low, row.win_high], [i, i], color=f"C{i}")
        axes.plot(row.win_rate, i, "o", color=f"C{i}")
    axes.axvline(0.5, color="gray", linewidth=1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_yticks(range(1, len(others) + 1), others)
    axes.margins(y=0.2)
    axes.invert_yaxis()
    axes.set_title(f"win rate of {first}")
    axes.set_xlabel(f"share of tasks with the higher {score_name(results)}")


def draw_leads(axes: Axes, results: pd.DataFrame) -> None:
    scores = judged(results)
    first, *others = scores
    for i, method in enumerate(others, start=1):
        leads = np.sort(scores[first] - scores[method])
        axes.plot(range(1, len(scores) + 1), leads, ".-", color=f"C{i}", label=f"over {method}")
    axes.axhline(0, color="gray", linewidth=1)
    axes.set_xlim(0.5, len(scores) + 0.5)
    axes.set_xlabel("tasks, sorted for each method")
    axes.set_title(f"lead of {first} in {score_name(results)}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def draw_buckets(axes: Axes, results: pd.DataFrame, quantity: str) -> None:
    table = by_bucket(results, quantity)
    tasks = table.pop("tasks")
    for i, method in enumerate(table):
        axes.plot(range(len(table)), table[method], "o-", color=f"C{i}", label=method)
    labels = [f"{bucket}\n({count} task{'s' if count > 1 else ''})" for bucket, count in tasks.items()]
    axes.set_xticks(range(len(table)), labels, fontsize="x-small")
    axes.margins(x=0.12)
    axes.set_title(f"mean {score_name(results)} by {quantity}")
    axes.legend(fontsize="small")
