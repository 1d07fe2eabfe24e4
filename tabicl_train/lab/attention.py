"""attention: one row of a table through one attention head, step by step, as a page for a browser."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from priors.options import option
from priors.random import rng_at
from tabicl_train.errors import ConfigError
from tabicl_train.lab.folder import Folder
from tabicl_train.lab.instruments import query_multipliers, sites, weight_statistics
from tabicl_train.lab.tables import load_classifier, plain_classifier, read_classes
from tabicl_train.model.attention import Attention
from tabicl_train.model.family import Network
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
class AttentionOptions:
    """tabicl-lab attention folder=DIR checkpoint=RUN_DIR_OR_FILE table=FILE.csv row=N KEY=VALUE ...

    Writes attention.html: how one row of a table looks at the labeled rows in one attention head of in-context
    learning, from its tokens to the prediction, every number being the network's own.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str = option()
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    table: str = option()
    """CSV file, of which at most 1,000 random rows are labeled."""
    row: int | None = None
    """Row to look at, counted from 0. Default: the last one."""
    target: str | None = None
    """Column of the file with the classes. Default: the last one."""
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


@dataclass
class ShownRow:
    """A row of the table as the page shows it: its index, class and first cells."""

    row: int
    label: str
    cells: list[str]


@dataclass
class QueryRow(ShownRow):
    """The row that is looked at; base and gate are None if the layer lacks the factor."""

    token: list[float]
    q: list[float]
    base: list[float] | None
    gate: list[float] | None
    scaled: list[float]  # q times both factors


@dataclass
class KeyRow(ShownRow):
    """A labeled row whose key is shown: its vectors, and its score after each step."""

    token: list[float]
    k: list[float]
    v: list[float]
    score: float
    divided: float  # by the root of d
    based: float  # with base
    scaled: float  # with base and gate
    logit: float
    weight: float


@dataclass
class HiddenRow(ShownRow):
    """A query row, which is not seen."""

    weight: float = 0.0


@dataclass
class OtherKeys:
    """The labeled rows that are not shown one by one, together."""

    count: int
    weight: float
    context: list[float]  # the sum of their weighted values


@dataclass
class Explanation:
    """All that the page shows; vectors are lists of numbers."""

    table: str  # its name
    row: int  # that is looked at
    layer: int
    layers: int
    head: int
    heads: int
    n: int  # labeled rows, which are the keys
    d: int  # elements of a head
    root: float  # of d
    log_n: float
    rule: str  # an entry of RULES
    exponent: float | None  # p of signed averaging; None for softmax
    query: QueryRow
    keys: list[KeyRow]  # those shown, by weight
    rest: OtherKeys | None  # None if all are shown
    by_label: list[dict[str, Any]]  # rows of a label, and the sum of their weights
    context: list[float]  # the sum of all weighted values
    entropy: float | None  # of the weights, over log n; None with a single key
    columns: list[str]  # names of the cells
    features: int
    hidden: list[HiddenRow]
    unlabeled: int
    prediction: list[dict[str, Any]]  # label and p, the probability, of each class


def run(options: AttentionOptions) -> None:
    scene = scene_of(options, load_classifier(options.checkpoint, options.weights))
    explanation = explain(scene, options.layer, options.head)
    folder = Folder("attention", options)
    folder.text("attention.html", page(explanation))
    question = QUESTION.format(**vars(explanation))
    folder.page("One row through one attention head", question, "[attention.html](attention.html)")


