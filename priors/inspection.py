"""Describes the tables of a prior: distributions in numbers, and pictures.

A picture shows the two most informative columns, the target, kinds of columns, and the causal graph.
"""

from __future__ import annotations

import base64
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from priors.realism import fill_with_means
from priors.table import Table

FEW_VALUES = 32  # columns with at most 32 distinct values count as categorical
SCORED_ROWS = 2000  # largest number of rows on which the two models are fitted, and scored
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
POINTS = 500  # rows in a scatter plot
BINS = 8
COLUMNS = 3  # tables side by side
PLAN_LINES = 12  # of a plan without a graph


def statistics(table: Table) -> dict[str, float]:
    """Compute statistics of one table.

    Parameters
    ----------
    table : Table
        The table; for the models, its missing cells are filled.

    Returns
    -------
    dict of str to float
        By name. The skill of a model is its accuracy on the query rows, scaled to 0 for the commonest class and 1 for
        no errors; with a numeric target it is R2, at least 0.
    """
    X = table.X.cpu().numpy().copy()
    y = table.y.cpu().numpy()
    numeric = table.num_classes == 0
    fill_with_means(X, np.isnan(X), table.train_size)
    return {
        "rows": len(y),
        "labeled share": table.train_size / len(y),
        "features": X.shape[1],
        "missing cells": table.missing,
        **(target_statistics(y) if numeric else class_statistics(y, table.num_classes)),
        "categorical share": float((distinct_values(X) <= FEW_VALUES).mean()),
        **skills(X, y, table.train_size, numeric),
        **out_of_bag_score(X, y, numeric),
    }


def distinct_values(X: np.ndarray) -> np.ndarray:
    """The number of distinct values of each column of X (N, M), (M,)."""
    return np.array([len(np.unique(column)) for column in X.T])


def class_statistics(y: np.ndarray, num_classes: int) -> dict[str, float]:
    """Statistics of labels y (N,)."""
    counts = np.bincount(y, minlength=num_classes)
    return {
        "classes": int((counts > 0).sum()),
        "missing classes": int((counts == 0).sum()),
        "commonest class": counts.max() / len(y),
        "rarest class": counts[counts > 0].min() / len(y),
    }


def target_statistics(y: np.ndarray) -> dict[str, float]:
    """Statistics of a standardized target y (N,)."""
    _, counts = np.unique(y, return_counts=True)
    return {
        "distinct targets": len(counts),
        "commonest target": counts.max() / len(y),
        "lowest target": y.min(),
        "highest target": y.max(),
        "skewness of target": (y.astype(float) ** 3).mean(),
        "kurtosis of target": (y.astype(float) ** 4).mean(),
    }


def skills(X: np.ndarray, y: np.ndarray, train_size: int, numeric: bool) -> dict[str, float]:
    """Fit a linear model and trees to labeled rows, and return their skill on query rows by name.

    Parameters
    ----------
    X : ndarray
        float32 (N, M), without missing cells.
    y : ndarray
        (N,), labels int64, or numbers float32.
    train_size : int
        The first rows are labeled; the last SCORED_ROWS of them are used.
    numeric : bool
        Whether y are numbers.
    """
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    # At most SCORED_ROWS rows on each side of the split.
    train = slice(max(0, train_size - SCORED_ROWS), train_size)
    query = slice(train_size, train_size + SCORED_ROWS)
    tree_options = {"n_estimators": 50, "min_samples_leaf": 2, "random_state": 0}
    if numeric:
        score = r2
        models = {"ridge regression": Ridge(), "extra trees": ExtraTreesRegressor(**tree_options)}
    else:
        score = scaled_accuracy
        models = {
            "logistic regression": LogisticRegression(max_iter=200),
            "extra trees": ExtraTreesClassifier(**tree_options),
        }

    skills = {}
    for name, model in models.items():
        # scikit-learn warns that 200 iterations do not converge; they are enough here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X[train], y[train])
        skills[f"skill of {name}"] = score(y[query], model.predict(X[query]))
    return skills


