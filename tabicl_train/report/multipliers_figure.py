"""The multipliers of the scalable softmax, from the rows of scaling.csv."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

MAX_LINES = 150  # logged steps that are drawn, evenly spaced over the run
COLUMNS = 4  # panels side by side
ENDS = ["n_smallest", "at_smallest", "n_largest", "at_largest"]


def draw_multipliers(scaling: pd.DataFrame) -> Figure:
    """The largest base multiplier of every scalable softmax against n, the labeled rows, over training.

    A line joins the smallest and the largest n of a logged step; its color is the step.
    """
    layers = list(scaling["layer"].unique())
    steps = np.unique(scaling["step"])
    shown = steps[np.linspace(0, len(steps) - 1, MAX_LINES).astype(int)]
    columns = min(COLUMNS, len(layers))
    rows = math.ceil(len(layers) / columns)
    figure = Figure(figsize=(3.2 * columns + 1, 2.7 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True).flat)
    colors = ScalarMappable(cmap="viridis")
    colors.set_clim(0, steps[-1])
    for axes, layer in zip(panels, layers, strict=False):
        draw_layer(axes, scaling[(scaling["layer"] == layer) & scaling["step"].isin(shown)], colors)
        axes.set_title(layer)
    for axes in panels[len(layers) :]:
        axes.set_axis_off()
    figure.supxlabel("labeled rows n (log scale)")
    figure.supylabel("largest base multiplier")
    figure.colorbar(colors, ax=figure.axes, label="step", aspect=30)
    return figure


def draw_layer(axes: Axes, scaling: pd.DataFrame, colors: ScalarMappable) -> None:
    ends = scaling[ENDS].to_numpy()  # (steps, 4)
    segments = LineCollection(ends.reshape(-1, 2, 2), cmap=colors.cmap, norm=colors.norm, linewidth=0.9)
    segments.set_array(scaling["step"].to_numpy())
    axes.add_collection(segments)
    points, colored = ends.reshape(-1, 2), scaling["step"].repeat(2)  # all there is where a step has a single n
    axes.scatter(*points.T, c=colored, cmap=colors.cmap, norm=colors.norm, s=4)
    axes.set(xscale="log", ylim=(0, 1.08 * ends[:, [1, 3]].max()))
    axes.set_xlim(ends[:, 0].min() / 1.1, ends[:, 2].max() * 1.1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize="small")
