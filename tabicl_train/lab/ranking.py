"""ranking: scalar scaling of a query keeps the order of keys, element-wise scaling can reverse it.

This is shown in closed form for two keys, and counted in a trained network: how many of its queries turn to another key
with the multipliers of a longer table?
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from priors.options import option
from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.entropy import draw_test_table
from tabicl_train.lab.fading import SCALE
from tabicl_train.lab.folder import Folder, Row, markdown, share
from tabicl_train.lab.instruments import Site, sites
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import QUERY, Sequence, attention_layers, logits, recorded
from tabicl_train.model.tabicl import TabICL
from tabicl_train.weights.reader import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A query with two elements, and two keys that each match one of them. The divisor sqrt(2) is left out.
FIRST, SECOND = 4.0, 3.0  # the elements of the query, which are the scores of the two keys
GROWTH = 0.1, SCALE  # growth with log n of the multipliers of both elements under the element-wise rule
START = 1.0  # the element-wise multiplier of the first element at n = 1
POWERS = (1, 10, 100, 1000)  # exponents n of (1 + x / n)^n

# A trained network.
LABELED_ROWS = 100
# Numbers of labeled rows whose multipliers the same queries get. mini has seen up to 922 in training.
LONGER = (200, 900, 10_000, 100_000)
TABLES = 8
# The least ratio of the weights of both keys, before and after. A smaller one says little if all weights are small.
FACTOR = 2

QUESTION = """
A query may be rescaled before it meets the keys. One positive number for the whole query changes how decided attention
is, but not which key comes first. A number for each element of the query can turn it to another key. Here a query (4,
3) meets a key (1, 0), a key (0, 1) and n - 2 keys (0, 0). SSMax multiplies both elements by s log n. The element-wise
rule multiplies the first by 1 + 0.1 log n and the second by s log n, as MLPs of log n may learn. Which key wins?
"""


@dataclass
class RankingOptions:
    """tabicl-lab ranking folder=DIR [checkpoint=RUN_DIR_OR_FILE]

    Two keys under scalar and element-wise scaling of the query, for n from 10 to a million, in closed form; of a
    checkpoint, how many queries turn to another key with the multipliers of longer tables.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str | None = None
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    small: bool = False
    """Fewer values of n, and two tables."""


def run(options: RankingOptions) -> None:
    network = network_of_options(options)
    folder = Folder("ranking", options)
    frame = ranking_curves(6 if options.small else 51)
    folder.csv("ranking", frame)
    folder.figure("ranking", draw(frame))
    text = findings(frame)
    if network is not None:
        tables = range(2 if options.small else TABLES)
        found = pd.concat([turned_queries(network, number) for number in tables], ignore_index=True)
        folder.csv("trained", found)
        text += findings_of_network(found)
    folder.page("Scaling and the ranking of keys", QUESTION, text)


def network_of_options(options: RankingOptions) -> TabICL | None:
    """Load the network of the options, if they name one; raises ConfigError without attention layers."""
    if options.checkpoint is None:
        if options.weights is not None:
            raise ConfigError([f"weights is {options.weights!r}; it needs a checkpoint, and none is given"])
        return None
    network = load_model(options.checkpoint, options.weights)
    attention_layers(network)  # raises an error before anything is written if there are none
    return network


def multipliers_by_rule(n: np.ndarray) -> dict[str, np.ndarray]:
    """Return the factors of the two elements of the query under each rule, (n, 2)."""
    log_n = np.log(n)
    ones = np.ones_like(log_n)
    slow, fast = GROWTH
    return {
        "softmax": np.stack([ones, ones], 1),
        "SSMax": np.stack([SCALE * log_n, SCALE * log_n], 1),
        "element-wise": np.stack([START + slow * log_n, fast * log_n], 1),
    }


