"""long_rows: networks trained on up to 2,048 rows, fixed or growing, tested on up to 32,768 labeled rows.

They are trained by lab/configs/sweep/long_rows.yaml, with the curricula fixed_long, growing_long and fixed_short. The
experiment differs from `curriculum` in longer tables, the network of demo_long, QASSMax that starts at 1, and entropy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch.nn.functional as F

from priors.options import option
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.statistics import Estimate, mean_interval
from tabicl_train.lab.curriculum import QUERIES, test_table
from tabicl_train.lab.folder import (
    FEWEST_SEEDS,
    NO_CLAIM,
    Folder,
    Row,
    by_seed_and_table,
    markdown,
    score_all,
    setting_of_labels,
    trained_runs,
)
from tabicl_train.lab.instruments import predict_with_entropy
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 2048  # rows of the longest training tables; at most 1,638 of them are labeled
FACTORS = (1, 2, 4, 8, 16)
TABLES = 8  # each takes half a CPU minute (16 s on two cores), most of it for 32,768 rows
FIXED, GROWING, SHORT = CURRICULA = "fixed_long", "growing_long", "fixed_short"  # lab/configs/curriculum
RULES = ("softmax", "SSMax", "QASSMax", "QASSMax from 1")  # labels of the sweep
STYLES = {FIXED: "o--", GROWING: "o-", SHORT: "o:"}
RULE = "QASSMax"  # the rule that is compared with the others
SMALL = [
    "seed=0",
    *(
        f"curriculum.stages.{stage}.{value}"
        for stage in ("first", "middle", "last")
        for value in ("steps=1", "tables=2", "rows=[20,40]")
    ),
]

QUESTION = """
Is it worthwhile to grow the tables of training? With the same amount of arithmetic, networks see tables of 2,048 rows
only (fixed_long), tables that grow up to 2,048 rows (growing_long), or tables of 512 rows only (fixed_short). Then they
predict tables with up to 32,768 labeled rows, under different rules of attention: softmax; SSMax, which multiplies
scores by log n; QASSMax, which multiplies queries by learned functions of log n and of the query; and QASSMax whose
learned function of log n starts at 1. There are two scores: the log loss, where lower is better, compared with that of
the class frequencies of the labeled rows; and the entropy of attention over log n, which is 1 if all weights are equal.
"""


@dataclass
class LongRowsOptions:
    """tabicl-lab long_rows folder=DIR ['curricula=[growing_long,fixed_short]'] ['rules=[softmax,QASSMax]']

    Trains networks of four scoring rules on up to 2,048 rows, fixed or growing, and tests them on up to 32,768. It
    takes an hour and three quarters on two CPU cores; when it is stopped, the same command continues it.
    """

    folder: str = option()
    """Folder to write; the runs are inside, in runs/."""
    curricula: list[str] = option([FIXED, GROWING], choices=CURRICULA)
    """Which curricula are compared: fixed_long (2,048 rows), growing_long, fixed_short (512 rows). Another choice needs
    another folder."""
    rules: list[str] = option(list(RULES), choices=RULES)
    """Which rules: softmax, SSMax, QASSMax, QASSMax from 1. Another choice needs another folder."""
    scale_steps: float = option(0.5, above=0)
    """Multiplies the steps of all networks; with 1 they have 1e13 FLOPs each, as `experiment=demo_long` has."""
    small: bool = False
    """One step of training in each stage, one seed and two short tables."""


def run(options: LongRowsOptions) -> None:
    if not (options.curricula and options.rules):
        raise ConfigError(["curricula or rules is empty; name at least one of each"])
    folder = Folder("long_rows", options)
    curricula = "curriculum=" + ",".join(options.curricula)
    rules = setting_of_labels("rule", options.rules)
    settings = SMALL if options.small else [f"curriculum.scale_steps={options.scale_steps}"]
    trained = trained_runs(["sweep=long_rows", curricula, rules, *settings], folder.path / "runs")
    # A single curriculum is a setting of the sweep rather than a parameter, so its runs do not name it.
    runs = {
        name: ({"curriculum": options.curricula[0], **facts}, run_dir) for name, (facts, run_dir) in trained.items()
    }
    longest, tables = (16, 2) if options.small else (LONGEST, TABLES)
    lengths = [factor * longest for factor in FACTORS]

    def score_one(network: TabICL, _: Row, number: int) -> list[Row]:
        table = test_table("synthetic", number, lengths[-1])
        rows = []
        for n in lengths:
            # A shorter table has the last labeled rows of the longest one, and all have its query rows.
            X, y = table.X[-QUERIES - n :], table.y[-QUERIES - n :]
            rows.append({"n": n} | score_queries(network, X, y, n))
        return rows

    scores = score_all(folder, runs, ["table"], itertools.product(range(tables)), score_one)
    guesses = {}
    for n in lengths:
        labels = [test_table("synthetic", number, lengths[-1]).y[-QUERIES - n :] for number in range(tables)]
        guesses[n] = [TabICL.guess_loss(y, n) for y in labels]
    folder.csv("class_frequencies", pd.DataFrame(guesses))
    folder.figure("long_rows", draw(scores, pd.DataFrame(guesses)))
    folder.page("What growing rows do for long tables", QUESTION, findings(scores, pd.DataFrame(guesses)))


def score_queries(network: TabICL, X, y, n: int) -> Row:
    """Return the log loss of the query rows, given the n labeled rows before them, and their mean entropy."""
    pack = Pack.of([(X, y, n)])
    logits, entropy = predict_with_entropy(network, pack, QUERIES)
    log_p = logits.log_softmax(-1)
    return {"log_loss": F.nll_loss(log_p, y[n:]).item(), "entropy": entropy}


def score_values(scores: pd.DataFrame, curriculum: str, rule: str, n: int, column: str) -> np.ndarray:
    """Return a column of the scores of one kind of network at one length, (seeds, tables)."""
    rows = scores[(scores["curriculum"] == curriculum) & (scores["rule"] == rule) & (scores["n"] == n)]
    return by_seed_and_table(rows, column)


def draw(scores: pd.DataFrame, guesses: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    # A color for each rule, a style for each curriculum.
    figure = Figure(figsize=(13, 8), layout="constrained")
    (loss, slope), (entropy, change) = figure.subplots(2, 2)
    lengths = sorted(scores["n"].unique())
    rules = list(scores["rule"].unique())
    colors = {rule: f"C{number}" for number, rule in enumerate(rules)}

    # Log loss, its change with the number of labeled rows, and entropy, a line for each kind of network.
    kinds = list(itertools.product(scores["curriculum"].unique(), rules))
    for number, (curriculum, rule) in enumerate(kinds):
        look = {"color": colors[rule], "label": f"{rule}, {curriculum}"}
        losses = [score_values(scores, curriculum, rule, n, "log_loss") for n in lengths]
        entropies = [score_values(scores, curriculum, rule, n, "entropy") for n in lengths]
        loss.plot(lengths, [values.mean() for values in losses], STYLES[curriculum], **look)
        entropy.plot(lengths, [values.mean() for values in entropies], STYLES[curriculum], **look)
        slopes = [mean_interval(longer - losses[0]) for longer in losses[1:]]
        plot_bars(slope, lengths[1:], slopes, (number, len(kinds)), fmt=STYLES[curriculum], **look)

    # What growing rows change compared with each other curriculum.
    pairs = list(itertools.product(compared_with_growing(scores), rules))
    for number, (other, rule) in enumerate(pairs):
        changes = [mean_interval(growing_minus(scores, other, rule, n)) for n in lengths]
        look = {"color": colors[rule], "label": f"{rule}, minus {other}"}
        plot_bars(change, lengths, changes, (number, len(pairs)), fmt="o-", **look)

    # Titles, lines at zero and axes.
    loss.plot(lengths, guesses.mean(), "k:", label="class frequencies")
    loss.set(title="log loss")
    slope.set(title=f"log loss, minus that with {lengths[0]:,} labeled rows")
    entropy.set(title="entropy of attention / log n")
    change.set(title=f"log loss of {GROWING}, minus another curriculum")
    for axes in (slope, change):
        axes.axhline(0, color="0.5", linewidth=1)
    if pairs:
        change.legend(fontsize="x-small")
    else:
        change.set_axis_off()
    for axes in (loss, slope, entropy, change):
        axes.set(xscale="log", xlabel="labeled rows")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
    figure.legend(*loss.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def plot_bars(axes: Axes, lengths: list[int], estimates: list[Estimate], place: tuple[int, int], **look) -> None:
    """Plot means with their intervals as bars.

    `place` is the number of the line and the number of all lines: their bars at one length spread over a factor of 1.25
    on the logarithmic axis, so as not to overlap.
    """
    number, count = place
    shift = 1.25 ** ((number + 0.5) / count - 0.5)
    means = np.array([estimate.mean for estimate in estimates])
    bars = np.array([[estimate.mean - estimate.low, estimate.high - estimate.mean] for estimate in estimates]).T
    axes.errorbar(np.array(lengths) * shift, means, bars, linewidth=1, markersize=4, capsize=2, **look)


def compared_with_growing(scores: pd.DataFrame) -> list[str]:
    """Return the curricula that growing rows are compared with; none if growing rows are not among the curricula."""
    curricula = list(scores["curriculum"].unique())
    return [name for name in curricula if name != GROWING] if GROWING in curricula else []


def growing_minus(scores: pd.DataFrame, other: str, rule: str, n: int) -> np.ndarray:
    """Return the log loss with growing rows minus that with another curriculum, at one length, (seeds, tables)."""
    return score_values(scores, GROWING, rule, n, "log_loss") - score_values(scores, other, rule, n, "log_loss")


def findings(scores: pd.DataFrame, guesses: pd.DataFrame) -> str:
    lengths = sorted(scores["n"].unique())
    rules = list(scores["rule"].unique())

    # By rule and curriculum: log loss, the same minus that of guessing and that at the shortest length, and entropy.
    losses = [["class frequencies", "", *(mean_interval(guesses[n].to_numpy()) for n in lengths)]]
    leads = []
    slopes = []
    entropies = []
    for curriculum, rule in itertools.product(scores["curriculum"].unique(), rules):
        by_length = [score_values(scores, curriculum, rule, n, "log_loss") for n in lengths]
        losses.append([rule, curriculum, *map(mean_interval, by_length)])
        minus_guess = [values - guesses[n].to_numpy() for n, values in zip(lengths, by_length, strict=True)]
        leads.append([rule, curriculum, *map(mean_interval, minus_guess)])
        slopes.append([rule, curriculum, *(mean_interval(longer - by_length[0]) for longer in by_length[1:])])
        by_length = [score_values(scores, curriculum, rule, n, "entropy") for n in lengths]
        change = f"{mean_interval(by_length[-1] - by_length[0]):+.3f}"
        entropies.append([rule, curriculum, *(mean_interval(values, 0, 1) for values in by_length), change])

    # What growing rows change, and how much more they change for QASSMax than for each other rule.
    changes = []
    more_than_others = []
    for other, rule in itertools.product(compared_with_growing(scores), rules):
        change_by_length = {n: growing_minus(scores, other, rule, n) for n in lengths}
        changes.append([rule, other, *map(mean_interval, change_by_length.values())])
        if RULE in rules and rule != RULE:
            more = [growing_minus(scores, other, RULE, n) - change_by_length[n] for n in lengths]
            more_than_others.append([rule, other, *map(mean_interval, more)])

    # A section with a table for each of them.
    columns = [f"n = {n:,}" for n in lengths]
    kind = ["rule", "curriculum"]
    pair = ["rule", "minus"]
    longest_minus_shortest = f"{lengths[-1]:,} minus {lengths[0]:,}"
    sections = [titled_table("Log loss", [*kind, *columns], losses, ".3f")]
    title = "Minus that of the class frequencies; below zero, it is better than a guess"
    sections.append(titled_table(title, [*kind, *columns], leads))
    title = f"Minus that with {lengths[0]:,} labeled rows; below zero, more rows help"
    sections.append(titled_table(title, [*kind, *columns[1:]], slopes))
    if changes:
        title = f"{GROWING} minus another curriculum; below zero, growing rows help"
        sections.append(titled_table(title, [*pair, *columns], changes))
    if more_than_others:
        title = f"The same of {RULE} minus that of another rule; below zero, growing rows help {RULE} more"
        sections.append(titled_table(title, [*pair, *columns], more_than_others))
    title = "Entropy of the attention of query rows over log n, mean over layers and heads of in-context learning"
    sections.append(titled_table(title, [*kind, *columns, longest_minus_shortest], entropies, ".3f"))
    seeds = scores["seed"].nunique()
    body = "\n\n".join(sections)
    return f"""
![log loss by labeled rows, what more labeled rows and growing rows change of it, and entropy](long_rows.png)

Means with 95 % intervals for other seeds and other tables, from {counted(seeds, "seed")} and
{counted(scores["table"].nunique(), "table")}. {NO_CLAIM if seeds < FEWEST_SEEDS else ""}

{body}

lab/configs/sweep/long_rows.yaml has every setting of the training; long_rows.csv has the scores of each run and table,
and runs/ the runs. A longer version of a table has the same query rows, and the labeled rows of the shorter ones.
"""


def titled_table(title: str, names: list[str], rows: list[list], form: str = "+.3f") -> str:
    """Return a title and its table; by default numbers have signs, as for differences."""
    return f"{title}:\n\n{markdown(pd.DataFrame(rows, columns=names), form)}"
