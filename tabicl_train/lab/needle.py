"""needle: small networks of each scoring rule, trained on short tables, look for one row among more and more negatives.

The task is lab/priors/needle.py, and lab/configs/sweep/needle.yaml has all settings of the training.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from priors import TableSpec, build_prior
from priors.options import option
from tabicl_train.console import counted
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.folder import (
    FEWEST_SEEDS,
    HELD_OUT,
    NO_CLAIM,
    Folder,
    Row,
    Runs,
    by_seed_and_table,
    markdown,
    plot_estimates,
    score_all,
    trained_runs,
)
from tabicl_train.lab.instruments import predict_with_entropy
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEATURES, NEEDLES, QUERIES = 2, 4, 32  # of a test table; training has the same numbers of features and needles
NEGATIVES = [100, 300, 1000, 3000, 10000, 15000, 30000]  # of the tables that networks are tested on
TABLES = 12  # tables for each number of negatives
LONGEST = 224  # negatives of the longest training table: 95 % of 240 rows, without the needles
CLAIM = 15_000  # number of negatives in the paper's claim

QUESTION = """
Each table is a haystack: all of its labeled rows but four are negatives, which lie in a crowd and share a class. The
four others, the needles, lie outside the crowd, in different directions, and each has a class of its own. The row to be
classified lies next to one of the needles, so a single labeled row tells its class, however many negatives there are.
Small networks that differ only in how they turn scores into attention weights learn this on tables with at most 224
negatives. Which of them still find the needle among thousands? A network that no longer finds it answers with the class
of the negatives, and is right in one case of four.
"""


@dataclass
class NeedleOptions:
    """tabicl-lab needle folder=DIR [small=true]

    Trains small networks of each scoring rule to find one row among few negatives, and tests them on many. It takes
    about 25 minutes on two CPU cores; when it is stopped, the same command continues it.
    """

    folder: str = option()
    """Folder to write; the runs are inside, in runs/."""
    small: bool = False
    """Two steps of training, one seed, and two short tables."""


SMALL = ["seed=0", *(f"curriculum.stages.stage1.{value}" for value in ("steps=2", "rows=[20,40]", "tables=2"))]


def run(options: NeedleOptions) -> None:
    folder = Folder("needle", options)
    if options.small:
        runs = trained_runs(["sweep=needle", *SMALL], folder.path / "runs")
        scores = score_runs(folder, runs, negatives=[20, 60], tables=2)
    else:
        runs = trained_runs(["sweep=needle"], folder.path / "runs")
        scores = score_runs(folder, runs, NEGATIVES, TABLES)
    folder.figure("needle", draw(scores))
    folder.page("Needles in haystacks", QUESTION, findings(scores))


def score_runs(folder: Folder, runs: Runs, negatives: list[int], tables: int) -> pd.DataFrame:
    """Return a row for each run and test table: run, negatives, table, rule, seed, accuracy, entropy."""
    prior = build_prior("needle", needles=NEEDLES)

    def score_one(network: TabICL, _: Row, negatives: int, number: int) -> list[Row]:
        labeled = negatives + NEEDLES
        spec = TableSpec(labeled + QUERIES, labeled, FEATURES, NEEDLES)
        table = prior.sample(spec, (HELD_OUT, negatives, number))
        pack = Pack.of([(table.X, table.y, labeled)])
        logits, entropy = predict_with_entropy(network, pack, QUERIES)
        is_right = logits[:, :NEEDLES].argmax(-1) == table.y[labeled:]
        return [{"accuracy": is_right.double().mean().item(), "entropy": entropy}]

    return score_all(folder, runs, ["negatives", "table"], itertools.product(negatives, range(tables)), score_one)


def summary(scores: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return means of shares with intervals: a row for each rule, a column for each number of negatives."""
    means = {}
    for key, rows in scores.groupby(["rule", "negatives"]):
        means[key] = mean_interval(by_seed_and_table(rows, column), 0, 1)
    return unstacked(means, scores)


