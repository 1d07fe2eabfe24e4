"""The figures of the report.

There are curves over the steps of one or several runs, from the data frames of their files; the multipliers and gates
of the scalable softmax, from scaling.csv; and mean scores of methods, which tabicl-evaluate also draws. Panels that are
side by side on a wide page are separate figures, so that a narrow window can stack them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from tabicl_train.config.schema import OWN, PROBES, REAL, REAL_SCORES, SYNTHETIC, judged_by, validation_kind
from tabicl_train.console import counted
from tabicl_train.evaluation.probes import POSSIBLE, probe_of
from tabicl_train.evaluation.scores import (
    BUCKETS,
    MARGINAL,
    by_bucket,
    ranked,
    weights_of_first,
)
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.run.curves import OUTSIDE

WINDOWS = 20  # a smoothed curve is a centered moving average over 1/20 of the longest run, within a stage
LIGHT: dict[str, Any] = {"alpha": 0.25, "linewidth": 0.8}  # style of the values that a smoothed curve averages
MAX_LINES = 150  # logged steps that are drawn, evenly spaced
PANEL = (4.2, 3.0)  # inches; at full width, text is as large as that of the page, and it is readable at 400 pixels
NAME_WIDTH = 24  # characters of a name in one line
ENDS = ["n_smallest", "at_smallest", "n_largest", "at_largest"]
GUESSING = {"roc_auc": 0.5, "r2": 0.0}  # scores of a prediction from labels alone

Runs = dict[str, pd.DataFrame]


def panel() -> tuple[Figure, Axes]:
    """Return a figure with one panel."""
    figure = Figure(figsize=PANEL, layout="constrained")
    return figure, figure.subplots()


def draw_training(metrics: Runs, validation: Runs, other_losses: Collection[str] = ()) -> list[Figure]:
    """Draw the loss and, if known, its ratio to the loss of guessing, which predicts from the labels alone.

    Parameters
    ----------
    metrics : dict of str to DataFrame
        metrics.csv by the names of the runs.
    validation : dict of str to DataFrame
        validation.csv by the names of the runs.
    other_losses : collection of str, optional
        The runs whose training loss is not the network's own. They have no ratio, since guess_loss and validations have
        the network's own loss.

    Returns
    -------
    list of Figure
    """
    ratios = {}
    for name, rows in metrics.items():
        if "guess_loss" in rows and name not in other_losses:
            ratios[name] = loss_ratios(rows)
    points = {}  # ratios of validations
    for name, rows in validation.items():
        tables = rows_in_trained_range(rows_of_kinds(rows, OWN, SYNTHETIC))
        if "guess_loss" in tables and len(tables):  # there may be validations on real data only
            points[name] = loss_ratios(tables)

    loss, axes = panel()
    draw_curves(axes, metrics, "loss")
    label_steps(axes, "loss")
    if not (ratios or points):
        return [loss]
    ratio, axes = panel()
    draw_ratios(axes, list(metrics), ratios, points)
    return [loss, ratio]


def draw_optimization(metrics: Runs) -> list[Figure]:
    """Draw gradient norm and learning rate."""
    figure_of_norm, norm = panel()
    figure_of_rate, rate = panel()
    draw_curves(norm, metrics, "grad_norm")
    label_steps(norm, "gradient norm before clipping")
    norms = np.concatenate([rows["grad_norm"] for rows in metrics.values()])
    if (np.isfinite(norms) & (norms > 0)).any():
        norm.set_yscale("log")
        # Labels at all multiples of a power of ten would overlap.
        norm.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    draw_curves(rate, metrics, "lr", smooth=False)
    label_steps(rate, "learning rate")
    return [figure_of_norm, figure_of_rate]


def label_steps(axes: Axes, title: str) -> None:
    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))


def loss_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Return sums of the loss and of guess_loss by step, and their ratio, which can be compared between steps."""
    sums = rows.groupby("step")[["loss", "guess_loss"]].sum(min_count=1)
    sums = sums[np.isfinite(sums).all(axis=1)]
    return sums.assign(ratio=sums["loss"] / sums["guess_loss"])


