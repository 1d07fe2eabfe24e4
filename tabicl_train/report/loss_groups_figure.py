"""Loss by rows or classes of the tables, from the rows of batches.csv."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tabicl_train.run_dir.loss_groups import GROUPS, weighted_means

WINDOWS = 40  # parts of a run, over each of which the loss is averaged


def draw_loss_groups(batches: pd.DataFrame, by: str) -> Figure:
    """Mean losses by "rows" or "classes": over training, and at the end of each stage."""
    group_of, name_of = GROUPS[by]
    groups = batches[by].map(group_of)
    figure = Figure(figsize=(11, 4), layout="constrained")
    over_time, at_end = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    draw_over_training(over_time, batches, groups, by)
    for stage, means in stage_end_losses(batches, by).items():
        at_end.plot(means.dropna(), marker="o", label=stage)
    numbers = np.unique(groups)
    at_end.set_xticks(numbers, [name_of(number) for number in numbers], fontsize="small")
    at_end.set(xlabel=by, title="last quarter of each stage")
    at_end.legend(title="stage", fontsize="small")
    return figure


def draw_over_training(axes: Axes, batches: pd.DataFrame, groups: pd.Series, by: str) -> None:
    """A line per group, and a vertical one where a stage starts."""
    _, name_of = GROUPS[by]
    end = batches["step"].max()
    windows = (batches["step"] * WINDOWS // (end + 1)).clip(upper=WINDOWS - 1)
    numbers = np.unique(groups)
    for number, color in zip(numbers, colormaps["viridis"](np.linspace(0, 0.95, len(numbers))), strict=True):
        of_group = groups == number
        means = weighted_means(windows[of_group], batches["loss"][of_group], batches["tables"][of_group])
        steps = [(window + 0.5) * end / WINDOWS for window in means]
        axes.plot(steps, list(means.values()), marker=".", color=color, label=name_of(number))
    for start in batches.groupby("stage", sort=False)["step"].min().iloc[1:]:
        axes.axvline(start, color="0.7", linewidth=0.8, zorder=0)
    axes.set(xlabel="step (vertical lines: start of a stage)", ylabel="mean loss", title=f"mean loss by {by}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(title=by, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def stage_end_losses(batches: pd.DataFrame, by: str) -> pd.DataFrame:
    """Mean loss over the tables of the last quarter of each stage: a row per group (its number), a column per stage."""
    group_of, _ = GROUPS[by]
    means = {}
    for stage, rows in batches.groupby("stage", sort=False):
        first, last = rows["step"].min(), rows["step"].max()
        late = rows[rows["step"] >= last - (last - first) / 4]
        means[str(stage)] = weighted_means(late[by].map(group_of), late["loss"], late["tables"])
    return pd.DataFrame(means).sort_index()
