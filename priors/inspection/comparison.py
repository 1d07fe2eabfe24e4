"""A page that shows the options of priors.realism: off, weak and strong side by side, for the same tables."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from priors.inspection.gallery import image, informative_columns, page
from priors.table import Table

STRENGTHS = {"off": None, "weak": 0.15, "strong": 0.85}
BINS = 30
ABOUT = f"""<p>An option is the probability that a table is changed, such as <code>prior.realism.missing=0.3</code>;
here it is 1. Weak and strong are <code>prior.realism.strength</code> {STRENGTHS["weak"]} and {STRENGTHS["strong"]}.
Each line shows one table, unless a draw was rejected at one strength: then its pictures show different tables. The
lists number columns as the prior computes them, before they are permuted.</p>"""


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
        heading = f"<h2>prior.realism.{name}</h2><p>{text}</p>"
        sections.append(f"{heading}{image(draw(name, shown), name)}<ul>{plans}</ul>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page("Realism: off, weak and strong", "\n".join([ABOUT, *sections])))


def draw(name: str, shown: dict[str, list[Table]]) -> bytes:
    """The picture of an option as PNG: a row for each table, a column for each strength."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    plot, _ = PICTURES[name]
    count = len(shown["off"])
    figure = Figure(figsize=(4.2 * len(shown), 2.6 * count), layout="constrained")
    axes = figure.subplots(count, len(shown), squeeze=False, sharey="row" if name == "shift" else "none")
    for i, same in enumerate(zip(*shown.values(), strict=True)):
        for ax, label, table in zip(axes[i], shown, same, strict=True):
            plot(ax, table, same[0], same[-1])
            ax.set_title(f"table {i}, {label}", fontsize=9)
            ax.tick_params(labelsize=7)
            if name == "shift":
                ax.set_xticks([1, 2], ["labeled", "query"])
            else:
                ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=80)
    return buffer.getvalue()


def plot_gaps(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The cells, gray by value, and gaps in red; the line is the border between labeled and query rows."""
    from matplotlib import colormaps

    colors = colormaps["Greys"].with_extremes(bad="red")
    ax.imshow(np.ma.masked_invalid(table.X.numpy()), aspect="auto", cmap=colors, vmin=-4, vmax=4, interpolation="none")
    ax.axhline(table.train_size - 0.5, color="tab:blue")


def changed_column(table: Table, off: Table, strong: Table) -> tuple[np.ndarray, bool]:
    """The column (N,) of a table that differs most between off and strong, and whether it does."""
    width = min(off.X.shape[1], strong.X.shape[1], table.X.shape[1])
    changes = (off.X[:, :width] - strong.X[:, :width]).abs().mean(0)
    return table.X[:, int(changes.argmax())].numpy(), bool(changes.max() > 0)


def plot_tails(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """A histogram of the column that changes most, with one axis for all strengths."""
    values, is_changed = changed_column(table, off, strong)
    extent = max(float(np.abs(changed_column(other, off, strong)[0]).max()) for other in (off, strong))
    ax.hist(values, bins=np.linspace(-extent, extent, BINS + 1))
    note_unchanged(ax, is_changed)


def plot_rounded(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The values of the column that changes most, in ascending order."""
    values, is_changed = changed_column(table, off, strong)
    ax.plot(np.sort(values), ".", markersize=3)
    note_unchanged(ax, is_changed)


def note_unchanged(ax: Any, is_changed: bool) -> None:
    if not is_changed:
        ax.text(0.5, 0.9, "no numeric column was picked", ha="center", transform=ax.transAxes, color="tab:red")


def plot_shifted_column(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """The column in which the means of labeled and query rows differ most, as boxes of the two kinds of row."""
    means = strong.X[: strong.train_size].mean(0) - strong.X[strong.train_size :].mean(0)
    values = table.X[:, int(means[: table.X.shape[1]].abs().argmax())].numpy()
    ax.boxplot([values[: table.train_size], values[table.train_size :]], widths=0.6)


def plot_classes(ax: Any, table: Table, off: Table, strong: Table) -> None:
    """Class frequencies, the commonest first."""
    counts = np.sort(np.bincount(table.y.numpy(), minlength=table.num_classes))[::-1]
    ax.bar(range(1, len(counts) + 1), counts / counts.sum())
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
        "Cells are missing: at random, by value, or in blocks. All cells, rows from top to bottom, are gray by value "
        "and red where they are missing. The blue line divides labeled from query rows.",
    ),
    "tails": (
        plot_tails,
        "A few values lie far from the others, on both sides or on one. Histogram of the column that changes most.",
    ),
    "rounding": (
        plot_rounded,
        "Many values are equal, as they are rounded. The values of the column that changes most, in ascending order: "
        "equal values form a step.",
    ),
    "shift": (
        plot_shifted_column,
        "The rows to be predicted differ from the labeled ones. The column that shows it most: median, quartiles and "
        "extremes of the labeled rows and of the query rows.",
    ),
    "imbalance": (
        plot_classes,
        "Common classes are commoner, rare ones rarer. Share of each class, the commonest first.",
    ),
    "duplicates": (
        plot_copies,
        "Rows are copies of others. The two columns most informative about the target: rows that equal another one, "
        "but for one value at most, are red; labeled rows are dots, query rows crosses.",
    ),
}