def unstacked(means: dict, scores: pd.DataFrame) -> pd.DataFrame:
    """Arrange means by (rule, negatives) in rows and columns, with the rules in the order of the scores."""
    frame = pd.Series(list(means.values()), pd.MultiIndex.from_tuples(means), dtype=object).unstack()
    rules = [rule for rule in scores["rule"].unique() if rule in frame.index]
    return frame.reindex(rules).rename_axis("rule")


def leads_over_first(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracy of each rule minus that of the first one on the same tables, arranged as in `summary`."""
    first, *others = scores["rule"].unique()
    means = {}
    for negatives, rows in scores.groupby("negatives"):
        accuracies = {rule: by_seed_and_table(rows_of_rule, "accuracy") for rule, rows_of_rule in rows.groupby("rule")}
        for rule in others:
            means[rule, negatives] = mean_interval(accuracies[rule] - accuracies[first])
    return unstacked(means, scores)


def draw_shares(axes: Axes, scores: pd.DataFrame, column: str, longest: int) -> None:
    """Draw the means of each rule by the number of negatives, with numbers above those of training in gray."""
    for rule, means in summary(scores, column).iterrows():
        plot_estimates(axes, means, label=rule)
    most = scores["negatives"].max()
    if most > longest:
        axes.axvspan(longest, most, color="0.95", zorder=0)
    axes.set(xscale="log", ylim=(-0.02, 1.02), xlabel="negatives (gray: more than in training)")


def draw(scores: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    titles = {"accuracy": "accuracy (dotted: by chance)", "entropy": "entropy of attention / log n"}
    for axes, (column, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        draw_shares(axes, scores, column, LONGEST)
        axes.set_title(title)
    figure.axes[0].axhline(1 / NEEDLES, color="0.5", linestyle=":")
    figure.axes[0].legend()
    return figure


def findings(scores: pd.DataFrame) -> str:
    # Tables with a row for each rule; the differences are those from the first rule.
    means = summary(scores, "accuracy")
    gaps = leads_over_first(scores)
    entropies = summary(scores, "entropy")
    seeds = counted(scores["seed"].nunique(), "seed")
    tables = counted(scores["table"].nunique(), "test table")
    first = means.index[0]
    return f"""
![accuracy and entropy by number of negatives](needle.png)

Accuracy, with 95 % intervals for other seeds of training and other test tables, from {seeds} and {tables}:

{markdown(means.reset_index())}

Accuracy minus that of {first}, on the same tables:

{markdown(gaps.reset_index(), "+.3f")}

{verdict(means, gaps, scores["seed"].nunique())}

Entropy of the attention of the rows to be classified, over log n, mean over the layers and heads of in-context
learning: 0 if all weight is on one row, 1 if all rows have equal weights.

{markdown(entropies.rename_axis("rule").reset_index())}

How it was done: lab/configs/sweep/needle.yaml has every setting of the training, which is the same for all rules;
needle.csv has the scores of each run and table, and runs/ the runs.
"""


def verdict(means: pd.DataFrame, gaps: pd.DataFrame, seeds: int) -> str:
    """Return a sentence for each rule about its difference from the first one among CLAIM negatives."""
    if seeds < FEWEST_SEEDS:
        return NO_CLAIM
    first = means.index[0]
    share_of_first = f"{first} in {means.loc[first, CLAIM].mean:.1%}"
    lines = []
    for rule, gap in gaps[CLAIM].items():
        share_of_rule = f"{rule} is right in {means.loc[rule, CLAIM].mean:.1%} of the cases"
        conclusion = "a difference whose interval excludes zero" if gap.excludes_zero else "which decides nothing"
        lines.append(f"- {share_of_rule}, {share_of_first}: {conclusion}.")
    size = "This ranks the rules for networks of width 16 with two in-context layers; larger ones may fail later."
    return "\n".join([f"Among {CLAIM:,} negatives:", "", *lines, "", size])