def out_of_bag_score(X: np.ndarray, y: np.ndarray, numeric: bool) -> dict[str, float]:
    """Out-of-bag score of extra trees on all rows, by name: ROC AUC (of each class against the rest), or R2."""
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.metrics import roc_auc_score

    X = X[:SCORED_ROWS]
    y = y[:SCORED_ROWS]
    kind = ExtraTreesRegressor if numeric else ExtraTreesClassifier
    trees = kind(n_estimators=100, min_samples_leaf=2, random_state=0, bootstrap=True, oob_score=True)
    with warnings.catch_warnings():
        # Some rows may be seen by all trees, and have no out-of-bag prediction.
        warnings.simplefilter("ignore")
        trees.fit(X, y)
    if numeric:
        return {"R2 out of bag": r2(y, trees.oob_prediction_)}
    classes = np.unique(y)
    if len(classes) == 1:
        return {"ROC AUC out of bag": 0.5}
    votes = np.nan_to_num(trees.oob_decision_function_)
    aucs = [roc_auc_score(y == label, vote) for label, vote in zip(classes, votes.T, strict=True)]
    return {"ROC AUC out of bag": float(np.mean(aucs))}


def histogram(name: str, values: np.ndarray) -> list[str]:
    """Return lines of a histogram from 0.5 (ROC AUC) or 0 (R2) to 1; smaller values are in the lowest bin."""
    low = 0.5 if name.startswith("ROC") else 0.0
    edges = np.linspace(low, 1.0, 11)
    counts, _ = np.histogram(np.clip(values, low, 1.0), edges)
    lines = [f"\n{name}: share of the tables that extra trees learn so well"]
    for edge, share in zip(edges[:-1], counts / len(values), strict=True):
        lines.append(f"  {edge:.2f} {share:6.1%} {'#' * round(100 * share)}".rstrip())
    return lines


def scaled_accuracy(y: np.ndarray, predicted: np.ndarray) -> float:
    """Accuracy, scaled to 0 for always predicting the commonest class; 0 if there is one class only."""
    base = np.bincount(y).max() / len(y)
    if base == 1:
        return 0.0
    return ((predicted == y).mean() - base) / (1 - base)


def r2(y: np.ndarray, predicted: np.ndarray) -> float:
    """R2, at least 0; 0 for a constant target."""
    total = np.square(y - y.mean()).sum()
    if total > 0:
        return max(1 - np.square(y - predicted).sum() / total, 0.0)
    return 0.0


def describe_tables(tables: Iterable[Table]) -> str:
    """Return the distribution of each statistic, the accept rate, and the reasons for rejections, as text."""
    rows = []
    rejections: Counter[str] = Counter()
    for table in tables:
        rows.append(statistics(table))
        rejections.update(table.rejections)
    heads = ["lowest", "10 %", "median", "90 %", "highest", "mean"]
    lines = [f"{'':28}" + "".join(f"{head:>10}" for head in heads)]
    values = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    for name, column in values.items():
        figures = np.round([*np.quantile(column, QUANTILES), column.mean()], 3)
        lines.append(f"{name:28}" + "".join(f"{figure:>10.5g}" for figure in figures))
    for name, column in values.items():
        if name.endswith("out of bag"):
            lines += histogram(name, column)
    draws = len(rows) + rejections.total()
    lines.append(f"\n{len(rows)} tables from {draws} draws: {len(rows) / draws:.1%} accepted")
    for reason, count in rejections.most_common():
        lines.append(f"  rejected as {reason:16} {count:6}  ({count / draws:.1%} of the draws)")
    return "\n".join(lines)


def informative_columns(X: np.ndarray, y: np.ndarray) -> list[int]:
    """Sort columns of X (N, M) by mutual information with y (N,), estimated from 8 quantile bins; the best first."""
    if y.dtype.kind == "f":
        y = bins(y)
    scores = []
    for column in X.T:
        codes = bins(column)
        joint = np.zeros((codes.max() + 1, y.max() + 1))
        np.add.at(joint, (codes, y), 1 / len(y))
        independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
        inside = joint > 0
        scores.append((joint[inside] * np.log(joint[inside] / independent[inside])).sum())
    return np.argsort(scores)[::-1].tolist()


def bins(column: np.ndarray) -> np.ndarray:
    """The quantile bin of each value, 0 to at most 7."""
    return np.searchsorted(np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1])), column)


