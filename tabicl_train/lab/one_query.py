"""One query of one attention head, number by number, as JSON can hold them: from tokens to the context vector.

K keys, d elements of a head, E elements of a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.lab.instruments import (
    LABELED,
    Call,
    Sequence,
    Site,
    exponents,
    logits,
    multipliers,
    recorded,
    shape,
    sites,
)
from tabicl_train.model.attention import Attention
from tabicl_train.model.tabicl import TabICL

LARGEST = 10  # keys with the largest weights that are shown one by one; of the others, the middle and the last one are


class Place(NamedTuple):
    """Which head of which layer; stage is column or icl, column the feature group of the stage `column`."""

    stage: str
    layer: int
    head: int
    column: int = 0


@dataclass
class Found:
    """A query in a sequence of the layer, and what the network predicted.

    index: of the query; for the stage `column`, of the inducing point that the cell of the query row reads most
    reading: that inducing point's weight for the cell; None for the stage icl
    """

    site: Site
    sequence: Sequence
    index: int
    reading: float | None
    prediction: Any


def site_at(model: TabICL, place: Place) -> Site:
    """Raises ConfigError if the network has no such layer or head. A negative layer counts from the last."""
    of_stage = [site for site in sites(model) if site.stage == place.stage]
    if not -len(of_stage) <= place.layer < len(of_stage):
        raise ConfigError([f"layer is {place.layer}; {place.stage} has the layers 0..{len(of_stage) - 1}"])
    site = of_stage[place.layer]
    if not 0 <= place.head < site.attention.num_heads:
        raise ConfigError([f"head is {place.head}; the layer has the heads 0..{site.attention.num_heads - 1}"])
    return site


@torch.no_grad()
def find(model: TabICL, predict: Callable[[], Any], place: Place, query: int) -> Found:
    """The sequence and query of a place while `predict` runs one table; query: number of the row among query rows."""
    site = site_at(model, place)
    watched: dict[str, Attention] = {"keys": site.attention}
    if site.stage == "column":
        watched["reading"] = model.col_embedder.tf_col["blocks"][site.layer].multihead_attn2.attn
    wanted, counts = place.column if site.stage == "column" else 0, Counter[str]()
    kept: dict[str, Sequence] = {}

    def watch(name: str, call: Call) -> None:
        for sequence in call.sequences():
            if sequence.kind != LABELED:
                if counts[name] == wanted:
                    kept[name] = sequence
                counts[name] += 1

    with recorded(watched, watch):
        prediction = predict()
    if "keys" not in kept:
        raise ConfigError([f"column is {place.column}; the table has the columns 0..{counts['keys'] - 1}"])
    if site.stage == "icl":
        return Found(site, kept["keys"], query, None, prediction)
    reading = kept["reading"]
    z = logits(watched["reading"], reading.q[query : query + 1], reading.k)[place.head, 0]  # (inducing points,)
    weight, point = torch.softmax(z, -1).max(-1)
    return Found(site, kept["keys"], int(point), weight.item(), prediction)


@torch.no_grad()
def numbers(found: Found, head: int, labels: list[str]) -> dict[str, Any]:
    """Everything about a query in one head: see the keys below; vectors are lists.

    labels: those of the K keys
    returns: query, keys (those shown, by weight, with their number as index), rest (the others together; None if there
        are none), by_label (sums of weights), context (the sum of all weighted values) and the layer's settings
    """
    attention, sequence, i = found.site.attention, found.sequence, found.index
    q, k, v = sequence.q[i : i + 1], sequence.k[:, head].double(), sequence.v[:, head].double()
    n, d = k.shape
    query, steps = steps_of(found, head)
    w = torch.softmax(steps["logit"], -1)
    order = w.argsort(descending=True, stable=True).tolist()
    shown = order if n <= LARGEST + 2 else [*order[:LARGEST], order[(LARGEST + n) // 2], order[-1]]
    vectors, values = {"token": sequence.context, "k": k, "v": v}, steps | {"weight": w}
    rest = torch.tensor([j for j in order if j not in shown], dtype=torch.int64, device=w.device)
    others = {"count": len(rest), "weight": w[rest].sum().item(), "context": plain(w[rest] @ v[rest])}
    even = [of[0, head].item() for of in shape(attention, q, sequence.k)]
    return {
        "stage": found.site.stage,
        "layer": found.site.layer,
        "head": head,
        "n": n,
        "d": d,
        "root": math.sqrt(d),
        "log_n": math.log(n),
        "exponent": None if (p := exponents(attention)) is None else p[head].item(),
        "query": query,
        "keys": [
            {"index": j}
            | {name: plain(of[j]) for name, of in vectors.items()}
            | {name: of[j].item() for name, of in values.items()}
            for j in shown
        ],
        "rest": others if len(rest) else None,
        "by_label": by_label(labels, w.tolist()),
        "context": plain(w @ v),
        "entropy": even[0] if n > 1 else None,
        "point": i if found.reading is not None else None,
        "reading": found.reading,
    }


def steps_of(found: Found, head: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The vectors of a query, None for a factor that the layer does not have; and its scores (K,) after each step."""
    attention, sequence, i = found.site.attention, found.sequence, found.index
    q, projected = sequence.q[i : i + 1], sequence.projected[i : i + 1]  # (1, H, d)
    base, gate = multipliers(attention, projected, len(sequence.k))
    k, d = sequence.k[:, head].double(), q.shape[-1]
    asked = projected[0, head].double()  # (d,)
    based = asked if base is None else asked * base[head].double()
    query = {
        "token": plain(sequence.x[i]),
        "q": plain(asked),
        "base": None if base is None else plain(base[head].expand(d)),
        "gate": None if gate is None else plain(gate[0, head].expand(d)),
        "scaled": plain(q[0, head]),
    }
    return query, {
        "score": k @ asked,
        "divided": k @ asked / math.sqrt(d),
        "based": k @ based / math.sqrt(d),
        "scaled": k @ q[0, head].double() / math.sqrt(d),
        "logit": logits(attention, q, sequence.k)[head, 0],
    }


def by_label(labels: Iterable[str], weights: Iterable[float]) -> list[dict[str, Any]]:
    """How many keys have each label, and their weights together; the largest sum first."""
    sums: dict[str, list[float]] = {}
    for label, weight in zip(labels, weights, strict=True):
        sums.setdefault(label, []).append(weight)
    rows = [{"label": label, "rows": len(of), "weight": math.fsum(of)} for label, of in sums.items()]
    return sorted(rows, key=lambda row: -row["weight"])


def plain(values: Tensor) -> list[float]:
    """Numbers with the nine digits that float32 has."""
    return [float(f"{value:.9g}") for value in values.tolist()]
