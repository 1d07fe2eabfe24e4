"""Curves over the steps of one or several runs, each run given as the data frame of one of its files."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from tabicl_train.config.monitoring import OWN, REAL, REAL_SCORES, SYNTHETIC, kind_of

WINDOWS = 40  # a smoothed curve is a moving average over one fortieth of the longest run
RATIO_WINDOWS = 20  # the same for the ratio of losses

Runs = dict[str, pd.DataFrame]


def draw_training(metrics: Runs, batches: Runs, validation: Runs) -> Figure:
    """Loss, gradient norm and learning rate from metrics.csv; for runs whose batches.csv has the loss of guessing, also
    the ratio of the two losses."""
    ratios = {name: loss_ratios(rows) for name, rows in batches.items() if "guess_loss" in rows}
    points = {
        name: loss_ratios(of_kind(rows, OWN, SYNTHETIC).assign(tables=1))
        for name, rows in validation.items()
        if "guess_loss" in rows
    }
    figure = Figure(figsize=(11, 6), layout="constrained")
    top = ["loss", "ratio"] if ratios else ["loss", "loss"]
    panels = figure.subplot_mosaic([top, ["grad_norm", "lr"]], height_ratios=[3, 2])
    for column, title in (("loss", "loss"), ("grad_norm", "gradient norm before clipping"), ("lr", "learning rate")):
        draw_curves(panels[column], metrics, column, smooth=column != "lr")
        label_steps(panels[column], title)
    panels["grad_norm"].set_yscale("log")
    ticks = panels["grad_norm"].yaxis
    ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ticks.set_major_formatter("{x:g}")
    ticks.set_minor_formatter("")  # labels at every multiple would overlap
    if ratios:
        draw_ratios(panels["ratio"], list(metrics), ratios, points)
    return figure


def label_steps(axes: Axes, title: str) -> None:
    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def loss_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """By step, sums over tables of the loss and of the loss of guessing, and their ratio, which is comparable between
    tables of few and of many classes."""
    sums = rows[["loss", "guess_loss"]].mul(rows["tables"], axis=0).groupby(rows["step"]).sum(min_count=1)
    sums = sums[np.isfinite(sums).all(axis=1)]
    return sums.assign(ratio=sums["loss"] / sums["guess_loss"])


def draw_ratios(axes: Axes, names: list[str], ratios: Runs, points: Runs) -> None:
    """Per run: the ratio of every step, faintly, the ratio of moving sums, and the validations as points."""
    single = len(names) == 1
    for i, name in enumerate(names):
        if name in ratios:
            steps, label = ratios[name], "training" if single else name
            # Centered: a trailing window would lag behind the points of the validations.
            windows = steps.rolling(max(1, len(steps) // RATIO_WINDOWS), min_periods=1, center=True).sum()
            axes.plot(steps.index, steps["ratio"], color=f"C{i}", alpha=0.25, linewidth=0.8)
            axes.plot(steps.index, windows["loss"] / windows["guess_loss"], color=f"C{i}", label=label)
        if name in points:
            color, label = ("C1", "validation, held-out tables") if single else (f"C{i}", f"{name}, validation")
            axes.plot(points[name]["ratio"], "o", color=color, markeredgecolor="white", label=label)
    axes.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    _, high = axes.get_ylim()
    # The first steps lose up to three times as much as guessing; the axis is made for the second half of the runs.
    late = [rows["ratio"][rows.index > rows.index.max() / 2].median() for rows in ratios.values()]
    axes.set_ylim(top=min(high, 1.3 * np.nanmax([1, *late])))
    label_steps(axes, "loss relative to guessing from the labels alone")
    axes.legend(fontsize="small")


def draw_throughput(runs: Runs) -> Figure:
    """Tables and cells per second, and the share of the time spent waiting for tables, from metrics.csv."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    titles = {"tables_per_s": "tables/s", "cells_per_s": "cells/s", "data_wait": "share of time waiting for tables"}
    for axes, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        draw_curves(axes, runs, column)
        label_steps(axes, title)
        axes.set_ylim(bottom=0)
    return figure


def draw_curves(axes: Axes, runs: Runs, column: str, smooth: bool = True) -> None:
    """Per run: the logged values, faintly, and their moving average; for a single run, also where its stages start."""
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
    """Loss on held-out tables, of your own and synthetic ones, and ROC AUC or R2 on public real data, from
    validation.csv: means, and for a single run also every set of tables."""
    real = [of_kind(rows, REAL) for rows in runs.values()]
    scores = {score: name for score, name in REAL_SCORES.items() if any(len(own) and score in own for own in real)}
    kinds = [kind for kind in (OWN, SYNTHETIC) if any(len(of_kind(rows, kind)) for rows in runs.values())]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = list(figure.subplots(1, len(kinds) + len(scores), squeeze=False)[0])
    for axes, kind in zip(panels, kinds, strict=False):
        draw_sets(axes, {name: of_kind(rows, kind) for name, rows in runs.items()}, "loss")
        label_steps(axes, f"loss on held-out {kind} tables")
    for axes, (score, title) in zip(panels[len(kinds) :], scores.items(), strict=True):
        draw_sets(axes, {name: of_kind(rows, REAL) for name, rows in runs.items() if score in rows}, score)
        label_steps(axes, f"{title} on real data")
    return figure


def of_kind(validation: pd.DataFrame, *kinds: str) -> pd.DataFrame:
    """The rows about tables of these kinds."""
    return validation[validation["data"].map(kind_of).isin(kinds)]


def draw_sets(axes: Axes, runs: Runs, column: str) -> None:
    """A curve per run: the mean of a column over the sets of tables; for a single run also a curve per set."""
    for i, (name, validation) in enumerate(runs.items()):
        is_real = validation["data"].map(kind_of) == REAL
        sets = validation["data"].where(is_real, validation["rows"].astype(str) + " rows")
        table = validation.pivot_table(column, "step", sets.rename("set"), sort=False)
        if table.empty:
            continue
        if len(runs) == 1:
            for j, (label, values) in enumerate(table.items(), start=1):
                axes.plot(values.index, values, ".-", color=f"C{j}", linewidth=0.9, label=label)
        mean = "mean" if len(runs) == 1 else name
        axes.plot(table.index, table.mean(axis=1), "o-", color=f"C{i}", linewidth=2, label=mean)
        axes.legend(fontsize="small")