def save_gallery(tables: list[tuple[str, Table]], path: Path) -> list[Path]:
    """Write pictures of tables as one PNG file, and an HTML page with it and the plan of each table as text.

    Parameters
    ----------
    tables : list of (str, Table)
        The tables, each with a title.
    path : Path
        The picture; the suffix becomes .png, and that of the page is .html.

    Returns
    -------
    list of Path
        The picture and the page.
    """
    from joblib import Parallel, cpu_count, delayed
    from matplotlib.image import imsave
    from tqdm import tqdm

    # A picture takes 0.3 s of CPU, and a process 2 s to start.
    processes = min(cpu_count(), len(tables) // 8 or 1)
    jobs = (delayed(picture_of)(title, table) for title, table in tables)
    drawn = Parallel(processes, return_as="generator")(jobs)
    pictures = list(tqdm(drawn, total=len(tables), unit="picture"))

    # Side by side, the last line filled with white ones.
    white = np.full_like(pictures[0], 255)
    pictures += [white] * (-len(pictures) % COLUMNS)
    rows = [np.concatenate(pictures[i : i + COLUMNS], axis=1) for i in range(0, len(pictures), COLUMNS)]
    path = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.concatenate(rows))
    page = path.with_suffix(".html")
    page.write_text(as_html(tables, path.read_bytes()))
    return [path, page]


