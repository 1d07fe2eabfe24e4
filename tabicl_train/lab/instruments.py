"""Measurements of attention while a network predicts: entropy, largest weight, logit gap, and multipliers of queries.

They are taken in the two stages where rows are keys:

column   the inducing points of a column attend to its labeled cells
icl      in in-context learning, all rows of a table attend to its labeled rows

Queries and keys are recorded while the network predicts, see model/recording.py. Logits are computed in blocks of
queries, in float64, and not stored.

Shapes: Q queries, K keys, H heads, d elements of a head, n labeled rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from tabicl_train.model.attention import Attention
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import INDUCING, QUERY, Sequence, attention_layers, logits, recorded
from tabicl_train.model.tabicl import TabICL

ROWS = 256  # queries of each kind of a table that are measured in in-context learning
POINTS = 16  # inducing points of a column that are measured
BLOCK = 2**21  # logits that are computed at once, 16 MB in float64


class Site(NamedTuple):
    """An attention layer in which rows are keys; stage is column or icl."""

    stage: str
    layer: int
    attention: Attention


def sites(model: TabICL) -> list[Site]:
    """Return the layers in which rows are keys, in the order of a forward pass; raises ConfigError without any."""
    layers = []
    for name, attention in attention_layers(model).items():
        stage, _, layer = name.partition(".")
        layers.append(Site(stage, int(layer), attention))
    return layers


class WeightStatistics(NamedTuple):
    """Statistics of the weights w of each query over its K keys, float64 (Q, H) each.

    Parameters
    ----------
    entropy : Tensor
        -sum w log w, divided by log K, the entropy of equal weights; nan for a single key.
    top : Tensor
        The largest weight.
    gap : Tensor
        The largest logit minus the mean of all logits.
    """

    entropy: Tensor
    top: Tensor
    gap: Tensor


def weight_statistics(attention: Attention, q: Tensor, k: Tensor) -> WeightStatistics:
    """Compute statistics of the weights of queries q (Q, H, d) over keys k (K, H, d)."""
    keys, heads, _ = k.shape
    queries_at_once = max(1, BLOCK // (keys * heads))
    blocks = []
    for queries in q.split(queries_at_once):
        blocks.append(statistics_of_logits(logits(attention, queries, k)))
    entropies, tops, gaps = zip(*blocks, strict=True)
    return WeightStatistics(torch.cat(entropies), torch.cat(tops), torch.cat(gaps))


def statistics_of_logits(z: Tensor) -> WeightStatistics:
    """Compute the statistics from logits (H, Q, K)."""
    w = torch.softmax(z, -1)
    keys = z.shape[-1]
    largest_entropy = math.log(keys) if keys > 1 else math.nan
    entropy = -torch.xlogy(w, w).sum(-1) / largest_entropy
    gap = z.amax(-1) - z.mean(-1)
    return WeightStatistics(entropy.T, w.amax(-1).T, gap.T)


def query_multipliers(attention: Attention, projected: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the factors by which the scaling rule multiplies queries for n keys.

    Parameters
    ----------
    attention : Attention
        The layer.
    projected : Tensor
        Queries before the scaling, (Q, H, d).
    n : int
        Number of keys.

    Returns
    -------
    base : Tensor or None
        The factor that depends on n, (H, 1) or (H, d). For signed averaging its factor b, which does not.
    gate : Tensor or None
        The factor that depends on the query, (Q, H, 1) or (Q, H, d).
    """
    scaling = attention.ssmax_layer
    if scaling is None:
        return None, None
    base = scaling.multipliers(n)
    query_mlp = getattr(scaling, "query_mlp", None)
    if query_mlp is None:
        return base, None
    return base, 1 + torch.tanh(query_mlp(projected.float()))


COLUMNS = (
    *("stage", "layer", "queries", "head", "n", "measured", "entropy", "top_weight", "gap_mean"),
    *("base_largest", "gate_mean"),
)
"""Columns of `measure`. A row is about a layer, a kind of queries and a head.

queries                        inducing points, labeled rows or query rows
n                              number of labeled rows, which are the keys
measured                       number of queries that the row averages over
entropy, top_weight, gap_mean  means of WeightStatistics
base_largest                   largest |base(n)| over the elements of the head
gate_mean                      mean of the gate over queries and elements

Multipliers are nan if the rule of the layer has none.
"""


@torch.no_grad()
def measure(model: TabICL, predict: Callable[[], Any], rows: int = ROWS, points: int = POINTS) -> pd.DataFrame:
    """Measure attention in every layer where rows are keys while a function predicts a table.

    Parameters
    ----------
    model : TabICL
        The network.
    predict : callable
        A function without arguments that runs a table through the network.
    rows : int, optional
        Size of the random sample of each kind of queries in in-context learning.
    points : int, optional
        Size of the random sample of the inducing points of each column.

    Returns
    -------
    DataFrame
        The columns are COLUMNS.
    """
    generator = torch.Generator().manual_seed(0)

    # By stage, layer and kind of queries: measures of the queries of each sequence, (Q, H); the number of keys; and the
    # largest base multiplier of each head, which is the same for all queries.
    measured: dict[tuple, list[dict[str, Tensor]]] = defaultdict(list)
    labeled: dict[tuple, int] = {}
    largest_bases: dict[tuple, list[float]] = {}

    def watch(site: Site, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            most = points if sequence.kind == INDUCING else rows
            sample = torch.randperm(len(sequence.q), generator=generator)[:most].sort().values.to(sequence.q.device)
            n, heads, _ = sequence.k.shape
            statistics = weight_statistics(site.attention, sequence.q[sample], sequence.k)
            base, gate = query_multipliers(site.attention, sequence.projected[sample], n)
            if base is None:
                base = torch.full((heads, 1), math.nan)
            if gate is None:
                gate = torch.full((len(sample), heads, 1), math.nan)
            key = (site.stage, site.layer, sequence.kind)
            measured[key].append({**statistics._asdict(), "gate": gate.double().mean(-1)})
            labeled[key] = n
            largest_bases[key] = base.abs().amax(-1).tolist()

    with recorded({site: site.attention for site in sites(model)}, watch):
        predict()

    # Means over all queries, for each head.
    table = []
    for key, measures in measured.items():
        count = sum(len(sequence["entropy"]) for sequence in measures)
        means = {}
        for name in ("entropy", "top", "gap", "gate"):
            means[name] = torch.cat([sequence[name] for sequence in measures]).mean(0).tolist()
        for head, base in enumerate(largest_bases[key]):
            weight_means = (means["entropy"][head], means["top"][head], means["gap"][head])
            table.append((*key, head, labeled[key], count, *weight_means, base, means["gate"][head]))
    return pd.DataFrame(table, columns=COLUMNS)


def predict_with_entropy(model: TabICL, pack: Pack, queries: int) -> tuple[Tensor, float]:
    """Predict a pack, and measure the entropy of the attention of its query rows.

    Parameters
    ----------
    model : TabICL
        The network.
    pack : Pack
        The tables.
    queries : int
        Number of query rows of each table that are measured.

    Returns
    -------
    logits : Tensor
        (query rows, C)
    entropy : float
        Mean over log n of the entropy in in-context learning.
    """
    predictions: list[Tensor] = []
    measures = measure(model, lambda: predictions.append(model(pack)), rows=queries, points=1)
    return predictions[0], measures.loc[measures["queries"] == QUERY, "entropy"].mean()
