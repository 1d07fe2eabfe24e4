"""The figures of a sweep: parallel coordinates, the metric against each parameter, and learning curves."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tabicl_train.sweep.axes import (
    COLORS,
    FEW,
    GREY,
    STEPS,
    MetricAxis,
    ParameterAxis,
    metric_axis,
    parameter_axes,
    point_name,
    shortened,
    wrapped,
)
from tabicl_train.sweep.ranking import BROKEN, Point, rank, value_of, value_text
from tabicl_train.sweep.results import Job, Sweep

COLUMNS = 3  # panels side by side
MAX_ON_LINE = 12  # values of a parameter that a line joins; more are those of a search, one job each
BAND = 0.05  # height over which lines through the same value are spread, as a share of the axis
ENDS = {"failed": "x", "pruned": "s"}  # markers at the end of a job's curve


def draw_parallel_coordinates(sweep: Sweep) -> Figure | None:
    """A line per point through its parameters to its mean; None without a result, or if fewer than two vary."""
    axes_of, points = parameter_axes(sweep), rank(sweep)
    results = [point for point in points if math.isfinite(point.mean)]
    if len(axes_of) < 2 or not results:
        return None
    metric = metric_axis(sweep, [point.mean for point in results])
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    heights = np.array([spread(parameter, results) for parameter in axes_of])  # (parameters, points)
    for i, point in reversed(list(enumerate(results))):
        line = [*heights[:, i], metric.share(point.mean)]
        axes.plot(line, color=metric.color(point.mean), linewidth=3 if i == 0 else 1.3, zorder=2 + (i == 0))
    broken = [point for point in points if not point.has_result and any(job.status in BROKEN for job in point.jobs)]
    for point in broken:
        line = [height(parameter, point) for parameter in axes_of]
        axes.plot(line, color=GREY, linewidth=1, linestyle=":", marker="x", markevery=[-1], zorder=1)
    draw_scales(axes, axes_of, metric)
    width = 100 // (len(axes_of) + 1)
    labels = [wrapped(parameter.name, width) for parameter in axes_of] + [f"{sweep.metric}\n(up is better)"]
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(axis="x", length=0, top=False, labeltop=True, labelbottom=False)
    legend = [Line2D([], [], color=metric.color(results[0].mean), linewidth=3, label="best")]
    if broken:
        legend.append(Line2D([], [], color=GREY, linewidth=1, linestyle=":", marker="x", label="failed or pruned"))
    figure.legend(handles=legend, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return figure


def height(parameter: ParameterAxis, point: Point) -> float:
    low, high = parameter.ends
    return (parameter.position(value_of(point, parameter.key)) - low) / (high - low)


def spread(parameter: ParameterAxis, points: list[Point]) -> list[float]:
    """Heights of points, best first. Those of equal values are spread a little, the best on top: lines through the same
    value would cover each other, and the colors there show how the value does."""
    heights = [height(parameter, point) for point in points]
    sharing = collections.Counter(heights)
    gaps = np.diff(sorted(sharing), append=2.0)
    band = min(BAND, *(0.7 * gaps))
    seen: collections.Counter[float] = collections.Counter()
    spread_heights = []
    for y in heights:
        offset = 0.5 - seen[y] / (sharing[y] - 1) if sharing[y] > 1 else 0.0
        seen[y] += 1
        spread_heights.append(y + band * offset)
    return spread_heights


def draw_scales(axes: Axes, parameters: list[ParameterAxis], metric: MetricAxis) -> None:
    """A vertical scale per parameter, and one of the metric at the right."""
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
    ticks = [
        {(position - p.ends[0]) / (p.ends[1] - p.ends[0]): text for position, text in p.ticks(gap=0.05).items()}
        for p in parameters
    ]
    values = MaxNLocator(6, steps=STEPS).tick_values(metric.low, metric.high)
    ticks.append({metric.share(value): f"{value:.4g}" for value in values if metric.low <= value <= metric.high})
    for x, labels in enumerate(ticks):
        axes.axvline(x, 0.045, 0.955, color="0.3", linewidth=1, zorder=4)
        for y, text in labels.items():
            axes.plot([x - 0.012, x + 0.012], [y, y], color="0.3", linewidth=1, zorder=4)
            shown = shortened(text, 100 // len(ticks))
            axes.text(x + 0.025, y, shown, fontsize="small", va="center", bbox=white, zorder=5)
    axes.set(xlim=(-0.05, len(ticks) - 0.8), ylim=(-0.05, 1.05), yticks=[])
    axes.spines[:].set_visible(False)


def draw_parameters(sweep: Sweep) -> Figure | None:
    """The metric against each parameter that varies; None if none does, or before there is a result."""
    parameters = parameter_axes(sweep)
    points = rank(sweep)
    if not parameters or not any(point.values for point in points):
        return None
    metric = metric_axis(sweep, [value for point in points for value in point.values])
    columns = min(COLUMNS, len(parameters))
    rows = math.ceil(len(parameters) / columns)
    figure = Figure(figsize=(5.6 if columns == 1 else 11, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, parameter in zip(panels, parameters, strict=False):
        partner = partner_of(parameter, parameters)
        draw_panel(axes, parameter, partner, points, metric)
        axes.set_xlabel(wrapped(parameter.name, 40))
    for axes in panels[len(parameters) :]:
        axes.set_axis_off()
    panels[0].set_ylim(metric.limits)
    for axes in panels[::columns]:
        axes.set_ylabel(sweep.metric)
    return figure


def partner_of(parameter: ParameterAxis, parameters: list[ParameterAxis]) -> ParameterAxis | None:
    """The parameter for each value of which there is a line: the only other one, or the only other that is numeric."""
    others = [p for p in parameters if p is not parameter]
    if len(others) > 1:
        others = [p for p in others if p.is_numeric and parameter.is_numeric]
    return others[0] if len(others) == 1 and len(others[0].values) < FEW else None


def draw_panel(
    axes: Axes,
    parameter: ParameterAxis,
    partner: ParameterAxis | None,
    points: list[Point],
    metric: MetricAxis,
) -> None:
    groups = partner.values if partner else [None]
    width = 0.0 if parameter.is_numeric else 0.6  # of the place for a name, over which the groups are spread
    for i, group in enumerate(groups):
        color = group_color(i, partner)
        offset = width * ((i + 0.5) / len(groups) - 0.5)
        jobs = collections.defaultdict(list)  # by position
        for point in points:
            if partner is None or value_of(point, partner.key) == group:
                jobs[parameter.position(value_of(point, parameter.key)) + offset].append(point)
        values = {x: found for x in sorted(jobs) if (found := [v for point in jobs[x] for v in point.values])}
        draw_dots(axes, values, color, metric)
        draw_failures(axes, [x for x in jobs for point in jobs[x] for _ in range(failures(point))], color, metric)
        means = {x: metric.clip(statistics.fmean(values[x])) for x in values}
        if not means or (parameter.is_numeric and len(parameter.values) > MAX_ON_LINE):
            continue
        if parameter.is_numeric:
            axes.plot(list(means), list(means.values()), color=color, linewidth=1.8)
            best = (min if metric.lower_is_better else max)(means, key=means.__getitem__)
            axes.plot(best, means[best], "o", markersize=12, color=color, fillstyle="none", markeredgewidth=1.8)
        else:
            half = 0.4 * width / len(groups)
            axes.hlines(list(means.values()), np.array(list(means)) - half, np.array(list(means)) + half, color, lw=2.5)
    draw_ticks(axes, parameter)
    if partner:
        draw_legend(axes, partner)


def group_color(i: int, partner: ParameterAxis | None) -> str | tuple:
    if partner is None or not partner.is_numeric:
        return COLORS[i]
    shade = MetricAxis(0, max(1, len(partner.values) - 1), lower_is_better=True)
    return shade.color(i)


def draw_legend(axes: Axes, partner: ParameterAxis) -> None:
    handles = [Line2D([], [], color=group_color(i, partner), marker="o") for i in range(len(partner.values))]
    labels = [shortened(value_text(value), 18) for value in partner.values]
    place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
    axes.legend(handles, labels, title=wrapped(partner.name, 18), fontsize="small", title_fontsize="small", **place)


def draw_dots(axes: Axes, values: dict[float, list[float]], color: str | tuple, metric: MetricAxis) -> None:
    """A dot per job; a triangle at the edge for a value beyond."""
    x, y = np.array([(x, y) for x in values for y in values[x]]).reshape(-1, 2).T
    inside = (y >= metric.low) & (y <= metric.high)
    axes.plot(x[inside], y[inside], "o", color=color, markersize=4.5, alpha=0.5, markeredgewidth=0)
    beyond = "^" if metric.lower_is_better else "v"
    axes.plot(x[~inside], metric.clip(y[~inside]), beyond, color=color, markersize=7)


def failures(point: Point) -> int:
    """Jobs that failed or ended with a value that is not finite."""
    return sum(job.status == "failed" or (job.status == "finished" and not job.has_finite_value) for job in point.jobs)


def draw_failures(axes: Axes, x: list[float], color: str | tuple, metric: MetricAxis) -> None:
    worst = metric.high if metric.lower_is_better else metric.low
    axes.plot(x, [worst] * len(x), "x", color=color, markersize=6)


def draw_ticks(axes: Axes, parameter: ParameterAxis) -> None:
    ticks = parameter.ticks(gap=0.12 if parameter.is_numeric else 0.0)
    labels = [shortened(text, 24) for text in ticks.values()]
    is_crowded = sum(map(len, labels)) > 36
    axes.set_xticks(list(ticks), labels, fontsize="small", rotation=30 if is_crowded else 0)
    if is_crowded:
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    low, high = parameter.ends
    margin = 0.08 * (high - low) if parameter.is_numeric else 0.6
    axes.set_xlim(low - margin, high + margin)


def draw_learning_curves(sweep: Sweep) -> Figure | None:
    """The metric over training, of every job that has a finite value."""
    jobs = [job for job in sweep.jobs if any(math.isfinite(value) for _, value in job.curve)]
    if not jobs:
        return None
    longest = max(job.curve[-1][0] for job in jobs)
    late = [value for job in jobs for step, value in job.curve if step >= 0.2 * longest or step == job.curve[-1][0]]
    metric = metric_axis(sweep, late if any(map(math.isfinite, late)) else [v for job in jobs for _, v in job.curve])
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots()
    handles: dict[str, Line2D] = {}
    for job, label, color, width in styles(sweep, jobs):
        steps, values = np.array(job.curve).T
        marker = "." if len(job.curve) <= 30 else None
        (line,) = axes.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=4, zorder=1 + width)
        if label:
            handles.setdefault(label, line)
        if job.status in ENDS:
            ends = {"marker": ENDS[job.status], "markersize": 7, "color": color}
            finite = np.flatnonzero(np.isfinite(values))[-1]
            axes.plot(steps[finite], metric.clip(values[finite]), **ends, clip_on=False, zorder=5)
            handles.setdefault(job.status, Line2D([], [], linestyle="", **{**ends, "color": GREY}))
    axes.set(xlabel="step", ylabel=sweep.metric, ylim=metric.limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="0.92")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def styles(sweep: Sweep, jobs: list[Job]) -> Iterator[tuple[Job, str, str | tuple, float]]:
    """Label, color and line width of each job: a color per point, or by the last value if there are too many points."""
    points = [point for point in rank(sweep) if any(job in jobs for job in point.jobs)]
    last = {job.name: [value for _, value in job.curve if math.isfinite(value)][-1] for job in jobs}
    metric = metric_axis(sweep, list(last.values()))
    for i, point in enumerate(points):
        for k, job in enumerate(job for job in point.jobs if job in jobs):
            if len(points) == 1:
                yield job, f"seed {job.seed}", COLORS[k % len(COLORS)], 1.5
            elif len(points) <= len(COLORS):
                yield job, point_name(sweep, point), COLORS[i], 1.5
            else:
                label = "best: " + point_name(sweep, point) if i == 0 else ""
                yield job, label, metric.color(last[job.name]), 2.5 if i == 0 else 1.0
