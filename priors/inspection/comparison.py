"""A page that shows the options of priors.realism: off, weak and strong side by side, for the same tables."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from priors.inspection.gallery import class_color, image, informative_columns, page
from priors.table import Table

STRENGTHS = {"off": None, "weak": 0.15, "strong": 0.85}
BINS = 60


def save_comparison(tables: dict[tuple[str, str], list[Table]], path: Path) -> None:
    """Write an HTML page with a section for each option; tables: by option and by a key of STRENGTHS."""
    sections = []
    for name, (_, text) in PICTURES.items():
        if (name, "off") not in tables:
            continue
        shown = {label: tables[name, label] for label in STRENGTHS}
        plans = "".join(
            f"<li>{label}, table {i}: {html.escape(line.removeprefix('realism: '))}</li>"
            for label, column in shown.items()
            for i, table in enumerate(column)
            for line in str(table.plan).splitlines()
            if line.startswith("realism: ")
        )
        sections.append(f"<h2>{name}</h2><p>{text}</p>{image(draw(name, shown), name)}<ul>{plans}</ul>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("Realism: off, weak and strong", "\n".join(sections)))


def draw(name: str, shown: dict[str, list[Table]]) -> bytes:
    """The picture of an option as PNG: a row for each table, a column for each strength."""
    from matplotlib.figure import Figure

    plot, _ = PICTURES[name]
    count = len(shown["off"])
    figure = Figure(figsize=(4.2 * len(shown), 2.6 * count), layout="constrained")
    axes = figure.subplots(count, len(shown), squeeze=False)
    for i, same in enumerate(zip(*shown.values(), strict=True)):
        for ax, label, table in zip(axes[i], shown, same, strict=True):
            plot(ax, table, same[0], same[-1])
            ax.set_title(f"table {i}, {label}", fontsize=9)
            ax.tick_params(labelsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80)
    return buffer.getvalue()


def plot_gaps(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The cells, grey by value, and gaps in red; the line is the border between labelled and query rows."""
    from matplotlib import colormaps

    colors = colormaps["Greys"].with_extremes(bad="red")
    ax.imshow(np.ma.masked_invalid(table.X.numpy()), aspect="auto", cmap=colors, vmin=-4, vmax=4, interpolation="none")
    ax.axhline(table.train_size - 0.5, color="tab:blue")


def plot_changed_column(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The column that differs most between off and strong."""
    width = min(off.X.shape[1], strong.X.shape[1], table.X.shape[1])
    column = int((off.X[:, :width] - strong.X[:, :width]).abs().mean(0).argmax())
    ax.hist(table.X[:, column].numpy(), bins=BINS)
    ax.set_xlabel(f"column {column}", fontsize=8)


def plot_shifted_column(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The column in which the means of labelled and query rows differ most."""
    means = strong.X[: strong.train_size].mean(0) - strong.X[strong.train_size :].mean(0)
    column = int(means.abs().argmax())
    values = table.X[:, column].numpy()
    edges = np.linspace(values.min(), values.max(), 25)
    for rows, label in ((slice(table.train_size), "labelled"), (slice(table.train_size, None), "query")):
        ax.hist(values[rows], bins=edges, density=True, alpha=0.5, label=label)
    ax.set_xlabel(f"column {column}", fontsize=8)
    ax.legend(fontsize=7)


def plot_classes(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """Class frequencies."""
    counts = np.bincount(table.y.numpy(), minlength=table.num_classes)
    ax.bar(range(len(counts)), counts / counts.sum(), color=[class_color(c) for c in range(len(counts))])
    ax.set_ylim(0, 1)


def plot_copies(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The two most informative columns; rows with a copy are red, and query rows crosses."""
    X, y = table.X.numpy(), table.y.numpy()
    equal = (X[:, None] == X[None]).sum(2) + 1 >= max(2, X.shape[1])  # (N, N), one value may differ
    is_copied = (equal & (y[:, None] == y[None])).sum(1) > 1
    best = informative_columns(off.X.numpy(), off.y.numpy())[:2]
    is_query = np.arange(len(X)) >= table.train_size
    for query, marker in ((False, "o"), (True, "x")):
        for copied, color in ((False, "0.7"), (True, "tab:red")):
            rows = (is_query == query) & (is_copied == copied)
            ax.scatter(X[rows, best[0]], X[rows, best[-1]], s=14, marker=marker, color=color, linewidths=1)


PICTURES: dict[str, tuple[Callable, str]] = {
    "missing": (
        plot_gaps,
        "All cells: rows from top to bottom, grey by value, gaps red. The blue line divides labelled from query rows.",
    ),
    "tails": (plot_changed_column, "Histogram of the column that changes most."),
    "rounding": (plot_changed_column, "Histogram of the column that changes most."),
    "shift": (plot_shifted_column, "The column in which labelled and query rows differ most."),
    "imbalance": (plot_classes, "Class frequencies."),
    "duplicates": (
        plot_copies,
        "The two columns most informative about the target. Rows that equal another one, but for one value at most, "
        "are red; labelled rows are dots, query rows crosses.",
    ),
}
