"""The attention of a network against the number of labeled rows, as lab/instruments.py measures it, and its gates over
training, from the rows of scaling.csv."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

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
    """A row of panels per measure, a column per kind of queries, a line per layer: means over heads and tables; the
    band reaches from the lowest to the highest head."""
    shown = [name for name in MEASURES if measures[name].notna().any()]
    kinds = [kind for kind in KINDS if kind in set(measures["queries"])]
    depths = measures.groupby("stage")["layer"].max()
    figure = Figure(figsize=(3.7 * len(kinds), 2.3 * len(shown) + 0.4), layout="constrained")
    grid = figure.subplots(len(shown), len(kinds), squeeze=False, sharex=True, sharey="row")
    for panels, name in zip(grid, shown, strict=True):
        panels[0].set_ylabel(MEASURES[name])
        for axes, kind in zip(panels, kinds, strict=True):
            of_kind = measures[measures["queries"] == kind]
            draw_layers(axes, of_kind, name, depths[of_kind["stage"].iloc[0]])
    for axes, kind in zip(grid[0], kinds, strict=True):
        axes.set_title(KINDS[kind], fontsize="medium")
        axes.legend(title="layer", fontsize="x-small", title_fontsize="x-small", ncols=2)
        axes.set_ylim(0, 1.05)
    figure.supxlabel("labeled rows n (log scale)", fontsize="medium")
    return figure


def draw_layers(axes: Axes, measures: pd.DataFrame, name: str, depth: int) -> None:
    """depth: number of the stage's last layer, so that a layer has the same color in all panels of the stage"""
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
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize="small")


def draw_gates(scaling: pd.DataFrame) -> Figure | None:
    """Mean and standard deviation of the gate of each layer over the steps; None if no layer has a gate."""
    gates = scaling[scaling["gate_mean"].notna()]
    if gates.empty:
        return None
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    layers = list(gates["layer"].unique())
    for axes, column, title in zip(
        panels, ("gate_mean", "gate_std"), ("mean of the gate", "standard deviation of the gate"), strict=True
    ):
        for color, layer in zip(colormaps["viridis"](np.linspace(0, 0.9, len(layers))), layers, strict=True):
            own = gates[gates["layer"] == layer]
            axes.plot(own["step"], own[column], color=color, linewidth=1, label=layer)
        axes.set(title=title, xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small", title="layer")
    return figure
