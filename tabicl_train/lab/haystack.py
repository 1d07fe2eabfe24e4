"""haystack: some queries need one row, others the mean of many; which scoring rules do both among 100,000 negatives?

The task is lab/priors/haystack.py, and lab/configs/sweep/haystack.yaml has all settings of the training.
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
    score_all,
    trained_runs,
)
from tabicl_train.lab.instruments import predict_with_entropy
from tabicl_train.lab.needle import draw_shares, summary, unstacked
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES, NEEDLES, QUERIES = 2, 4, 64  # of a test table; training has the same numbers of features and needles
NEGATIVES = [300, 1000, 3000, 10_000, 30_000, 100_000]  # of the tables that networks are tested on
TABLES = 8  # tables for each number of negatives
LONGEST = 972  # negatives of the longest training table: 95 % of 1,024 rows, without the needles
RULE = "QASSMax"  # the rule that is compared with the others
# Accuracy with attention that is even over all rows: it tells which two classes most rows of the crowd have, not where.
EVEN = {"needle": 1 / NEEDLES, "crowd": 1 / 2}
KINDS = {"needle": "one row decides", "crowd": "many rows decide", "entropy": "entropy of attention / log n"}
SMALL = [
    "seed=0",
    *(f"curriculum.stages.stage1.{value}" for value in ("steps=2", "rows=[20,40]", "tables=2")),
]

QUESTION = """
Half of the query rows lie next to a needle, a single labeled row that tells their class. The other half lie in a crowd
whose labels are noisy: 40 % of the rows around them have the right class, so only the mean of many rows tells it. One
degree of sharpness for all queries cannot be right for both. QASSMax has a gate by which each query chooses its own.
Networks that differ only in their rule are trained on tables of 64 to 1,024 rows, and then predict among up to 100,000
negatives. Two more networks have QASSMax without its gate on the query: one has no gate at all, the other a gate of the
same form on the output of attention, after its weights are chosen.
"""


@dataclass
class HaystackOptions:
    """tabicl-lab haystack folder=DIR [small=true]

    Trains small networks of five rules on queries of different sharpness, and tests them among 100,000 negatives. It
    takes about half an hour on two CPU cores; when it is stopped, the same command continues it.
    """

    folder: str = option()
    """Folder to write; the runs are inside, in runs/."""
    steps: int = 800
    """Steps of training."""
    small: bool = False
    """Two steps of training, one seed, and two short tables."""


def run(options: HaystackOptions) -> None:
    folder = Folder("haystack", options)
    settings = SMALL if options.small else [f"curriculum.stages.stage1.steps={options.steps}"]
    runs = trained_runs(["sweep=haystack", *settings], folder.path / "runs")
    negatives, tables = ([20, 60], 2) if options.small else (NEGATIVES, TABLES)
    scores = score_runs(folder, runs, negatives, tables)
    folder.figure("haystack", draw(scores))
    folder.page("Queries of different sharpness", QUESTION, findings(scores))


def score_runs(folder: Folder, runs: Runs, negatives: list[int], tables: int) -> pd.DataFrame:
    """Return a row for each run and test table: run, negatives, table, rule, seed, needle, crowd and entropy.

    needle and crowd are the accuracies of the query rows next to a needle and in the crowd.
    """
    prior = build_prior("haystack", needles=NEEDLES)

    def score_one(network: TabICL, _: Row, negatives: int, number: int) -> list[Row]:
        labeled = negatives + NEEDLES
        spec = TableSpec(labeled + QUERIES, labeled, FEATURES, NEEDLES)
        table = prior.sample(spec, (HELD_OUT, negatives, number))
        pack = Pack.of([(table.X, table.y, labeled)])
        logits, entropy = predict_with_entropy(network, pack, QUERIES)
        is_right = logits[:, :NEEDLES].argmax(-1) == table.y[labeled:]
        return [
            {
                "needle": is_right[0::2].double().mean().item(),
                "crowd": is_right[1::2].double().mean().item(),
                "entropy": entropy,
            }
        ]

    return score_all(folder, runs, ["negatives", "table"], itertools.product(negatives, range(tables)), score_one)


def leads_of_qassmax(scores: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return QASSMax minus each other rule on the same tables, arranged as in `summary`."""
    means = {}
    for negatives, rows in scores.groupby("negatives"):
        values = {rule: by_seed_and_table(rows_of_rule, column) for rule, rows_of_rule in rows.groupby("rule")}
        for rule, other in values.items():
            if rule != RULE:
                means[rule, negatives] = mean_interval(values[RULE] - other)
    return unstacked(means, scores)


def draw(scores: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        draw_shares(axes, scores, column, LONGEST)
        axes.set_title(title)
    for axes, accuracy in zip(figure.axes, EVEN.values(), strict=False):
        axes.axhline(accuracy, color="0.5", linestyle=":")
    figure.axes[0].set_ylabel("accuracy (dotted: with even attention)")
    figure.axes[0].legend(fontsize="small")
    return figure


def findings(scores: pd.DataFrame) -> str:
    seeds = scores["seed"].nunique()

    # Two tables for each kind of queries, and for the entropy.
    sections = []
    for column, title in KINDS.items():
        gaps = leads_of_qassmax(scores, column).reset_index()
        sections.append(f"## {title.capitalize()}")
        sections.append(markdown(summary(scores, column).reset_index()))
        sections.append(f"{RULE} minus each other rule, on the same tables:")
        sections.append(markdown(gaps, "+.3f"))
    text = "\n\n".join(sections)
    claim = NO_CLAIM if seeds < FEWEST_SEEDS else "A difference is shown where its interval excludes zero."
    return f"""
![accuracy of both kinds of queries and entropy, by number of negatives](haystack.png)

Means with 95 % intervals for other seeds of training and other tables, from {counted(seeds, "seed")} and
{counted(scores["table"].nunique(), "table")} for each number of negatives. {claim}
The networks have a width of 16 and a single in-context layer: this ranks the rules at that size.

{text}

How it was done: lab/configs/sweep/haystack.yaml has every setting of the training, which is the same for all rules;
haystack.csv has the scores of each run and table, and runs/ the runs.
"""