def scene_of(options: AttentionOptions, network: TabICL) -> Scene:
    """A row of a CSV file; the other rows are labeled, but for a few that are query rows like it."""
    X, y = read_classes(options.table, options.target)
    if options.row is not None and options.row not in X.index:
        raise ConfigError(
            [f"row is {options.row}; {options.table} has the rows 0..{X.index[-1]}, if they have a class"]
        )
    row = len(y) - 1 if options.row is None else X.index.get_loc(options.row)
    others = [i for i in rng_at("attention", row).permutation(len(y)).tolist() if i != row]
    num_queries = min(OTHERS, len(others) // 2)  # beside the row
    queries = [row, *sorted(others[:num_queries])]
    most_labeled = 50 if options.small else SAMPLE
    labeled = sorted(others[num_queries:][:most_labeled])
    classifier = plain_classifier(network, X.iloc[labeled], y[labeled])
    return Scene(Path(options.table).name, X, y, labeled, queries, classifier)


@torch.no_grad()
def explain(scene: Scene, layer: int, head: int) -> Explanation:
    """Predict the query rows of a scene, and explain what one head does with the first of them.

    Scores are computed again in float64, one step of the head after the other: q . k, divided by the root of d, with
    each factor of the scaling rule, and the logits, whose softmax are the weights.

    Parameters
    ----------
    scene : Scene
        The table and the classifier.
    layer : int
        A layer of in-context learning; negative numbers count from the last.
    head : int
        A head of the layer.

    Returns
    -------
    Explanation

    Raises
    ------
    ConfigError
        If the network has no such layer or head.
    """
    classifier = scene.classifier
    layers = icl_layers(classifier.network_)
    if not -len(layers) <= layer < len(layers):
        raise ConfigError([f"layer is {layer}; the network has the layers 0..{len(layers) - 1}"])
    attention = layers[layer]
    if not 0 <= head < attention.num_heads:
        raise ConfigError([f"head is {head}; the layer has the heads 0..{attention.num_heads - 1}"])
    sequence, prediction = predict_and_record(scene, attention)

    # The vectors of this head: n keys, and the query before, between and after the factors of the scaling rule.
    q = sequence.q[:1]  # (1, H, d), of all heads, with both factors
    k = sequence.k[:, head].double()  # (n, d)
    v = sequence.v[:, head].double()  # (n, d)
    n, d = k.shape
    root = math.sqrt(d)
    projected = sequence.projected[:1]  # (1, H, d), without factors
    base, gate = query_multipliers(attention, projected, n)
    plain_q = projected[0, head].double()  # (d,)
    based_q = plain_q if base is None else plain_q * base[head].double()
    scaled_q = q[0, head].double()

    # What each key has after each step, (n,), by the fields of KeyRow.
    logit = logits(attention, q, sequence.k)[head, 0]
    weights = torch.softmax(logit, -1)
    steps = {
        "score": k @ plain_q,
        "divided": k @ plain_q / root,
        "based": k @ based_q / root,
        "scaled": k @ scaled_q / root,
        "logit": logit,
        "weight": weights,
    }

    # The keys with the largest weights, the one in the middle of the others, and the last one; the others together.
    order = weights.argsort(descending=True, stable=True).tolist()
    shown = order
    if n > LARGEST + 2:
        shown = [*order[:LARGEST], order[(LARGEST + n) // 2], order[-1]]
    keys = []
    for j in shown:
        vectors = {"token": nine_digits(sequence.context[j]), "k": nine_digits(k[j]), "v": nine_digits(v[j])}
        numbers = {name: values[j].item() for name, values in steps.items()}
        keys.append(KeyRow(**shown_row(scene, scene.labeled[j]), **vectors, **numbers))
    rest = None
    if len(shown) < n:
        left = torch.tensor([j for j in order if j not in shown], device=weights.device)
        rest = OtherKeys(len(left), weights[left].sum().item(), nine_digits(weights[left] @ v[left]))

    query = QueryRow(
        **shown_row(scene, scene.queries[0]),
        token=nine_digits(sequence.x[0]),
        q=nine_digits(plain_q),
        base=None if base is None else nine_digits(base[head].expand(d)),
        gate=None if gate is None else nine_digits(gate[0, head].expand(d)),
        scaled=nine_digits(q[0, head]),
    )

    entropy = None  # with one key, log n is 0
    if n > 1:
        entropy = weight_statistics(attention, q, sequence.k).entropy[0, head].item()
    exponents_of_heads = exponents(attention)
    probabilities = []
    for name, p in zip(classifier.classes_, prediction, strict=True):
        probabilities.append({"label": str(name), "p": float(p)})
    return Explanation(
        table=scene.name,
        row=query.row,
        layer=layers.index(attention),
        layers=len(layers),
        head=head,
        heads=attention.num_heads,
        n=n,
        d=d,
        root=root,
        log_n=math.log(n),
        rule=classifier.network_.config.icl_scaling,
        exponent=None if exponents_of_heads is None else exponents_of_heads[head].item(),
        query=query,
        keys=keys,
        rest=rest,
        by_label=by_label(scene.y[scene.labeled], weights.tolist()),
        context=nine_digits(weights @ v),
        entropy=entropy,
        columns=[str(name) for name in scene.X.columns[:CELLS]],
        features=scene.X.shape[1],
        hidden=[HiddenRow(**shown_row(scene, row)) for row in scene.queries],
        unlabeled=len(scene.queries),
        prediction=probabilities,
    )


def icl_layers(network: Network) -> list[Attention]:
    """Return the attention of each layer of in-context learning; raises ConfigError if the network names none."""
    layers = [site.attention for site in sites(network) if site.stage == "icl"]
    if not layers:
        name = type(network).__name__
        raise ConfigError([f"{name} names no layers of in-context learning whose keys are the labeled rows alone"])
    return layers


def predict_and_record(scene: Scene, attention: Attention) -> tuple[Sequence, list[float]]:
    """Return what a layer has done with the query rows, and the probabilities of the first one's classes."""
    classifier = scene.classifier
    kept: list[Sequence] = []

    def watch(_: Any, sequences: list[Sequence]) -> None:
        kept.extend(sequence for sequence in sequences if sequence.kind != LABELED)

    # The rows as the classifier's only ensemble member reads them
    (labeled,) = classifier._tables(classifier.X_).values()
    (queries,) = classifier._tables(classifier._encode(scene.X.iloc[scene.queries])).values()
    rows = torch.from_numpy(np.concatenate([labeled, queries]))[None]
    y = torch.from_numpy(classifier.y_)[None]
    with recorded({"keys": attention}, watch):  # the estimator itself keeps keys and values alone
        logits_of_rows = classifier.network_(Pack.stack(rows, y))[:, : len(classifier.classes_)]
    probabilities = torch.softmax(logits_of_rows / classifier.softmax_temperature, -1)
    (sequence,) = kept
    return sequence, probabilities[0].tolist()


def by_label(labels: Iterable[str], weights: Iterable[float]) -> list[dict[str, Any]]:
    """How many keys have each label, and their weights together; the largest sum first."""
    groups = pd.DataFrame({"label": labels, "weight": weights}).groupby("label", sort=False)["weight"]
    sums = groups.agg(rows="size", weight="sum").sort_values("weight", ascending=False)
    return sums.reset_index().to_dict("records")


def nine_digits(values: Tensor) -> list[float]:
    """Numbers with the nine digits that float32 has."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def shown_row(scene: Scene, row: int) -> dict[str, Any]:
    """The fields of a ShownRow."""
    cells = [cell_text(value) for value in scene.X.iloc[row, :CELLS]]
    return {"row": int(scene.X.index[row]), "label": scene.y[row], "cells": cells}


def cell_text(value: Any) -> str:
    if pd.isna(value):
        return "missing"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def page(explanation: Explanation) -> str:
    """The page of what `explain` returns."""
    from tabicl_train.report.page import fill_template  # imports jinja2, which the help does not need

    rule = RULES[explanation.rule]
    return fill_template(TEMPLATE, data=asdict(explanation), rule=rule, table=table_of_keys(explanation))


def table_of_keys(explanation: Explanation) -> pd.DataFrame:
    """The numbers of the shown keys as a table, without those of steps that the layer does not have."""
    rows = []
    for key in explanation.keys:
        row = {"row": f"row {key.row}: {key.label}", "q . k": key.score}
        row[f"divided by {explanation.root:.4g}"] = key.divided
        if explanation.query.base:
            row["with b" if explanation.exponent else "with base"] = key.based
        if explanation.query.gate:
            row["with gate"] = key.scaled
        if explanation.exponent:
            row["signed logarithm"] = key.logit
        row["weight"] = key.weight
        rows.append(row)
    return pd.DataFrame(rows).set_index("row")
