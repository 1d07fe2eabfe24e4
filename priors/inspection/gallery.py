"""Pictures of tables: the two most informative columns, class balance, column kinds, and the plan's causal graph."""

from __future__ import annotations

import base64
import html
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from priors.inspection.describe import FEW_VALUES
from priors.table import Table

POINTS = 500  # rows drawn in a scatter plot
BINS = 8
COLUMNS = 3  # tables side by side
PLAN_LINES = 12


def informative_columns(X: np.ndarray, y: np.ndarray) -> list[int]:
    """Columns by mutual information with the labels, best first, estimated on at most 8 quantile bins a column."""
    scores = []
    for column in X.T:
        edges = np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1]))
        joint = np.zeros((len(edges) + 1, y.max() + 1))
        np.add.at(joint, (np.searchsorted(edges, column), y), 1 / len(y))
        independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
        inside = joint > 0
        scores.append((joint[inside] * np.log(joint[inside] / independent[inside])).sum())
    return np.argsort(scores)[::-1].tolist()


def save_gallery(tables: list[tuple[str, Table]], path: Path) -> list[Path]:
    """Write `path` as PNG, and beside it an HTML page with the picture and every plan as text.

    tables: (title, table), for instance titled by their addresses
    """
    from matplotlib.figure import Figure

    rows = -(-len(tables) // COLUMNS)
    figure = Figure(figsize=(6.4 * COLUMNS, 4.0 * rows), layout="constrained")
    for cell, (title, table) in zip(figure.subfigures(rows, COLUMNS, squeeze=False).flat, tables, strict=False):
        draw_table(cell, title, table)
    path = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    page = path.with_suffix(".html")
    page.write_text(as_html(tables, path.read_bytes()))
    return [path, page]


def draw_table(cell: Any, title: str, table: Table) -> None:
    X, y = table.X.cpu().numpy(), table.y.cpu().numpy()
    cell.suptitle(f"{title}: {len(y)} rows, {X.shape[1]} features", fontsize=10, fontweight="bold")
    axes = cell.subplot_mosaic([["scatter", "plan"], ["scatter", "plan"], ["classes", "kinds"]], width_ratios=[1, 1.15])
    draw_scatter(axes["scatter"], X, y)
    counts = np.bincount(y, minlength=table.num_classes)
    axes["classes"].bar(range(len(counts)), counts / len(y), color=[class_color(c) for c in range(len(counts))])
    axes["classes"].set_xticks(range(len(counts)))
    axes["classes"].set_title("class balance", fontsize=8)
    draw_kinds(axes["kinds"], X)
    draw_plan(axes["plan"], table.plan)
    for ax in axes.values():
        ax.tick_params(labelsize=7)


def class_color(c: int) -> str:
    return f"C{c}"  # the default cycle has ten colours, one a class


def draw_scatter(ax: Any, X: np.ndarray, y: np.ndarray) -> None:
    best = informative_columns(X, y)[:2]
    X, y = spread(X[:POINTS, best]), y[:POINTS]
    second = X[:, 1] if len(best) > 1 else np.linspace(-1, 1, len(y))  # a single column: rows side by side
    for c in np.unique(y):
        ax.scatter(X[y == c, 0], second[y == c], s=8, alpha=0.7, linewidths=0, color=class_color(c))
    ax.set_xlabel(f"column {best[0]} of X", fontsize=8)
    ax.set_ylabel(f"column {best[1]} of X" if len(best) > 1 else "row", fontsize=8)


def spread(X: np.ndarray) -> np.ndarray:
    """Columns of few values with a little noise, so that equal points do not hide each other."""
    few = np.array([len(np.unique(column)) <= FEW_VALUES for column in X.T])
    return X + few * 0.03 * np.ptp(X, axis=0) * np.random.default_rng(0).uniform(-1, 1, X.shape)


def draw_kinds(ax: Any, X: np.ndarray) -> None:
    """Distinct values of every column, sorted: categorical columns stay low, continuous ones reach the rows."""
    distinct = np.sort([len(np.unique(column)) for column in X.T])
    few = distinct <= FEW_VALUES
    position = np.arange(len(distinct))
    ax.bar(position[few], distinct[few], width=1.0, color="tab:orange")
    ax.bar(position[~few], distinct[~few], width=1.0, color="tab:blue")
    ax.set_yscale("log")
    ax.set_ylim(1, 2 * len(X))
    ax.set_xticks([])
    ax.set_title(f"distinct values: {few.sum()} categorical, {(~few).sum()} numeric columns", fontsize=8)


def draw_plan(ax: Any, plan: Any) -> None:
    """The causal graph of a plan that has one (`nodes` with `edges()` and `columns`), else the head of its text."""
    ax.set_axis_off()
    if hasattr(plan, "nodes"):
        draw_graph(ax, plan.nodes)
        return
    lines = [piece for line in str(plan).splitlines() for piece in textwrap.wrap(line, 58, subsequent_indent="  ")]
    ax.text(0, 1, "\n".join(lines[:PLAN_LINES]), fontsize=6, va="top", family="monospace", transform=ax.transAxes)


def draw_graph(ax: Any, nodes: list) -> None:
    """Nodes in layers from left to right, each as far right as its longest path from a root."""
    depth: dict[int, int] = {}
    for node in nodes:
        depth[node.index] = max((depth[parent] + 1 for parent, _ in node.edges()), default=0)
    layers: dict[int, list[int]] = {}
    for node in nodes:
        layers.setdefault(depth[node.index], []).append(node.index)
    # Layers are shifted against each other, so that edges over two layers do not hide behind nodes.
    place = {
        index: (d, (i + 0.5 + 0.2 * (d % 2)) / len(layer))
        for d, layer in layers.items()
        for i, index in enumerate(layer)
    }
    few = sum(len(node.edges()) for node in nodes) <= 8
    arrow = {"arrowstyle": "->", "color": "0.6", "shrinkA": 4, "shrinkB": 4, "linewidth": 0.8}
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    for node in nodes:
        for parent, function in node.edges():
            (x0, y0), (x1, y1) = place[parent], place[node.index]
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=arrow | {"alpha": 1.0 if few else 0.35})
            if few:
                kind = str(function).split("(")[0]
                ax.text((x0 + x1) / 2, (y0 + y1) / 2, kind, fontsize=6, color="0.35", ha="center", bbox=white)
    for node in nodes:
        x, y = place[node.index]
        names = [column.name for column in node.columns]
        target = "y" in names
        ax.plot(x, y, "o", color="tab:red" if target else ("tab:blue" if names else "0.8"), markersize=7)
        shown = ["y"] * target + [name for name in names if name != "y"]
        label = ", ".join(shown[:4]) + (f" +{len(shown) - 4}" if len(shown) > 4 else "")
        if label:
            ax.annotate(label, (x, y), (0, 7), textcoords="offset points", fontsize=7, ha="center", bbox=white)
    ax.set_xlim(-0.4, max(depth.values()) + 0.4)
    ax.set_ylim(-0.05, 1.15)


def as_html(tables: list[tuple[str, Table]], png: bytes) -> str:
    plans = "\n".join(
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(str(table.plan))}</pre></details>"
        for title, table in tables
    )
    picture = base64.b64encode(png).decode()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Tables</title>'
        "<style>body{font:15px sans-serif;margin:2em}img{max-width:100%}pre{background:#f4f4f4;padding:1em;"
        "overflow-x:auto}</style>"
        f"<h1>{len(tables)} tables</h1>"
        "<p>Left: the two columns that tell most of the class, rows coloured by class, and the class balance. "
        "Right: the causal graph (red: holds the target y; blue: holds features x; grey: neither) or the head of "
        "the plan, and the distinct values of each column. The columns of X are the plan's in another order.</p>"
        f'<img alt="pictures of the tables" src="data:image/png;base64,{picture}"><h2>Plans</h2>{plans}</html>\n'
    )
