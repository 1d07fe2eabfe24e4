"""The figures of a comparison: leads with intervals, leads task by task, and the diagram of mean ranks."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tabicl_train.console import counted
from tabicl_train.evaluation.compare import NAMES, Comparison, Pair, is_lower_better
from tabicl_train.outputs import write_atomically

MOST_NAMED = 40  # tasks whose names fit below an axis
NAME_WIDTH = 30  # characters of an arm's name in one line
CHARACTERS_PER_INCH = 16  # in the text of a warning
LINE_HEIGHT = 0.13  # inches, of a line of a warning
FORMATS = ("pdf", "png")


def write_figures(folder: Path, comparison: Comparison) -> list[str]:
    """Write the figures of a comparison as PDF and PNG; returns their names without the suffix."""
    figures = {"comparison": draw_comparison(comparison)}
    if comparison.ranks is not None:
        figures["ranks"] = draw_ranks(comparison)
    for name, figure in figures.items():
        if comparison.warnings:
            add_warnings(figure, comparison.warnings)
        for ending in FORMATS:
            save_figure(figure, folder / f"{name}.{ending}")
    return list(figures)


def add_warnings(figure: Figure, warnings: list[str]) -> None:
    """Write warnings below a figure, which grows by their lines, since it may be shown without the text around it."""
    width, height = figure.get_size_inches()
    paragraphs = [textwrap.fill(f"warning: {line}", int(CHARACTERS_PER_INCH * width)) for line in warnings]
    text = "\n".join(paragraphs)
    figure.set_size_inches(width, height + LINE_HEIGHT * len(text.splitlines()))
    figure.supxlabel(text, fontsize="x-small")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the suffix of the file names."""
    ending = path.suffix.removeprefix(".")
    metadata = {"CreationDate": None} if ending == "pdf" else {}  # equal figures give equal files
    with rc_context({"pdf.fonttype": 42}):  # TrueType, since journals refuse fonts of type 3
        write_atomically(path, lambda file: figure.savefig(file, format=ending, dpi=200, metadata=metadata))


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the leads of the reference over the other arms.

    With one other arm, its leads by task. With several, their mean leads on the left, and on the right their leads by
    task or, in a comparison by seed, the scores of each seed.
    """
    pairs = comparison.pairs
    if len(pairs) == 1 and not comparison.by_seed:
        tasks = len(pairs[0].leads)
        named = tasks <= MOST_NAMED
        size = (max(5.5, 0.2 * tasks), 4.4) if named else (7.5, 3.6)
        figure = Figure(figsize=size, layout="constrained")
        draw_tasks(figure.subplots(), pairs[0], named)
        return figure

    lines = sum(len(wrapped(pair.b).splitlines()) for pair in pairs)
    figure = Figure(figsize=(11, max(3.4, 1.6 + 0.26 * lines)), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_means(left, comparison)
    if comparison.by_seed:
        draw_seeds(right, comparison)
    else:
        draw_sorted(right, comparison)
    return figure


def metric_name(comparison: Comparison) -> str:
    return NAMES.get(comparison.metric, comparison.metric)


def wrapped(name: str) -> str:
    """Break the name of an arm into lines: between settings, and before a long value."""
    lines = []
    for part in name.split(", "):
        if len(part) > NAME_WIDTH and "=" in part:
            part = part.replace("=", "=\n", 1)
        elif len(part) > NAME_WIDTH:
            part = textwrap.fill(part, NAME_WIDTH, break_long_words=False)
        lines.append(part)
    return "\n".join(lines)


def draw_tasks(axes: Axes, pair: Pair, named: bool) -> None:
    """Draw the lead of one arm over another by task, and the mean lead with its interval as a band."""
    # The mean, with a band if there are enough tasks for an interval.
    order = np.argsort(pair.leads, kind="stable")
    places = np.arange(1, len(order) + 1)
    name = NAMES.get(pair.metric, pair.metric)
    label = f"mean {pair.lead:+.4f}"
    if np.isfinite(pair.lead.error):
        axes.axhspan(pair.lead.low, pair.lead.high, color="C0", alpha=0.18, linewidth=0)
        label += " (95 % interval)"
    axes.axhline(pair.lead.mean, color="C0", linewidth=1.2, label=label)
    axes.axhline(0, color="gray", linewidth=1)

    # A stem for each task, in ascending order of the leads; more than MOST_NAMED names would overlap.
    colors = ["C0" if lead >= 0 else "C1" for lead in pair.leads[order]]
    axes.vlines(places, 0, pair.leads[order], color=colors, linewidth=1)
    axes.scatter(places, pair.leads[order], color=colors, s=14, zorder=3)
    axes.set_xlim(0.3, len(order) + 0.7)
    if named:
        axes.set_xticks(places, [pair.task_names[i] for i in order], rotation=90, fontsize="x-small")
    else:
        axes.set_xlabel(f"{len(order)} tasks, sorted")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(f"lead in {name}")
    axes.set_title(f"{pair.a} against {pair.b}, better on {pair.wins.mean:.0%} of {counted(pair.tasks, 'task')}")
    axes.legend(loc="upper left", fontsize="small")


def draw_means(axes: Axes, comparison: Comparison) -> None:
    """Draw the mean leads of the reference over all others with their intervals."""
    pairs = comparison.pairs
    for place, pair in enumerate(pairs):
        lead = pair.lead
        color = f"C{(place + 1) % 10}"
        axes.plot([lead.low, lead.high], [place, place], color=color)
        axes.plot(lead.mean, place, "o", color=color)
        text = f"{lead.mean:+.4f}"
        axes.annotate(text, (lead.mean, place), (0, 6), textcoords="offset points", ha="center", fontsize="small")
    axes.axvline(0, color="gray", linewidth=1)
    axes.set_yticks(range(len(pairs)), [wrapped(pair.b) for pair in pairs], fontsize="small")
    axes.set_ylim(len(pairs) - 0.4, -0.7)
    axes.margins(x=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_title(f"lead of {comparison.names[0]}", fontsize="medium")
    axes.set_xlabel(f"{metric_name(comparison)}, means {pairs[0].where} with 95 % intervals", fontsize="small")


def draw_sorted(axes: Axes, comparison: Comparison) -> None:
    """Draw the leads of the reference over each of the others by task, sorted."""
    for place, pair in enumerate(comparison.pairs, start=1):
        leads = np.sort(pair.leads)
        axes.plot(range(1, len(leads) + 1), leads, ".-", color=f"C{place % 10}", label=f"over {pair.b}")
    axes.axhline(0, color="gray", linewidth=1)
    axes.set_xlim(0.5, len(comparison.values) + 0.5)
    axes.set_xlabel("tasks, sorted for each of them", fontsize="small")
    axes.set_title(f"lead in {metric_name(comparison)} by task", fontsize="medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="x-small", loc="upper left")


def draw_seeds(axes: Axes, comparison: Comparison) -> None:
    """Draw the scores of all arms, with a line that connects those of a seed, and their means."""
    means = comparison.values.mean()  # over sets of tables, by (arm, seed)
    seeds = list(dict.fromkeys(seed for _, seed in comparison.values))
    places = range(len(comparison.names))
    for seed in seeds:
        scores = [means[name, seed] for name in comparison.names]
        axes.plot(scores, places, ".-", color="0.75", linewidth=0.9)
    for place, name in enumerate(comparison.names):
        axes.plot(means[name].mean(), place, "o", color=f"C{place % 10}")
    axes.set_yticks(places, [wrapped(name) for name in comparison.names], fontsize="small")
    axes.set_ylim(len(comparison.names) - 0.4, -0.6)
    better = "lower" if is_lower_better(comparison.metric) else "higher"
    axes.set_title(f"{metric_name(comparison)}, {better} is better", fontsize="medium")
    axes.set_xlabel("means, and a gray line for each seed" if len(seeds) > 1 else "one seed", fontsize="small")


def draw_ranks(comparison: Comparison) -> Figure:
    """Draw the diagram of mean ranks: the best on the left, and bars over groups of arms that are not shown to differ.

    The diagram is that of Demsar (JMLR 7, 2006); evaluation/compare.py computes the groups.
    """
    ranks = comparison.ranks
    assert ranks is not None
    names = list(ranks.means.index)
    means = ranks.means.to_numpy()
    on_left = (len(names) + 1) // 2
    bars = len(ranks.groups)
    first = 0.35 * bars + 0.55  # depth of the first name below the axis
    depth = first + 0.5 * (on_left - 1) + 0.4
    figure = Figure(figsize=(7.5, 0.55 * depth + 1.0), layout="constrained")
    axes = figure.subplots()

    # The axis, with a tick for each rank
    low = 1
    high = len(names)
    edge = 0.08 * (high - low)  # between the ends of the axis and the names
    axes.plot([low, high], [0, 0], color="black", linewidth=1)
    for tick in range(low, high + 1):
        axes.plot([tick, tick], [0, -0.12], color="black", linewidth=1)
        axes.text(tick, -0.2, str(tick), ha="center", va="bottom", fontsize="small")

    # The names, connected to their ranks: the better half on the left, from top to bottom, the others on the right
    for place, (name, mean) in enumerate(zip(names, means, strict=True)):
        if place < on_left:
            line = place
            end = low - edge
            align = "right"
        else:
            line = len(names) - 1 - place
            end = high + edge
            align = "left"
        y = first + 0.5 * line
        is_reference = name == comparison.names[0]
        color = "C0" if is_reference else "0.25"
        axes.plot([mean, mean, end], [0, y, y], color=color, linewidth=1)
        axes.plot(mean, 0, "o", color=color, markersize=4)
        weight = "bold" if is_reference else "normal"
        label = f" {name} ({mean:.2f}) "
        axes.text(end, y, label, ha=align, va="center", fontsize="small", color=color, weight=weight)

    # The bars
    overhang = 0.02 * (high - low)
    for number, group in enumerate(ranks.groups):
        y = 0.3 + 0.35 * number
        left = ranks.means[group[0]] - overhang
        right = ranks.means[group[-1]] + overhang
        axes.plot([left, right], [y, y], color="black", linewidth=4, solid_capstyle="butt")

    axes.set_xlim(low - edge, high + edge)
    axes.set_ylim(depth, -0.7)
    axes.set_axis_off()
    bars_mean = "; bars connect those not shown to differ" if ranks.groups else ""
    title = f"mean rank by {metric_name(comparison)} on {ranks.tasks} tasks{bars_mean}"
    figure.suptitle(title, fontsize="medium")
    return figure
