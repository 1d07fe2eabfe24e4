"""What the experiments with sequences share: networks with softmax and with SSA, and their errors in tests."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from priors import TableSpec, build_prior
from priors.options import option
from tabicl_train.evaluation.statistics import Estimate, mean_interval
from tabicl_train.lab.folder import (
    HELD_OUT,
    Folder,
    Row,
    Runs,
    by_seed_and_table,
    markdown,
    plot_estimates,
    score_all,
    trained_runs,
)
from tabicl_train.model.family import Network
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = 40  # rows of the longest training sequence
SHIFT = 5  # sigma at which the rules are compared
SIGMAS = range(1, 11)  # standard deviations of the test sequences; 1 is that of training
DEVIANTS = (10, 20, 50, 100)  # factors of a single deviant number
LABELS = {"length": "rows", "sigma": "sigma", "input_sigma": "sigma of the points", "deviant": "factor of one number"}
SEQUENCES = 32  # of each block, for each test
BLOCKS = 10  # blocks of test sequences, whose means give the intervals
SMALL = [
    "seed=0",
    "model.num_blocks=1",
    *(f"curriculum.stages.sequences.{value}" for value in ("steps=2", "tables=4", "group_size=4")),
]


@dataclass
class SequenceOptions:
    """Options of all experiments with sequences."""

    folder: str = option()
    """Folder to write; the runs are inside, in runs/."""
    small: bool = False
    """Two steps of training, one seed, and a few test sequences."""


def scored_networks(
    folder: Folder,
    options: SequenceOptions,
    variations: dict[str, list[str]],
    keys: list[str],
    tests: Iterable[tuple[float, ...]],
    errors: Callable[[Network, str, Callable[..., Pack]], Row],
) -> pd.DataFrame:
    """Train and score the networks of the experiment's sweep under each variation of its settings.

    Parameters
    ----------
    folder : Folder
        The folder of the experiment.
    options : SequenceOptions
        Its options.
    variations : dict
        Settings of each variation, by its name.
    keys : list of str
        What tests differ in: options of the prior, and `length`, the number of rows.
    tests : iterable of tuple
        For each test, the values of `keys`.
    errors : callable
        `errors(network, variation, draw)` returns the errors of a network; `draw(prior, classes, **settings)` draws the
        sequences of a block of a test.

    Returns
    -------
    DataFrame
        A row for each run, test and block, with variation, rule, seed and the errors.
    """
    # The small form has one variation.
    small_settings: list[str] = []
    count = SEQUENCES
    blocks = BLOCKS
    if options.small:
        small_settings = SMALL
        count = 2
        blocks = 2
        variations = dict(itertools.islice(variations.items(), 1))

    # Each variation is a sweep of its own.
    runs: Runs = {}
    for variation, settings in variations.items():
        settings = [f"sweep={folder.experiment}", *settings, *small_settings]
        runs_of_variation = trained_runs(settings, folder.path / "runs" / variation.replace(" ", "_"))
        for name, (facts, run_dir) in runs_of_variation.items():
            runs[f"{variation}/{name}"] = {"variation": variation, **facts}, run_dir

    def score(network: Network, facts: Row, *values: int) -> list[Row]:
        test = dict(zip(keys, values, strict=True))
        rows = []
        for block in range(blocks):
            draw_block = functools.partial(draw, count, block, test)
            rows.append({"block": block, **errors(network, str(facts["variation"]), draw_block)})
        return rows

    return score_all(folder, runs, keys, tests, score)


def draw(count: int, block: int, test: dict[str, int], prior: str, classes: int, **settings) -> Pack:
    """Draw a block of test sequences, the same for all networks and, before they are scaled, for all tests."""
    length = test.get("length", TRAINED)
    scales = {name: float(value) for name, value in test.items() if name != "length"}
    source = build_prior(prior, **scales, **settings)
    spec = TableSpec(length, length // 2, 1, classes)
    tables = [source.sample(spec, (HELD_OUT, length, block, number)) for number in range(count)]
    return Pack.of([(table.X, table.y, table.train_size) for table in tables])


def predicted(network: Network, pack: Pack) -> torch.Tensor:
    """Return the predictions of sequences of equal length, float64 (sequences, rows, outputs)."""
    return predict(network, pack).double().unflatten(0, (len(pack), -1))


def rows_where(scores: pd.DataFrame, **values) -> pd.DataFrame:
    """Return the rows whose columns have these values."""
    return scores[np.logical_and.reduce([scores[name] == value for name, value in values.items()])]


def contrast(scores: pd.DataFrame, column: str, share: float = 1.0) -> Estimate:
    """Return SSA's error minus a share of softmax's on the same sequences, for one variation and test."""
    softmax = by_seed_and_table(rows_where(scores, rule="softmax"), column, "block")
    ssa = by_seed_and_table(rows_where(scores, rule="SSA"), column, "block")
    return mean_interval(ssa - share * softmax)


def comparison_table(
    scores: pd.DataFrame, places: dict[str, dict[str, int]], columns: dict[str, str], form: str, highest: float = np.inf
) -> str:
    """Return a table of mean errors with intervals.

    Parameters
    ----------
    scores : DataFrame
        What `scored_networks` has returned.
    places : dict
        Some tests by their titles, each with the values of its keys.
    columns : dict
        Titles of the columns of errors.
    form : str
        Format of a number.
    highest : float, optional
        The largest possible error.

    Returns
    -------
    str
        A table in Markdown with a row for each variation, column and rule, and one for the difference of the rules.
    """
    table = []
    for variation, rows in scores.groupby("variation", sort=False):
        at_places = [rows_where(rows, **place) for place in places.values()]
        for column, title in columns.items():
            for rule in scores["rule"].unique():
                cells = []
                for rows_there in at_places:
                    errors = by_seed_and_table(rows_where(rows_there, rule=rule), column, "block")
                    cells.append(format(mean_interval(errors, 0.0, highest), form))
                table.append([f"{rule}, {variation}{title}", *cells])
            differences = [format(contrast(rows_there, column), f"+{form}") for rows_there in at_places]
            table.append(["SSA minus softmax", *differences])
    return markdown(pd.DataFrame(table, columns=["network", *places]))


def undecided(inside: pd.DataFrame, column: str, most: float) -> str | None:
    """Return why no claim is decided, if a rule's mean error exceeds `most` in tests as in training; otherwise None."""
    errors = {}
    for rule, rows in inside.groupby("rule", sort=False):
        errors[rule] = by_seed_and_table(rows, column, "block")
    if max(error.mean() for error in errors.values()) <= most:
        return None
    reached = " and ".join(f"{mean_interval(error, 0.0):.2g} with {rule}" for rule, error in errors.items())
    return (
        f"not decided at this size: in the trained range (sigma 1, {TRAINED} rows) the error is {reached}, and one of "
        f"at most {most:g} would show that the task is learned. That takes more steps or larger networks"
    )


