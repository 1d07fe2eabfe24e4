"""Figures that put several runs beside each other, each given as the data frame of one of its files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tabicl_train.config.schema import SYNTHETIC

WINDOWS = 40  # parts of the longest run; a smooth line is a moving average over one
RATIO_WINDOWS = 20

Runs = dict[str, pd.DataFrame]


def draw_training(metrics: Runs, batches: Runs, validation: Runs) -> Figure:
    """Loss, gradient norm and learning rate of metrics.csv; beside the loss its ratio to that of guessing, where a run
    has measured it."""
    ratios = {name: loss_ratios(rows) for name, rows in batches.items() if "guess_loss" in rows}
    points = {
        name: loss_ratios(rows[rows["data"] == SYNTHETIC].assign(tables=1))
        for name, rows in validation.items()
        if "guess_loss" in rows
    }
    figure = Figure(figsize=(11, 6), layout="constrained")
    top = ["loss", "ratio"] if ratios else ["loss", "loss"]
    panels = figure.subplot_mosaic([top, ["grad_norm", "lr"]], height_ratios=[3, 2])
    for column, title in (("loss", "loss"), ("grad_norm", "gradient norm before clipping"), ("lr", "learning rate")):
        draw_lines(panels[column], metrics, column, smooth=column != "lr")
        panels[column].set(title=title, xlabel="step")
    panels["grad_norm"].set_yscale("log")
    if ratios:
        draw_ratios(panels["ratio"], list(metrics), ratios, points)
    return figure


def loss_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """By step: the loss and that of guessing the frequencies of the labels, sums over tables, and their ratio, which
    tables of few and of many classes have in common."""
    sums = rows[["loss", "guess_loss"]].mul(rows["tables"], axis=0).groupby(rows["step"]).sum(min_count=1)
    sums = sums[np.isfinite(sums).all(axis=1)]
    return sums.assign(ratio=sums["loss"] / sums["guess_loss"])


def draw_ratios(axes: Axes, names: list[str], ratios: Runs, points: Runs) -> None:
    """A line a run: every step, faintly, and a moving ratio of sums; and the validations' points."""
    alone = len(names) == 1
    for i, name in enumerate(names):
        if name in ratios:
            steps, label = ratios[name], "training" if alone else name
            # centred, since the points of the validation are not behind either
            windows = steps.rolling(max(1, len(steps) // RATIO_WINDOWS), min_periods=1, center=True).sum()
            axes.plot(steps.index, steps["ratio"], color=f"C{i}", alpha=0.25, linewidth=0.8)
            axes.plot(steps.index, windows["loss"] / windows["guess_loss"], color=f"C{i}", label=label)
        if name in points:
            colour, label = ("C1", "validation, synthetic tables") if alone else (f"C{i}", f"{name}, validation")
            axes.plot(points[name]["ratio"], "o", color=colour, markeredgecolor="white", label=label)
    axes.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    low, high = axes.get_ylim()
    axes.set_ylim(top=min(high, 1.3 * max(low, 1)))  # the first steps lose up to three times as much as guessing
    axes.set(title="loss / loss of guessing the frequencies of the labels", xlabel="step")
    axes.legend(fontsize="small")


def draw_throughput(runs: Runs) -> Figure:
    """Tables a second, cells a second, and the share of the time spent waiting for tables, of metrics.csv."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    titles = {"tables_per_s": "tables/s", "cells_per_s": "cells/s", "data_wait": "share of time waiting for tables"}
    for axes, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        draw_lines(axes, runs, column)
        axes.set(title=title, xlabel="step")
        axes.set_ylim(bottom=0)
    return figure


def draw_lines(axes: Axes, runs: Runs, column: str, smooth: bool = True) -> None:
    """A line a run: what was logged, faintly, and its moving average; where there is one run, its stages."""
    window = max(1, max(map(len, runs.values())) // WINDOWS)
    for i, (name, metrics) in enumerate(runs.items()):
        values = metrics[column].where(np.isfinite(metrics[column]))
        if smooth:
            axes.plot(metrics["step"], values, color=f"C{i}", alpha=0.25, linewidth=0.8)
            values = values.rolling(window, min_periods=1).mean()
        axes.plot(metrics["step"], values, color=f"C{i}", label=name)
    if len(runs) > 1:
        axes.legend(fontsize="small")
        return
    (metrics,) = runs.values()
    for step in metrics["step"][metrics["stage"] != metrics["stage"].shift()][1:]:
        axes.axvline(step, color="0.7", linewidth=0.8, zorder=0)


def draw_validation(runs: Runs) -> Figure:
    """Loss on the synthetic tables and ROC AUC on the real ones of validation.csv; means where there are several runs,
    otherwise also every set of tables."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    losses, scores = figure.subplots(1, 2)
    draw_sets(losses, runs, "loss", lambda rows: rows[rows["data"] == SYNTHETIC], "rows")
    draw_sets(scores, runs, "roc_auc", lambda rows: rows[rows["data"] != SYNTHETIC], "data")
    losses.set(title="cross entropy on frozen synthetic tables", xlabel="step")
    scores.set(title="ROC AUC on real data", xlabel="step")
    return figure


def draw_sets(axes: Axes, runs: Runs, column: str, choose: Callable, key: str) -> None:
    for i, (name, validation) in enumerate(runs.items()):
        table = choose(validation).pivot_table(column, "step", key, sort=False)
        if len(runs) == 1:
            for j, (label, values) in enumerate(table.items(), start=1):
                text = f"{label} rows" if key == "rows" else label
                axes.plot(values.index, values, ".-", color=f"C{j}", linewidth=0.9, label=text)
        if not table.empty:
            mean = "mean" if len(runs) == 1 else name
            axes.plot(table.index, table.mean(axis=1), "o-", color=f"C{i}", linewidth=2, label=mean)
            axes.legend(fontsize="small")
