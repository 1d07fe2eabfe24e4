"""attention: one row of a table through one attention head, step by step, as a page for a browser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING
from torch import Tensor

from priors.random import rng_at
from tabicl_train.errors import ConfigError
from tabicl_train.lab.folder import Folder
from tabicl_train.lab.instruments import multipliers, shape, sites
from tabicl_train.lab.tables import load_classifier, plain_classifier, read_table
from tabicl_train.model.attention import Attention
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import LABELED, Sequence, exponents, logits, recorded
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.classifier import TabICLClassifier

TEMPLATE = Path(__file__).with_name("attention.html.j2")
SAMPLE = 1000  # labeled rows of a file, at most; small: 50
OTHERS = 3  # other query rows of a file that are predicted beside the one asked for
CELLS = 8  # columns of the table that are shown
LARGEST = 10  # keys with the largest weights that are shown one by one; of the others, the middle and the last one are
RULES = {
    "none": "softmax without length scaling",
    "ssmax": "SSMax",
    "ssmax_mlp": "SSMax-MLP",
    "ssmax_mlp_elementwise": "element-wise SSMax-MLP",
    "qassmax": "QASSMax",
    "qassmax_elementwise": "element-wise QASSMax",
    "ssa": "SSA",
    "ssa_trainable": "SSA with a learned exponent",
}

QUESTION = """
To predict row {row} of {table}, the network compares it with the rows whose class it knows, and takes more from those
that it finds alike. The page attention.html shows one of these comparisons in steps: head {head} of layer {layer} of
in-context learning. Every number on it is the network's own. Weights say where this head looks, not what caused the
prediction.
"""


@dataclass
class Options:
    """tabicl-lab attention folder=DIR checkpoint=RUN_DIR_OR_FILE table=FILE.csv row=N key=value ...

    Writes attention.html: how one row of a table looks at the labeled rows in one attention head of in-context
    learning, from its tokens to the prediction, every number being the network's own.
    """

    folder: str = MISSING
    """Folder to write."""
    checkpoint: str = MISSING
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or an average, ema or last; null takes the best
    if there are any, otherwise the newest."""
    table: str = MISSING
    """CSV file, of which at most 1,000 random rows are labeled."""
    row: int | None = None
    """Row to look at, counted from 0; null takes the last one."""
    target: str | None = None
    """Column of the file with the classes; null takes the last one."""
    layer: int = -1
    """Layer of in-context learning; negative numbers count from the last."""
    head: int = 0
    """Head of the layer."""
    small: bool = False
    """At most 50 labeled rows of a file."""


@dataclass
class Scene:
    """A table, and the classifier that predicts it.

    X, y: all rows of the table, whose index numbers them
    labeled, queries: positions of these rows, in the order in which the network gets them; the first query is looked at
    """

    name: str
    X: pd.DataFrame
    y: np.ndarray
    labeled: list[int]
    queries: list[int]
    classifier: TabICLClassifier


def run(options: Options) -> None:
    scene = scene_of(options, load_classifier(options.checkpoint, options.weights))
    data = explain(scene, options.layer, options.head)
    folder = Folder("attention", options)
    folder.text("attention.html", page(data))
    folder.page("One row through one attention head", QUESTION.format(**data), "[attention.html](attention.html)")