def draw_ratios(axes: Axes, names: list[str], ratios: Runs, points: Runs) -> None:
    """Draw, for each run, the ratio of each step faintly, the ratio of moving sums, and the validations as points."""
    is_single = len(names) == 1
    for i, name in enumerate(names):
        if name in ratios:
            steps = ratios[name]
            # The window is centered; a trailing one would lag behind the points of the validations.
            windows = steps.rolling(max(1, len(steps) // WINDOWS), min_periods=1, center=True).sum()
            label = "training" if is_single else name
            axes.plot(steps.index, steps["ratio"], color=f"C{i}", **LIGHT)
            axes.plot(steps.index, windows["loss"] / windows["guess_loss"], color=f"C{i}", label=label)
        if name in points:
            color = "C1" if is_single else f"C{i}"
            label = "validation" if is_single else f"{name}, validation"
            axes.plot(points[name]["ratio"], "o", color=color, markeredgecolor="white", label=label)
    axes.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    _, high = axes.get_ylim()
    # The ratio of the first steps may be three, so the axis is scaled for the second half of the runs.
    late = [rows["ratio"][rows.index > rows.index.max() / 2].median() for rows in [*ratios.values(), *points.values()]]
    axes.set_ylim(top=min(high, 1.3 * np.nanmax([1, *late])))
    label_steps(axes, "loss relative to guessing")
    axes.legend(fontsize="small")


def draw_throughput(runs: Runs) -> list[Figure]:
    """Draw tables and cells per second, and the share of the time spent waiting for tables, from metrics.csv."""
    figures = []
    titles = {"tables_per_s": "tables/s", "cells_per_s": "cells/s", "data_wait": "share of time waiting for tables"}
    for column, title in titles.items():
        figure, axes = panel()
        draw_curves(axes, runs, column)
        label_steps(axes, title)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylim(bottom=0)
        figures.append(figure)
    return figures


def draw_curves(axes: Axes, runs: Runs, column: str, smooth: bool = True) -> None:
    """Draw, for each run, the logged values faintly and their moving average; for a single run also its stages."""
    window = max(1, max(map(len, runs.values())) // WINDOWS)
    for i, (name, metrics) in enumerate(runs.items()):
        values = metrics[column].where(np.isfinite(metrics[column]))
        if smooth:
            axes.plot(metrics["step"], values, color=f"C{i}", **LIGHT)
            # Not across stages, whose tables differ.
            stages = values.groupby(metrics["stage"], sort=False)
            values = stages.transform(lambda stage: stage.rolling(window, min_periods=1, center=True).mean())
        axes.plot(metrics["step"], values, color=f"C{i}", label=name)
    if len(runs) > 1:
        axes.legend(fontsize="small")
        return
    (metrics,) = runs.values()
    for step in metrics["step"][metrics["stage"] != metrics["stage"].shift()][1:]:
        axes.axvline(step, color="0.7", linewidth=0.8, zorder=0)


def draw_validation(runs: Runs) -> list[Figure]:
    """Draw losses on validation tables, and ROC AUC or R2 on public real data.

    There are means over sets of tables and, for a single run, also a curve for each set. For probes there are means
    only, with a dashed line at what is possible.
    """
    # Kinds of tables with losses, scores on real data, and probes that any of the runs has.
    kinds = [kind for kind in (OWN, SYNTHETIC) if any(len(rows_of_kinds(rows, kind)) for rows in runs.values())]
    real = {name: rows_of_kinds(rows, REAL) for name, rows in runs.items()}
    scores = []
    for score in REAL_SCORES:
        if any(len(rows) and score in rows for rows in real.values()):
            scores.append(score)
    probes = {}
    for name, rows in runs.items():
        probe_rows = rows_in_trained_range(rows_of_kinds(rows, PROBES))
        if len(probe_rows):
            probes[name] = probe_rows

    # One panel for each of them.
    figures = []
    for kind in kinds:
        figure, axes = panel()
        draw_sets(axes, {name: rows_of_kinds(rows, kind) for name, rows in runs.items()}, "loss")
        label_steps(axes, f"loss on {kind} validation tables")
        figures.append(figure)
    for score in scores:
        figure, axes = panel()
        draw_sets(axes, {name: rows for name, rows in real.items() if score in rows}, score)
        label_steps(axes, f"{REAL_SCORES[score]} on real data")
        figures.append(figure)
    if probes:
        figure, axes = panel()
        draw_probe_means(axes, list(runs), probes)
        figures.append(figure)
    return figures


def draw_probe_means(axes: Axes, names: list[str], probes: Runs) -> None:
    """Draw, for each run, the mean score over its probes inside the trained range, and the mean of what is possible."""
    titles = dict.fromkeys(real_score_name(rows) for rows in probes.values())
    for name, rows in probes.items():
        means = rows.groupby("step")[[judged_by(rows), "possible"]].mean()
        color = f"C{names.index(name)}"
        label = "mean" if len(names) == 1 else name
        axes.plot(means.index, means.iloc[:, 0], "o-", color=color, linewidth=2, label=label)
        axes.plot(means.index, means["possible"], "--", color=color, linewidth=1, label=POSSIBLE)
    axes.legend(fontsize="small")
    label_steps(axes, f"{' and '.join(titles)} on probes")


def rows_of_kinds(validation: pd.DataFrame, *kinds: str) -> pd.DataFrame:
    """Return the rows about tables of these kinds."""
    return validation[validation["data"].map(validation_kind).isin(kinds)]


def rows_in_trained_range(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table of scores that count in means, which are those not outside the trained range."""
    if "trained_range" not in rows:  # files of earlier versions lack it
        return rows
    return rows[rows["trained_range"] != OUTSIDE]


def draw_sets(axes: Axes, runs: Runs, column: str) -> None:
    """Draw, for each run, the mean of a column over the sets of tables; for a single run also a curve for each set."""
    for i, (name, validation) in enumerate(runs.items()):
        is_real = validation["data"].map(validation_kind) == REAL
        sets = validation["data"].where(is_real, validation["rows"].astype(str) + " rows")
        counting = rows_in_trained_range(validation)
        sets = sets.where(validation.index.isin(counting.index), sets + " (outside)").rename("set")
        table = validation.pivot_table(column, "step", sets, sort=False)
        if table.empty:
            continue
        if len(runs) == 1:
            for j, (label, values) in enumerate(table.items(), start=1):
                axes.plot(values.index, values, ".-", color=f"C{j}", linewidth=0.9, label=label)
        mean = "mean" if len(runs) == 1 else name
        means = counting.groupby("step")[column].mean()
        axes.plot(means.index, means, "o-", color=f"C{i}", linewidth=2, label=mean)
        axes.legend(fontsize="small")


def draw_multipliers(scaling: pd.DataFrame) -> list[Figure]:
    """Draw the largest base multiplier of each scalable softmax against n, the number of labeled rows.

    There is a panel for each layer. A line connects the smallest and the largest n of a logged step, in a color that
    shows the step.
    """
    steps = np.unique(scaling["step"])
    shown = steps[np.linspace(0, len(steps) - 1, MAX_LINES).astype(int)]
    colors = ScalarMappable(cmap="viridis")
    colors.set_clim(0, steps[-1])
    figures = []
    for layer in scaling["layer"].unique():
        figure, axes = panel()
        draw_multiplier_lines(axes, scaling[(scaling["layer"] == layer) & scaling["step"].isin(shown)], colors)
        axes.set(title=layer, xlabel="labeled rows n (log scale)", ylabel="largest base multiplier")
        figure.colorbar(colors, ax=axes, label="step", aspect=30)
        figures.append(figure)
    return figures


def draw_multiplier_lines(axes: Axes, scaling: pd.DataFrame, colors: ScalarMappable) -> None:
    """Draw the lines of one layer."""
    ends = scaling[ENDS].to_numpy()  # (steps, 4)
    segments = LineCollection(ends.reshape(-1, 2, 2), cmap=colors.cmap, norm=colors.norm, linewidth=0.9)
    segments.set_array(scaling["step"].to_numpy())
    axes.add_collection(segments)
    # Points at the ends, too, since a step with a single n has no line.
    x, y = ends.reshape(-1, 2).T
    axes.scatter(x, y, c=scaling["step"].repeat(2), cmap=colors.cmap, norm=colors.norm, s=4)
    scale_labeled_rows(axes)
    multipliers = ends[:, [1, 3]]
    highest = multipliers.max(initial=0, where=np.isfinite(multipliers))  # in a diverged run they may all be nan
    if highest > 0:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_xlim(ends[:, 0].min() / 1.1, ends[:, 2].max() * 1.1)


def scale_labeled_rows(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize="small")


def draw_gates(scaling: pd.DataFrame) -> list[Figure] | None:
    """Draw mean and standard deviation of the gate of each layer over the steps; None if no layer has a gate."""
    gates = scaling[scaling["gate_mean"].notna()]
    if gates.empty:
        return None
    figures = []
    layers = list(gates["layer"].unique())
    colors = colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    titles = {"gate_mean": "mean of the gate", "gate_std": "standard deviation of the gate"}
    for column, title in titles.items():
        figure, axes = panel()
        for color, layer in zip(colors, layers, strict=True):
            rows = gates[gates["layer"] == layer]
            axes.plot(rows["step"], rows[column], color=color, linewidth=1, label=layer)
        label_steps(axes, title)
        legend_below(figure, axes)
        figures.append(figure)
    return figures


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend below the panel, where it hides no curve."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")


def draw_standing(results: pd.DataFrame) -> Figure:
    """Draw mean scores of the methods as bars, the best on top and the first method in color, to fit a phone."""
    results = with_folded_names(results)
    means = ranked(results)
    first = results["method"].iloc[0]
    start = GUESSING[judged_by(results)]

    # The bars, from the score of guessing.
    figure = Figure(figsize=(4.6, 1.1 + 0.4 * len(means)), layout="constrained")
    axes = figure.subplots()
    colors = ["C0" if method == first else "0.8" for method in means.index]
    bars = axes.barh(means.index.astype(str), means - start, left=start, color=colors)
    axes.bar_label(bars, [f"{value:.3f}" for value in means], padding=4)
    place = means.index.get_loc(first)
    for text in (axes.texts[place], axes.get_yticklabels()[place]):
        text.set(color="C0", weight="bold")

    # The numbers at the bars replace the axis.
    axes.invert_yaxis()
    axes.margins(x=0.12)
    weights = weights_of_first(results) or "weights not recorded"
    axes.set_xlabel(f"bars begin at {start:g}, the score of guessing\n{first}: {weights}", fontsize="small")
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(left=False)
    figure.suptitle(f"mean {real_score_name(results)} on {counted(results['data'].nunique(), 'real task')}")
    return figure


def draw_probes(results: pd.DataFrame) -> Figure:
    """Draw a panel for each probe: scores against labeled rows, between guessing and what is possible.

    The band of the first method is the 95 % confidence interval over draws.
    """
    by = judged_by(results)
    results = results.assign(probe=results["data"].map(probe_of), score=results[by].clip(lower=0))
    first = results["method"].iloc[0]
    methods = [method for method in results["method"].unique() if method != MARGINAL]
    probes = list(results["probe"].unique())

    # A grid of panels, without those that no probe fills.
    columns = 6
    lines = math.ceil(len(probes) / columns)
    figure = Figure(figsize=(2.4 * columns, 2.2 * lines + 0.6), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharey=True).flat)
    for axes in panels[len(probes) :]:
        axes.remove()

    # A curve for each method: thick with its band for the first, black and dashed for what is possible.
    for axes, probe in zip(panels, probes, strict=False):
        rows = results[results["probe"] == probe]
        for place, method in enumerate(methods):
            scores_by_size = rows[rows["method"] == method].groupby("labeled_rows")["score"]
            means = scores_by_size.mean()
            style = {"color": f"C{place}", "linewidth": 1, "zorder": 2}
            if method == first:
                style |= {"linewidth": 2.5, "zorder": 3}
                intervals = [mean_interval(scores.to_numpy(), 0, 1) for _, scores in scores_by_size]
                lows = [interval.low for interval in intervals]
                highs = [interval.high for interval in intervals]
                axes.fill_between(means.index, lows, highs, color=style["color"], alpha=0.2, linewidth=0)
            if method == POSSIBLE:
                style |= {"color": "black", "linestyle": "--"}
            axes.plot(means.index, means, marker="." if method != POSSIBLE else "", label=method, **style)
        axes.axhline(GUESSING[by], color="0.7", linewidth=0.8)
        axes.set_title(probe, fontsize="medium")
        axes.set_xscale("log")
        sizes = sorted(rows["labeled_rows"].unique())
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize="small")
        axes.xaxis.set_minor_locator(NullLocator())

    panels[0].set_ylim(GUESSING[by] - 0.05, 1.02)
    figure.supxlabel("labeled rows (log scale)", fontsize="medium")
    figure.supylabel(
        f"mean {real_score_name(results)} of {counted(results['split'].nunique(), 'draw')}", fontsize="medium"
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize="small")
    return figure


def draw_sizes(results: pd.DataFrame) -> list[Figure]:
    """Draw mean scores of the methods by rows, features and classes of the tables."""
    results = with_folded_names(results)
    figures = []
    for quantity in BUCKETS:
        if quantity in results:
            figure, axes = panel()
            draw_buckets(axes, results, quantity)
            legend_below(figure, axes)
            figures.append(figure)
    return figures


def with_folded_names(results: pd.DataFrame) -> pd.DataFrame:
    """Break long names of methods, such as those of runs, into lines to leave room for the panel."""
    return results.assign(method=[textwrap.fill(str(name), NAME_WIDTH) for name in results["method"]])


def real_score_name(results: pd.DataFrame) -> str:
    return REAL_SCORES[judged_by(results)]


def draw_buckets(axes: Axes, results: pd.DataFrame, quantity: str) -> None:
    table = by_bucket(results, quantity)
    tasks = table.pop("tasks")
    for i, method in enumerate(table):
        axes.plot(range(len(table)), table[method], "o-", color=f"C{i}", label=method)
    labels = [f"{bucket}\n({counted(count, 'task')})" for bucket, count in tasks.items()]
    axes.set_xticks(range(len(table)), labels, fontsize="small")
    axes.margins(x=0.12)
    axes.set_title(f"mean {real_score_name(results)} by {quantity}")