def heat_maps(scores: pd.DataFrame, index: str, columns: dict[str, str], logarithmic: bool) -> Figure:
    """Draw maps of errors by sigma and another key: a row of maps for each variation and column, a map for each rule.

    Parameters
    ----------
    scores : DataFrame
        What `scored_networks` has returned.
    index : str
        The other key, on the vertical axis.
    columns : dict
        Titles of the columns of errors.
    logarithmic : bool
        Whether colors show log10 of the error instead of the error from 0 to 0.5.

    Returns
    -------
    Figure
    """
    from matplotlib.figure import Figure

    # The values of each map. An error of 0 counts as 1e-6 on the logarithmic scale.
    rows = list(itertools.product(scores["variation"].unique(), columns))
    rules = list(scores["rule"].unique())
    figure = Figure(figsize=(1 + 4 * len(rules), 2.6 * len(rows)), layout="constrained")
    shown = {}
    for (variation, rule), rows_of_map in scores.groupby(["variation", "rule"]):
        for column in columns:
            mean = rows_of_map.pivot_table(index=index, columns="sigma", values=column)
            if logarithmic:
                mean = np.log10(mean.clip(lower=1e-6))
            shown[variation, column, rule] = mean

    # All maps have the same colors.
    low = 0.0
    high = 0.5
    if logarithmic:
        low = min(mean.to_numpy().min() for mean in shown.values())
        high = max(mean.to_numpy().max() for mean in shown.values())
    for grid, (variation, column) in zip(figure.subplots(len(rows), len(rules), squeeze=False), rows, strict=True):
        for axes, rule in zip(grid, rules, strict=True):
            mean = shown[variation, column, rule]
            image = axes.imshow(mean, aspect="auto", origin="lower", cmap="viridis", vmin=low, vmax=high)
            axes.set_xticks(range(mean.shape[1]), mean.columns)
            axes.set_yticks(range(mean.shape[0]), mean.index)
            axes.set(title=f"{rule}, {variation}{columns[column]}", xlabel="sigma", ylabel=LABELS[index])
    figure.colorbar(image, ax=figure.axes, label="log10 of the error" if logarithmic else "error", shrink=0.6)
    return figure


def lines_of_rules(panels: dict[str, tuple[pd.DataFrame, str, str]], **style: Any) -> Figure:
    """Draw means with intervals, a line for each rule.

    Parameters
    ----------
    panels : dict
        By title: the rows of one variation, and the columns of the horizontal and the vertical axis.
    **style
        Properties of all axes.

    Returns
    -------
    Figure
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * len(panels), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, (scores, x, y)) in zip(grid, panels.items(), strict=True):
        for rule, rows_of_rule in scores.groupby("rule", sort=False):
            means = {}
            for place, rows_there in rows_of_rule.groupby(x):
                means[place] = mean_interval(by_seed_and_table(rows_there, y, "block"))
            plot_estimates(axes, pd.Series(means, dtype=object), label=rule)
        axes.set(title=title, xlabel=LABELS[x], **style)
    figure.axes[0].legend()
    return figure
