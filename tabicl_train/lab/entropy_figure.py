"""The figure of the experiment entropy: the attention of a network against the number of labeled rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tabicl_train.report.figures import scale_labeled_rows

MEASURES = {
    "entropy": "entropy / log n",
    "top_weight": "largest weight",
    "gap_mean": "largest logit minus mean",
    "base_largest": "largest base multiplier",
    "gate_mean": "mean gate",
}
KINDS = {
    "inducing points": "inducing points of the columns",
    "labeled rows": "in context: labeled rows",
    "query rows": "in context: query rows",
}


def draw_attention(measures: pd.DataFrame) -> Figure:
    """Draw means over heads and tables with bands of all heads: measures in rows, kinds of queries in columns."""
    shown = [name for name in MEASURES if measures[name].notna().any()]
    kinds = [kind for kind in KINDS if kind in set(measures["queries"])]
    depths = measures.groupby("stage")["layer"].max()
    figure = Figure(figsize=(3.7 * len(kinds), 2.3 * len(shown) + 0.4), layout="constrained")
    grid = figure.subplots(len(shown), len(kinds), squeeze=False, sharex=True, sharey="row")
    for panels, name in zip(grid, shown, strict=True):
        panels[0].set_ylabel(MEASURES[name])
        for axes, kind in zip(panels, kinds, strict=True):
            rows_of_kind = measures[measures["queries"] == kind]
            draw_layers(axes, rows_of_kind, name, depths[rows_of_kind["stage"].iloc[0]])
    for axes, kind in zip(grid[0], kinds, strict=True):
        axes.set_title(KINDS[kind], fontsize="medium")
        axes.legend(title="layer", fontsize="x-small", title_fontsize="x-small", ncols=2)
        axes.set_ylim(0, 1.05)
    figure.supxlabel("labeled rows n (log scale)", fontsize="medium")
    return figure


def draw_layers(axes: Axes, measures: pd.DataFrame, name: str, depth: int) -> None:
    """Draw a line for each layer of a stage; `depth` is its last layer, so that colors are the same in all panels."""
    heads = measures.groupby(["layer", "head", "n"])[name].mean().dropna()  # over tables
    for layer in heads.index.unique("layer"):
        color = colormaps["viridis"](0.9 * layer / max(depth, 1))
        by_n = heads[layer].groupby("n")
        mean = by_n.mean()
        axes.plot(mean, ".-", color=color, linewidth=1.2, label=str(layer))
        axes.fill_between(mean.index, by_n.min(), by_n.max(), color=color, alpha=0.12, linewidth=0)
    if name == "gap_mean" and len(measures):
        n = np.unique(measures["n"])
        axes.plot(n, np.log(n), color="0.5", linestyle="--", linewidth=1, label="log n")
        axes.annotate("log n", (n[-1], np.log(n[-1])), ha="right", va="bottom", fontsize="small", color="0.4")
    scale_labeled_rows(axes)