def weights_of_keys(n: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the softmax weights of both keys among n keys, the others of which have the score 0, (n, 2)."""
    odds = np.exp(factors * np.array([FIRST, SECOND]))
    return odds / (odds.sum(1, keepdims=True) + n[:, None] - 2)


def crossing() -> float:
    """Return the n above which the element-wise rule prefers the second key.

    There FIRST * (START + slow * log n) = SECOND * fast * log n.
    """
    slow, fast = GROWTH
    return math.exp(FIRST * START / (SECOND * fast - FIRST * slow))


def ranking_curves(count: int) -> pd.DataFrame:
    """Return a row for each rule and n: rule, n, first and second (the weights of both keys)."""
    n = np.unique(np.geomspace(10, 1e6, count).round())
    frames = []
    for rule, factors in multipliers_by_rule(n).items():
        both = weights_of_keys(n, factors)
        frames.append(pd.DataFrame({"rule": rule, "n": n.astype(int), "first": both[:, 0], "second": both[:, 1]}))
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    rules = frame["rule"].unique()
    for axes, rule in zip(figure.subplots(1, len(rules), sharey=True), rules, strict=True):
        rows = frame[frame["rule"] == rule]
        axes.plot(rows["n"], rows["first"], label="key (1, 0)")
        axes.plot(rows["n"], rows["second"], "--", label="key (0, 1)")
        if rule == "element-wise":
            axes.axvline(crossing(), color="0.5", linestyle=":")
        axes.set(title=rule, xscale="log", xlabel="keys n", ylim=(-0.02, 1.02))
    figure.axes[0].set_ylabel("weight")
    figure.axes[0].legend()
    return figure


def findings(frame: pd.DataFrame) -> str:
    shown = frame[frame["n"].isin([10**power for power in range(1, 7)])]
    first = shown["first"].map("{:.4f}".format)
    second = shown["second"].map("{:.4f}".format)
    table = shown[["rule", "n"]].assign(**{"key (1, 0)": first, "key (0, 1)": second})
    limits = []
    for power in POWERS:
        x = np.linspace(-2, 2, 401)
        # The unnormalized weight of SSA with b = 1 / p, (1 + |z| / p)^(sgn(z) p), against exp(z).
        odds = (1 + np.abs(x) / power) ** (np.sign(x) * power)
        limits.append((power, f"{np.max(np.abs(odds / np.exp(x) - 1)):.2g}"))
    return f"""
![weights of two keys by number of keys](ranking.png)

{markdown(table)}

- **softmax** and **SSMax** multiply all scores by one positive number. The key (1, 0) has the larger score, so it has
  the larger weight for every n; only how much larger it is changes.
- The **element-wise** rule multiplies the scores {FIRST:g} and {SECOND:g} by different numbers. They are equal where
  {FIRST:g} ({START:g} + {GROWTH[0]:g} log n) = {SECOND:g} * {GROWTH[1]:g} log n, at n = {crossing():,.0f} (dotted).
  From there on the other key wins. The query points elsewhere in a long table than in a short one.

Whether that helps depends on what was learned; where n exceeds the lengths of training, nothing was learned about it.

## Signed averaging and softmax

With b = 1 / p, SSA weighs a score z by (1 + |z| / p)^(sgn(z) p), which tends to exp(z) as p grows. The largest relative
difference for scores from -2 to 2:

{markdown(pd.DataFrame(limits, columns=["p", "difference"]))}

These are formulas: there are no seeds, and no intervals.
"""


@torch.no_grad()
def turned_queries(network: TabICL, number: int) -> pd.DataFrame:
    """Count the queries of a table for which another key comes first with the multipliers of longer tables.

    Keys and unscaled queries are those of the table with LABELED_ROWS labeled rows, so that only the scaling differs.

    Parameters
    ----------
    network : TabICL
        The network.
    number : int
        The number of the table.

    Returns
    -------
    DataFrame
        A row for each attention layer in which rows are keys, each kind of queries and each of LONGER: table, queries
        (the kind), layer, longer, and shares of the pairs of a query and a head:

        turned
            Another key has the largest weight, at least FACTOR times that of the former key, which had at least FACTOR
            times its weight before.
        label_before, label_now
            Shares, among the pairs that have turned, whose former key and whose new key have the label of the query
            row; nan for other kinds of queries, and for regression.
    """
    # A table of graph_scm.
    table = draw_test_table("graph_scm", LABELED_ROWS, number, network.config.max_classes)
    pack = Pack.of([(table.X, table.y, LABELED_ROWS)])
    labels_of_keys = table.y[:LABELED_ROWS]
    labels_of_queries = table.y[LABELED_ROWS:]

    # Counts for each sequence, which is a table in one layer.
    counts: list[Row] = []

    def watch(site: Site, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            before = scores_of_keys(site, sequence, LABELED_ROWS)  # (H, Q, K)
            for longer in LONGER:
                now = scores_of_keys(site, sequence, longer)
                key_before, key_now, has_turned = compare_first_keys(before, now)  # (H, Q) each
                row = {"queries": sequence.kind, "layer": site.layer, "longer": longer}
                row["pairs"] = has_turned.numel()
                row["turned"] = has_turned.sum().item()
                if sequence.kind == QUERY and table.num_classes:
                    hits_before = labels_of_keys[key_before] == labels_of_queries
                    hits_now = labels_of_keys[key_now] == labels_of_queries
                    row["label_before"] = (hits_before & has_turned).sum().item()
                    row["label_now"] = (hits_now & has_turned).sum().item()
                counts.append(row)

    with recorded({site: site.attention for site in sites(network)}, watch):
        network(pack)

    # Shares for each layer, kind of queries and length; nan where labels are not compared, and where no query turns.
    columns = ["queries", "layer", "longer", "pairs", "turned", "label_before", "label_now"]
    by_layer = pd.DataFrame(counts, columns=columns).groupby(columns[:3], sort=False)
    sums = by_layer.sum(min_count=1).astype(float)
    for name in ("label_before", "label_now"):
        sums[name] /= sums["turned"]
    sums["turned"] /= sums["pairs"]
    return sums.drop(columns="pairs").reset_index().assign(table=number)


def scores_of_keys(site: Site, sequence: Sequence, n: int) -> torch.Tensor:
    """Return the scores of a sequence with its queries scaled as in a table with n labeled rows, float64 (H, Q, K)."""
    q = sequence.projected  # (Q, H, d)
    scaling = site.attention.ssmax_layer
    if scaling is not None:
        log_n = torch.tensor([math.log(n)], device=q.device)
        q = scaling(q, log_n, torch.zeros(len(q), dtype=torch.long, device=q.device))
    return logits(site.attention, q, sequence.k)


def compare_first_keys(before: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare which key comes first before and now.

    Parameters
    ----------
    before, now : Tensor
        Scores, (..., Q, K).

    Returns
    -------
    key_before, key_now : Tensor
        The key with the largest score, (..., Q).
    has_turned : Tensor
        Whether the query has turned, see `turned_queries`, (..., Q).
    """
    key_before = before.argmax(-1, keepdim=True)
    key_now = now.argmax(-1, keepdim=True)
    lead_before = before.gather(-1, key_before) - before.gather(-1, key_now)  # logarithm of the ratio of their weights
    lead_now = now.gather(-1, key_now) - now.gather(-1, key_before)
    has_turned = torch.minimum(lead_before, lead_now) > math.log(FACTOR)
    return key_before[..., 0], key_now[..., 0], has_turned[..., 0]


def findings_of_network(found: pd.DataFrame) -> str:
    # The shares of pairs that turn, a column for each number of labeled rows.
    by_layer = found.groupby(["queries", "layer", "longer"], sort=False)["turned"]
    shares = by_layer.agg(share).unstack("longer")
    shares.columns = [f"n = {longer:,}" for longer in shares]
    # The labels of the rows that query rows look at, before and after they turn; regression has none.
    hits = found[found["queries"] == QUERY].dropna()
    hits = hits.assign(difference=hits["label_now"] - hits["label_before"]).groupby(["layer", "longer"])
    labels = pd.DataFrame(
        {"the former row": hits["label_before"].agg(share), "the new row": hits["label_now"].agg(share)}
    )
    labels["new minus former"] = hits["difference"].agg(lambda values: mean_interval(values.to_numpy()))
    labels["tables"] = hits.size()  # tables in which some query turns
    if labels.empty:
        table_of_labels = "No query row turns, or the targets are numbers."
    else:
        table_of_labels = markdown(labels.reset_index())
    tables = counted(found["table"].nunique(), "table")
    return f"""
## A trained network

{markdown(shares.reset_index())}

Share of pairs of a query and a head that turn with the multipliers of a table with n labeled rows: another key has the
largest weight, at least {FACTOR} times that of the former one, which had at least {FACTOR} times its weight before.
Queries and keys are those of {tables} of graph_scm with {LABELED_ROWS} labeled rows, with 95 % intervals for other
tables; trained.csv has each. Softmax and SSMax have 0; a rule with one factor for all elements turns queries only where
its sign changes. This is one network, so one seed.

Of the query rows that turn, how many had looked first at a labeled row of their own class, and how many do so now:

{table_of_labels}
"""