def picture_of(title: str, table: Table) -> np.ndarray:
    """Draw one table, pixels (height, width, 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    plot_table(figure, title, table)
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def plot_table(figure: Any, title: str, table: Table) -> None:
    """Fill a figure with the plots of one table; columns are standardized over all rows, missing cells filled."""
    # Standardized values.
    X = table.X.cpu().numpy().copy()
    y = table.y.cpu().numpy()
    fill_with_means(X, np.isnan(X), table.train_size)
    stds = X.std(axis=0)
    X = (X - X.mean(axis=0)) / np.where(stds > 0, stds, 1.0)

    # On the left the target, against the features and by itself; on the right the plan and the kinds of columns.
    figure.suptitle(f"{title}: {len(y)} rows, {X.shape[1]} features", fontsize=10, fontweight="bold")
    axes = figure.subplot_mosaic(
        [["scatter", "plan"], ["scatter", "plan"], ["target", "kinds"]], width_ratios=[1, 1.15]
    )
    if table.num_classes:
        plot_scatter(axes["scatter"], X, y)
        counts = np.bincount(y, minlength=table.num_classes)
        axes["target"].bar(range(len(counts)), counts / len(y), color=[f"C{c}" for c in range(len(counts))])
        axes["target"].set_xticks(range(len(counts)))
        axes["target"].set_xlabel("class", fontsize=8)
        axes["target"].set_ylabel("share of rows", fontsize=8)
    else:
        plot_target(axes["scatter"], X, y)
        axes["target"].hist(y, bins=40)
        axes["target"].set_xlabel("target", fontsize=8)
        axes["target"].set_ylabel("rows", fontsize=8)
    plot_kinds(axes["kinds"], X)
    plot_plan(axes["plan"], table.plan)
    for ax in axes.values():
        ax.tick_params(labelsize=7)


def plot_scatter(ax: Any, X: np.ndarray, y: np.ndarray) -> None:
    """Plot the two most informative columns, colored by class."""
    best = informative_columns(X, y)[:2]
    X = spread(X[:POINTS, best])
    y = y[:POINTS]
    if len(best) > 1:
        second = X[:, 1]
        second_label = f"column {best[1]}, standardized"
    else:
        second = np.linspace(-1, 1, len(y))  # rows are spread evenly
        second_label = "row"
    for c in np.unique(y):
        ax.scatter(X[y == c, 0], second[y == c], s=8, alpha=0.7, linewidths=0, color=f"C{c}")
    ax.set_xlabel(f"column {best[0]}, standardized", fontsize=8)
    ax.set_ylabel(second_label, fontsize=8)


def plot_target(ax: Any, X: np.ndarray, y: np.ndarray) -> None:
    """Plot a numeric target against the most informative column, colored by the second."""
    best = informative_columns(X, y)[:2]
    X = spread(X[:POINTS, best])
    y = y[:POINTS]
    ax.scatter(X[:, 0], y, c=X[:, -1], s=8, alpha=0.7, linewidths=0)
    label = f"column {best[0]}, standardized"
    if len(best) > 1:
        label += f" (color: column {best[1]})"
    ax.set_xlabel(label, fontsize=8)
    ax.set_ylabel("target", fontsize=8)


def spread(X: np.ndarray) -> np.ndarray:
    """Add a little noise to columns of few values, so that equal points do not hide each other."""
    few = distinct_values(X) <= FEW_VALUES
    noise = np.random.default_rng(0).uniform(-1, 1, X.shape)
    return X + few * 0.03 * np.ptp(X, axis=0) * noise


def plot_kinds(ax: Any, X: np.ndarray) -> None:
    """Plot the number of distinct values of each column, sorted."""
    distinct = np.sort(distinct_values(X))
    few = distinct <= FEW_VALUES
    position = np.arange(len(distinct))
    ax.bar(position[few], distinct[few], width=1.0, color="tab:orange")
    ax.bar(position[~few], distinct[~few], width=1.0, color="tab:blue")
    ax.set_yscale("log")
    ax.set_ylim(1, 2 * len(X))
    ax.set_xticks([])
    ax.set_xlabel(f"{few.sum()} categorical, {(~few).sum()} numeric columns", fontsize=8)
    ax.set_ylabel("distinct values", fontsize=8)


def plot_plan(ax: Any, plan: Any) -> None:
    """Draw the causal graph of a plan that has one (`nodes` with `edges()` and `columns`), or the start of its text."""
    ax.set_axis_off()
    if hasattr(plan, "nodes"):
        plot_graph(ax, plan.nodes)
        return
    lines: list[str] = []
    for line in str(plan).splitlines():
        lines += textwrap.wrap(line, 58, subsequent_indent="  ")
    ax.text(0, 1, "\n".join(lines[:PLAN_LINES]), fontsize=6, va="top", family="monospace", transform=ax.transAxes)


def plot_graph(ax: Any, nodes: list) -> None:
    """Draw nodes in layers from left to right, by the length of their longest path from a root."""
    import networkx as nx

    # The graph.
    graph = nx.DiGraph()
    for node in nodes:
        graph.add_node(node.index, names=[column.name for column in node.columns])
    for node in nodes:
        for parent, function in node.edges():
            graph.add_edge(parent, node.index, kind=type(function).__name__.lower())
    place = nx.multipartite_layout(graph, subset_key=dict(enumerate(nx.topological_generations(graph))))
    layers = sorted({x for x, _ in place.values()})

    # Edges, with the kinds of their functions if these do not overlap.
    names_edges = graph.number_of_edges() <= 8 and len(layers) <= 3
    # Curved, so that edges over two layers do not hide behind nodes.
    curved = "arc3,rad=0.12"
    nx.draw_networkx_edges(
        graph,
        place,
        ax=ax,
        alpha=1.0 if names_edges else 0.35,
        node_size=45,
        edge_color="0.6",
        width=0.8,
        arrowsize=8,
        connectionstyle=curved,
    )
    if names_edges:
        kinds = nx.get_edge_attributes(graph, "kind")
        nx.draw_networkx_edge_labels(
            graph, place, kinds, ax=ax, font_size=6, font_color="0.35", rotate=False, connectionstyle=curved
        )

    # Nodes, with the names of their columns.
    names = nx.get_node_attributes(graph, "names")
    colors = [node_color(names[index]) for index in graph]
    nx.draw_networkx_nodes(graph, place, ax=ax, node_size=45, node_color=colors)
    is_small = len(layers) <= 5 and len(graph) <= 12
    for index, position in place.items():
        # Alternately above and below, so that the labels of neighboring layers fit.
        above = layers.index(position[0]) % 2 == 0
        ax.annotate(
            node_label(names[index], most=2 if is_small else 1),
            position,
            (0, 4 if above else -4),
            textcoords="offset points",
            fontsize=7 if is_small else 5,
            ha="center",
            va="bottom" if above else "top",
            zorder=5,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.3},
        )
    ax.margins(0.15)
    ax.set_axis_off()


def node_color(names: list[str]) -> str:
    """Red for a node that holds the target, blue for one that holds features, gray for one that holds no column."""
    if "y" in names:
        return "tab:red"
    if names:
        return "tab:blue"
    return "0.8"


def node_label(names: list[str], most: int) -> str:
    """Name the columns of a node, the target first, at most `most` of them."""
    names = sorted(names, key=lambda name: name != "y")
    label = ", ".join(names[:most])
    if len(names) > most:
        label += f" +{len(names) - most}"
    return label


def as_html(tables: list[tuple[str, Table]], png: bytes) -> str:
    """Return a page without external files: a picture of the tables, and their plans."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("gallery.html.j2")
    return page.render(tables=tables, picture=base64.b64encode(png).decode())
