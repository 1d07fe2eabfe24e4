"""Figures of a run, from the files it writes. Each function reads a run directory and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.outputs import check_output
from tabicl_train.run_dir.records import Records

if TYPE_CHECKING:  # matplotlib is an extra
    import pandas as pd
    from matplotlib.figure import Figure

LINES = 150  # logged steps in the picture of the multipliers, evenly over the run
WINDOWS = 40  # parts of a run, over which the loss is averaged
COLUMNS = 4  # panels beside each other


def draw_scaling(run_dir: Path) -> Figure:
    """The base multiplier of every scalable softmax against n, the labelled rows, over training.

    A line joins the smallest and the largest n of a logged step; its colour is the step.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = Records(run_dir).rows("scaling.csv")
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    steps = sorted({int(row["step"]) for row in rows})
    shown = {steps[i] for i in np.linspace(0, len(steps) - 1, LINES).astype(int)}
    columns = min(COLUMNS, len(layers))
    figure = Figure(figsize=(3.2 * columns + 1, 2.7 * -(-len(layers) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(layers) // columns), columns, squeeze=False, sharex=True).flat
    colours = ScalarMappable(cmap="viridis")
    colours.set_clim(0, steps[-1])
    for axes, layer in zip(panels, layers, strict=False):
        mine = [row for row in rows if row["layer"] == layer and int(row["step"]) in shown]
        ends = np.array([[float(row[f"{what}_{end}"]) for end in ENDS for what in ("n", "at")] for row in mine])
        segments = LineCollection(ends.reshape(-1, 2, 2), cmap=colours.cmap, norm=colours.norm, linewidth=0.9)
        segments.set_array([int(row["step"]) for row in mine])
        axes.add_collection(segments)
        axes.set(xscale="log", title=layer, ylim=(0, 1.08 * ends[:, [1, 3]].max()))
        axes.set_xlim(ends[:, 0].min() / 1.1, ends[:, 2].max() * 1.1)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(labelsize="small")
    for axes in list(panels)[len(layers) :]:
        axes.set_axis_off()
    figure.supxlabel("labelled rows n (log scale)")
    figure.supylabel("largest base multiplier")
    figure.colorbar(colours, ax=figure.axes, label="step", aspect=30)
    return figure


ENDS = ("smallest", "largest")


def draw_losses(run_dir: Path, by: str) -> Figure:
    """Loss by rows, in buckets of powers of two, or by classes: over training, and at each stage's end."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    group_of, name_of = GROUPS[by]
    rows = Records(run_dir).rows("batches.csv")
    step, tables, loss, group = (
        np.array([convert(row) for row in rows])
        for convert in (
            lambda row: int(row["step"]),
            lambda row: int(row["tables"]),
            lambda row: float(row["loss"]),
            lambda row: group_of(int(row[by])),
        )
    )
    stages = np.array([row["stage"] for row in rows])
    groups = np.unique(group)
    figure = Figure(figsize=(11, 4), layout="constrained")
    over_time, at_end = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    window = np.minimum(step * WINDOWS // (step.max() + 1), WINDOWS - 1)
    for g, colour in zip(groups, colormaps["viridis"](np.linspace(0, 0.95, len(groups))), strict=True):
        means = weighted_means(window[group == g], loss[group == g], tables[group == g])
        at = [(w + 0.5) * step.max() / WINDOWS for w in means]
        over_time.plot(at, list(means.values()), marker=".", color=colour, label=name_of(g))
    names = list(dict.fromkeys(stages))
    for name in names:
        mine = stages == name
        if name != names[0]:
            over_time.axvline(step[mine].min(), color="0.7", linewidth=0.8, zorder=0)
        late = mine & (step >= last_quarter(step[mine]))
        means = weighted_means(group[late], loss[late], tables[late])
        at_end.plot(list(means), list(means.values()), marker="o", label=name)
    over_time.set(xlabel="step (grey: a new stage)", ylabel="loss, mean over tables", title="over training")
    at_end.set(xlabel=by, title="last quarter of each stage")
    at_end.set_xticks(groups, [name_of(g) for g in groups], fontsize="small")
    over_time.legend(title=by, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    at_end.legend(fontsize="small")
    return figure


def last_quarter(steps: np.ndarray | pd.Series) -> float:
    """The step with which the last quarter of a stage begins."""
    return steps.max() - (steps.max() - steps.min()) / 4


def bucket_of(rows: int) -> int:
    """Buckets are powers of two."""
    return rows.bit_length() - 1


def bucket_name(bucket: int) -> str:
    return f"{2**bucket:,}..{2 ** (bucket + 1) - 1:,}"


def weighted_means(keys: np.ndarray, values: np.ndarray, weights: np.ndarray) -> dict[int, float]:
    """The weighted mean of the values of each key, by ascending key."""
    return {int(k): float(np.average(values[keys == k], weights=weights[keys == k])) for k in np.unique(keys)}


# What losses are told by: the group of a table, and its name.
GROUPS: dict[str, tuple[Callable[[int], int], Callable[[int], str]]] = {
    "rows": (bucket_of, bucket_name),
    "classes": (int, str),
}

# By name: the file that it is drawn from, and the function. Without a scalable softmax a run has no scaling.csv.
FIGURES: dict[str, tuple[str, Callable[[Path], Figure]]] = {
    "scaling": ("scaling.csv", draw_scaling),
    "loss_by_rows": ("batches.csv", partial(draw_losses, by="rows")),
    "loss_by_classes": ("batches.csv", partial(draw_losses, by="classes")),
}


def save_figures(run_dir: Path) -> list[Path]:
    """What can be drawn of a run, as RUN_DIR/figures/NAME.png."""
    written = []
    for name, (source, draw) in FIGURES.items():
        if Records(run_dir).rows(source):
            written.append(run_dir / "figures" / f"{name}.png")
            check_output(written[-1])
            draw(run_dir).savefig(written[-1], dpi=120)
    if not written:
        files = " or ".join(dict.fromkeys(source for source, _ in FIGURES.values()))
        raise ConfigError([f"run_dir is '{run_dir}'; there is no row of {files}"])
    return written
