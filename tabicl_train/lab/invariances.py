"""invariances: what the architecture of TabICL guarantees for any weights, and what inducing points save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from priors.options import option
from tabicl_train.console import counted
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.folder import Folder, markdown
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.model.pack import Pack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 5  # networks with random weights
ROWS, LABELED, FEATURES = 60, 40, 6  # of the table that they predict
WIDTH, HEADS, INDUCING = 128, 4, 128  # column stage of TabICL (arXiv 2502.05564)
LENGTHS = (300, 1000, 3000, 10_000)  # rows of a column
REPEATS = 3
CLAIMS = {
    "labeled rows": "labeled rows in another order",
    "query rows": "query rows one at a time",
    "with positions": "features in another order",
    "without positions": "features in another order, rotary embedding switched off",
}

QUESTION = """
Some properties of a TabICL follow from its architecture, whatever its weights are: the order of the labeled rows does
not matter, and query rows do not see each other. The order of the features would not matter either, but for the rotary
position embedding, by which members of an ensemble with shuffled features differ. Networks with random weights predict
a table and the same table in another order. The column stage, moreover, sends all rows through a fixed number of
inducing points: what does that save?
"""


@dataclass
class InvariancesOptions:
    """tabicl-lab invariances folder=DIR

    What changes predictions of networks with random weights, and the time of induced and full attention.
    """

    folder: str = option()
    """Folder to write."""
    small: bool = False
    """Two networks, and short columns."""


def run(options: InvariancesOptions) -> None:
    folder = Folder("invariances", options)
    seeds = 2 if options.small else SEEDS
    lengths = LENGTHS[:2] if options.small else LENGTHS
    changes = pd.DataFrame([measure_changes(seed) for seed in range(seeds)])
    times = pd.DataFrame(measure_times(lengths))
    folder.csv("invariances", changes)
    folder.csv("attention_time", times)
    folder.figure("attention_time", draw(times))
    folder.page("What the architecture promises", QUESTION, findings(changes, times))


@torch.no_grad()
def measure_changes(seed: int) -> dict[str, float]:
    """Return the largest change of a logit in each of CLAIMS, divided by the standard deviation of the logits."""
    torch.manual_seed(seed)
    # As in TabICL, each feature is a group of its own. Circular groups of three would depend on the order anyway.
    config = TabICLConfig(
        embed_dim=32,
        col_num_blocks=2,
        col_num_heads=4,
        col_num_inducing=16,
        col_grouping="none",
        row_num_blocks=2,
        row_num_heads=4,
        icl_num_blocks=2,
        icl_num_heads=4,
    )
    network = TabICL(config).eval()

    # A random table, and other orders of its labeled rows and features.
    X = torch.randn(ROWS, FEATURES)
    y = torch.randint(0, config.max_classes, (ROWS,))
    rows = torch.randperm(LABELED)
    features = torch.randperm(FEATURES)
    if torch.equal(features, torch.arange(FEATURES)):
        features = features.flip(0)

    def predict(X: Tensor, y: Tensor) -> Tensor:
        return network(Pack.of([(X, y, LABELED)]))  # (query rows, classes)

    expected = predict(X, y)
    spread = expected.std()

    def change(found: Tensor, expected: Tensor) -> float:
        return ((found - expected).abs().max() / spread).item()

    # The claims, one after the other.
    found = {"seed": float(seed)}
    shuffled = torch.cat([X[:LABELED][rows], X[LABELED:]])
    found["labeled rows"] = change(predict(shuffled, torch.cat([y[:LABELED][rows], y[LABELED:]])), expected)
    alone = []
    for row in range(LABELED, ROWS):
        with_one_query = torch.cat([X[:LABELED], X[row : row + 1]])
        alone.append(predict(with_one_query, y[: LABELED + 1]))
    found["query rows"] = change(torch.cat(alone), expected)
    found["with positions"] = change(predict(X[:, features], y), expected)
    network.row_interactor.tf_row["rope"].freqs.zero_()  # nothing is rotated, so all positions are equal
    found["without positions"] = change(predict(X[:, features], y), predict(X, y))
    return found


@torch.no_grad()
def measure_times(lengths: tuple[int, ...]) -> list[dict[str, float]]:
    """Time full self-attention of the n rows of one column, and attention to and from inducing points."""
    rows = []
    for n in lengths:
        x = torch.randn(1, HEADS, n, WIDTH // HEADS)
        points = torch.randn(1, HEADS, INDUCING, WIDTH // HEADS)

        def full(x: Tensor = x) -> None:
            F.scaled_dot_product_attention(x, x, x)

        def induced(x: Tensor = x, points: Tensor = points) -> None:
            hidden = F.scaled_dot_product_attention(points, x, x)
            F.scaled_dot_product_attention(x, hidden, hidden)

        for repeat in range(REPEATS):
            row = {"n": n, "repeat": repeat, "scores_full": n * n, "scores_induced": 2 * n * INDUCING}
            rows.append(row | {"full": seconds(full), "induced": seconds(induced)})
    return rows


def seconds(function: Callable[[], None]) -> float:
    """Return the CPU seconds of a call, after one call that allocates."""
    function()
    started = time.process_time()
    function()
    return time.process_time() - started


def draw(times: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    means = times.groupby("n").mean(numeric_only=True)
    for way in ("full", "induced"):
        axes.plot(means.index, means[way], "o-", label=f"{way} attention")
    axes.set(xscale="log", yscale="log", xlabel="rows of a column", ylabel="CPU seconds")
    axes.legend()
    return figure


def findings(changes: pd.DataFrame, times: pd.DataFrame) -> str:
    """Return the results in Markdown.

    Parameters
    ----------
    changes : DataFrame
        What `measure_changes` has returned, a row for each network.
    times : DataFrame
        What `measure_times` has returned, a row for each length and repetition.
    """
    # Changes of logits, a row for each claim. They are never below zero.
    rows = []
    for name, title in CLAIMS.items():
        mean = mean_interval(changes[name].to_numpy(), lowest=0.0)
        rows.append([title, f"{mean:.2g}", f"{changes[name].max():.2g}"])
    table = pd.DataFrame(rows, columns=["what differs", "largest change of a logit", "in the worst network"])

    # What inducing points save: a row for each length of a column, with the ratio of the numbers of scores and that of
    # the measured times. Ratios of times are averaged as logarithms.
    saved = []
    for n, repetitions in times.groupby("n"):
        ratio_of_scores = repetitions["scores_full"].iloc[0] / repetitions["scores_induced"].iloc[0]
        log_ratio = mean_interval(np.log(repetitions["full"] / repetitions["induced"]).to_numpy())
        low, mean, high = (np.exp(value) for value in (log_ratio.low, log_ratio.mean, log_ratio.high))
        saved.append([f"{n:,}", f"{ratio_of_scores:.1f}", f"{mean:.1f} [{low:.1f}, {high:.1f}]"])
    columns = ["rows", "scores, full / induced", "CPU seconds, full / induced"]
    return f"""
Changes are in standard deviations of the logits, with 95 % intervals for other random weights, from
{counted(len(changes), "network")}; 1e-5 and less is rounding in float32:

{markdown(table)}

![CPU seconds by rows of a column](attention_time.png)

{markdown(pd.DataFrame(saved, columns=columns))}

Attention alone, without projections, of one column with width {WIDTH}, {HEADS} heads and {INDUCING} inducing points, on
this machine; intervals are for other repetitions, of which there are {times["repeat"].nunique()}.
"""
