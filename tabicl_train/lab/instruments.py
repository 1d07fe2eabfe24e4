"""What attention does in a network at work: its entropy, its largest weight, the gaps between its logits, and the
multipliers of its queries, at the two sites where rows are keys.

column   the inducing points of a column attend to its labeled cells
icl      in in-context learning, all rows of a table attend to its labeled rows

Queries and keys are recorded while the network predicts, see model/recording.py. Logits are computed in blocks of
queries, in float64, and never kept.

Q queries, K keys, H heads, d elements of a head, n labeled rows.
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
from tabicl_train.model.recording import INDUCING, Sequence, logits, recorded
from tabicl_train.model.tabicl import TabICL

ROWS = 256  # queries of each kind that are measured of a table in in-context learning
POINTS = 16  # inducing points that are measured of a column
BLOCK = 2**21  # logits that are computed at once, 16 MB in float64


class Site(NamedTuple):
    """An attention layer in which rows are keys; stage is column or icl."""

    stage: str
    layer: int
    attention: Attention


def sites(model: TabICL) -> list[Site]:
    """The layers in which rows are keys, in the order of a forward pass."""
    found = []
    for name, attention in model.named_attentions():
        stage, _, layer = name.partition(".")
        found.append(Site(stage, int(layer), attention))
    return found


class Shape(NamedTuple):
    """What the weights of each query look like, float64 (Q, H) each.

    entropy: -sum w log w, divided by log K, which even weights would have; nan for a single key
    top: the largest weight
    gap: the largest logit minus the mean of all
    """

    entropy: Tensor
    top: Tensor
    gap: Tensor


def shape(attention: Attention, q: Tensor, k: Tensor) -> Shape:
    """The weights of queries q (Q, H, d) over keys k (K, H, d)."""
    size = max(1, BLOCK // (k.shape[0] * k.shape[1]))
    parts = [shape_of(logits(attention, some, k)) for some in q.split(size)]
    return Shape(*(torch.cat(values) for values in zip(*parts, strict=True)))


def shape_of(z: Tensor) -> Shape:
    """The same from logits (H, Q, K)."""
    w, keys = torch.softmax(z, -1), z.shape[-1]
    entropy = -torch.xlogy(w, w).sum(-1) / (math.log(keys) if keys > 1 else math.nan)
    return Shape(*(values.T for values in (entropy, w.amax(-1), z.amax(-1) - z.mean(-1))))


def multipliers(attention: Attention, projected: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
    """The factors of the queries for n keys: base (H, 1 or d), and gate (Q, H, 1 or d); None where there is none.

    With signed averaging, the base is its factor b, whatever n.
    """
    scaling = attention.ssmax_layer
    if scaling is None:
        return None, None
    gate = getattr(scaling, "query_mlp", None)
    return scaling.multipliers(n), None if gate is None else 1 + torch.tanh(gate(projected.float()))


COLUMNS = (
    *("stage", "layer", "queries", "head", "n", "measured", "entropy", "top_weight", "gap_mean"),
    *("base_largest", "gate_mean"),
)
"""Columns of `measure`. A row is a layer, a kind of queries and a head.

queries       inducing points, labeled rows or query rows
n             labeled rows, which are the keys
measured      queries over which the row's numbers are averaged
entropy, top_weight, gap_mean      means of Shape
base_largest                       |base(n)|, the largest element of the head
gate_mean                          of the gate over queries and elements

Multipliers are nan where the layer's rule has none.
"""


@torch.no_grad()
def measure(model: TabICL, predict: Callable[[], Any], rows: int = ROWS, points: int = POINTS) -> pd.DataFrame:
    """The instruments at every site while `predict` runs a table through the model; columns as in COLUMNS.

    rows, points: queries that are measured, a random sample: of each kind in in-context learning, and of the inducing
        points of each column
    """
    generator = torch.Generator().manual_seed(0)
    measured: dict[tuple, list[list[Tensor]]] = defaultdict(list)
    bases: dict[tuple, tuple[int, Tensor]] = {}

    def watch(site: Site, found: list[Sequence]) -> None:
        for sequence in found:
            most = points if sequence.kind == INDUCING else rows
            some = torch.randperm(len(sequence.q), generator=generator)[:most].sort().values.to(sequence.q.device)
            base, gate = multipliers(site.attention, sequence.projected[some], len(sequence.k))
            key, none = (site.stage, site.layer, sequence.kind), torch.full((sequence.k.shape[1], 1), math.nan)
            bases[key] = len(sequence.k), (none if base is None else base).abs().amax(-1)
            gates = (none.expand(len(some), -1, 1) if gate is None else gate).double().mean(-1)
            measured[key].append([*shape(site.attention, sequence.q[some], sequence.k), gates])

    with recorded({site: site.attention for site in sites(model)}, watch):
        predict()
    table = []
    for key, parts in measured.items():
        *shapes, gates = (torch.cat(of).mean(0).tolist() for of in zip(*parts, strict=True))  # of each head
        n, base = bases[key]
        count = sum(len(part[0]) for part in parts)
        for head, means in enumerate(zip(*shapes, base.tolist(), gates, strict=True)):
            table.append((*key, head, n, count, *means))
    return pd.DataFrame(table, columns=COLUMNS)