def scene_of(options: Options, network: TabICL) -> Scene:
    """A row of a CSV file; the other rows are labeled, but for a few that are query rows like it."""
    X, y = read_table(options.table, options.target)
    if options.row is not None and options.row not in X.index:
        raise ConfigError(
            [f"row is {options.row}; {options.table} has the rows 0..{X.index[-1]}, if they have a class"]
        )
    row = len(y) - 1 if options.row is None else X.index.get_loc(options.row)
    order = [i for i in rng_at("attention", row).permutation(len(y)).tolist() if i != row]
    queries = [row, *sorted(order[: min(OTHERS, len(order) // 2)])]
    labeled = sorted(order[len(queries) - 1 :][: 50 if options.small else SAMPLE])
    classifier = plain_classifier(network, X.iloc[labeled], y[labeled])
    return Scene(Path(options.table).name, X, y, labeled, queries, classifier)


@torch.no_grad()
def explain(scene: Scene, layer: int, head: int) -> dict[str, Any]:
    """All that the page shows, in numbers, texts and lists.

    Vectors are lists. keys: those shown, by weight; rest: the others together, None if there are none; by_label: sums
    of weights; context: the sum of all weighted values; hidden: query rows, which are not seen
    """
    classifier = scene.classifier
    layers = [site.attention for site in sites(classifier.network_) if site.stage == "icl"]
    if not layers:
        name = type(classifier.network_).__name__
        raise ConfigError([f"{name} names no layers of in-context learning whose keys are the labeled rows alone"])
    if not -len(layers) <= layer < len(layers):
        raise ConfigError([f"layer is {layer}; the network has the layers 0..{len(layers) - 1}"])
    attention = layers[layer]
    if not 0 <= head < attention.num_heads:
        raise ConfigError([f"head is {head}; the layer has the heads 0..{attention.num_heads - 1}"])
    kept: list[Sequence] = []
    asked = scene.X.iloc[scene.queries]

    def watch(_: Any, found: list[Sequence]) -> None:
        kept.extend(sequence for sequence in found if sequence.kind != LABELED)

    (table,), (unlabeled,) = (classifier._tables(x).values() for x in (classifier.X_, classifier._numbers(asked)))
    rows, y = (torch.from_numpy(x)[None] for x in (np.concatenate([table, unlabeled]), classifier.y_))
    with recorded({"keys": attention}, watch):  # the estimator itself keeps keys and values alone
        logits_of_rows = classifier.network_(Pack.stack(rows, y))[:, : len(classifier.classes_)]
    prediction = torch.softmax(logits_of_rows / classifier.softmax_temperature, -1).tolist()
    (sequence,) = kept
    q, k, v = sequence.q[:1], sequence.k[:, head].double(), sequence.v[:, head].double()
    n, d = k.shape  # keys, elements of a head
    query, steps = steps_of(attention, sequence, head)
    w = torch.softmax(steps["logit"], -1)
    order = w.argsort(descending=True, stable=True).tolist()
    shown = order if n <= LARGEST + 2 else [*order[:LARGEST], order[(LARGEST + n) // 2], order[-1]]
    vectors, values = {"token": sequence.context, "k": k, "v": v}, steps | {"weight": w}
    keys = [
        row_of(scene, scene.labeled[j])
        | {name: plain(of[j]) for name, of in vectors.items()}
        | {name: of[j].item() for name, of in values.items()}
        for j in shown
    ]
    rest = torch.tensor([j for j in order if j not in shown], dtype=torch.int64, device=w.device)
    others = {"count": len(rest), "weight": w[rest].sum().item(), "context": plain(w[rest] @ v[rest])}
    return {
        "table": scene.name,
        "row": row_of(scene, scene.queries[0])["row"],
        "layer": layers.index(attention),
        "layers": len(layers),
        "head": head,
        "heads": attention.num_heads,
        "n": n,
        "d": d,
        "root": math.sqrt(d),
        "log_n": math.log(n),
        "rule": classifier.network_.config.icl_scaling,
        "exponent": None if (p := exponents(attention)) is None else p[head].item(),
        "query": query | row_of(scene, scene.queries[0]),
        "keys": keys,
        "rest": others if len(rest) else None,
        "by_label": by_label(scene.y[scene.labeled], w.tolist()),
        "context": plain(w @ v),
        "entropy": shape(attention, q, sequence.k).entropy[0, head].item() if n > 1 else None,
        "columns": [str(name) for name in scene.X.columns[:CELLS]],
        "features": scene.X.shape[1],
        "hidden": [row_of(scene, row) | {"weight": 0.0} for row in scene.queries],
        "unlabeled": len(scene.queries),
        "prediction": [
            {"label": str(name), "p": float(p)} for name, p in zip(classifier.classes_, prediction[0], strict=True)
        ],
    }


def steps_of(attention: Attention, sequence: Sequence, head: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The vectors of the first query, None for a factor that the layer lacks; and its scores (K,) after each step."""
    q, projected = sequence.q[:1], sequence.projected[:1]  # (1, H, d)
    base, gate = multipliers(attention, projected, len(sequence.k))
    k, d = sequence.k[:, head].double(), q.shape[-1]
    asked = projected[0, head].double()  # (d,)
    based = asked if base is None else asked * base[head].double()
    query = {
        "token": plain(sequence.x[0]),
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
    groups = pd.DataFrame({"label": labels, "weight": weights}).groupby("label", sort=False)["weight"]
    sums = groups.agg(rows="size", weight="sum").sort_values("weight", ascending=False)
    return sums.reset_index().to_dict("records")


def plain(values: Tensor) -> list[float]:
    """Numbers with the nine digits that float32 has."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def row_of(scene: Scene, row: int) -> dict[str, Any]:
    cells = [text_of(value) for value in scene.X.iloc[row, :CELLS]]
    return {"row": int(scene.X.index[row]), "label": scene.y[row], "cells": cells}


def text_of(value: Any) -> str:
    if pd.isna(value):
        return "missing"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def page(data: dict[str, Any]) -> str:
    """The page of what `explain` returns."""
    from tabicl_train.report.page import fill  # imports jinja2, which the help does not need

    return fill(TEMPLATE, data=data, rule=RULES[data["rule"]], table=frame_of(data))


def frame_of(data: dict[str, Any]) -> pd.DataFrame:
    """The numbers of the shown keys as a table, without those of steps that the layer does not have."""
    names = {"score": "q . k", "divided": f"divided by {data['root']:.4g}"}
    names |= {"based": "with b" if data["exponent"] else "with base"} if data["query"]["base"] else {}
    names |= {"scaled": "with gate"} if data["query"]["gate"] else {}
    names |= {"logit": "signed logarithm"} if data["exponent"] else {}
    names["weight"] = "weight"
    rows = [{"row": name_of(key)} | {name: key[of] for of, name in names.items()} for key in data["keys"]]
    return pd.DataFrame(rows).set_index("row")


def name_of(key: dict[str, Any]) -> str:
    return f"row {key['row']}: {key['label']}"
