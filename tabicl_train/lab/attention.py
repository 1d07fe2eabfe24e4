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
OTHERS = 3  # query rows of a file that are predicted in addition to the one asked for
CELLS = 8  # columns of the table that are shown
LARGEST = 10  # keys with the largest weights that are shown; of the other keys, the middle and the last one are shown
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
that it finds similar. The page attention.html shows one of these comparisons in steps: head {head} of layer {layer} of
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

    Parameters
    ----------
    name : str
        Name of the file.
    X : DataFrame
        All rows of the table, numbered by its index.
    y : ndarray of shape (rows,)
        Their classes.
    labeled, queries : list of int
        Positions of the labeled rows and of the query rows, in the order in which the network gets them. The page
        shows the first query row.
    classifier : TabICLClassifier
        A classifier, fitted to the labeled rows.
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
    """The query row that the page follows; base and gate are None if the layer has no such factor."""

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
    divided: float  # score / sqrt(d)
    based: float  # the same with base
    scaled: float  # the same with base and gate
    logit: float
    weight: float


@dataclass
class HiddenRow(ShownRow):
    """A query row, which has no key: no row attends to it."""

    weight: float = 0.0


@dataclass
class OtherKeys:
    """The labeled rows that are not shown one by one, taken together."""

    count: int
    weight: float
    context: list[float]  # sum of their weighted values


@dataclass
class Explanation:
    """All that the page shows; vectors are lists of numbers.

    Parameters
    ----------
    table : str
        Name of the table.
    row : int
        The row that the page follows.
    layer, layers, head, heads : int
        The layer and head, counted from 0, and how many there are.
    n : int
        Number of labeled rows, which are the keys.
    d : int
        Number of elements of a head.
    root, log_n : float
        sqrt(d) and log(n).
    rule : str
        The scaling rule, a key of RULES.
    exponent : float or None
        p of signed averaging; None for softmax.
    query : QueryRow
        The row that the page follows.
    keys : list of KeyRow
        The keys that are shown, by descending weight.
    rest : OtherKeys or None
        The other keys; None if all are shown.
    by_label : list of dict
        For each label, its number of rows and the sum of their weights.
    context : list of float
        Sum of all weighted values.
    entropy : float or None
        Entropy of the weights over log(n); None with a single key.
    columns : list of str
        Names of the cells that are shown.
    features : int
        Number of columns of the table.
    hidden : list of HiddenRow
        The query rows.
    unlabeled : int
        Their number.
    prediction : list of dict
        label and p, the probability, of each class.
    """

    table: str
    row: int
    layer: int
    layers: int
    head: int
    heads: int
    n: int
    d: int
    root: float
    log_n: float
    rule: str
    exponent: float | None
    query: QueryRow
    keys: list[KeyRow]
    rest: OtherKeys | None
    by_label: list[dict[str, Any]]
    context: list[float]
    entropy: float | None
    columns: list[str]
    features: int
    hidden: list[HiddenRow]
    unlabeled: int
    prediction: list[dict[str, Any]]


def run(options: AttentionOptions) -> None:
    scene = scene_of(options, load_classifier(options.checkpoint, options.weights))
    explanation = explain(scene, options.layer, options.head)
    folder = Folder("attention", options)
    folder.text("attention.html", page(explanation))
    question = QUESTION.format(**vars(explanation))
    folder.page("One row through one attention head", question, "[attention.html](attention.html)")


def scene_of(options: AttentionOptions, network: TabICL) -> Scene:
    """Return a row of a CSV file as query row, with a few other query rows; all others are labeled, up to a limit."""
    X, y = read_classes(options.table, options.target)
    if options.row is not None and options.row not in X.index:
        raise ConfigError(
            [f"row is {options.row}; it must be one of the rows 0..{X.index[-1]} of {options.table} and have a class"]
        )
    row = len(y) - 1 if options.row is None else X.index.get_loc(options.row)
    others = [i for i in rng_at("attention", row).permutation(len(y)).tolist() if i != row]
    num_queries = min(OTHERS, len(others) // 2)  # in addition to the row
    queries = [row, *sorted(others[:num_queries])]
    most_labeled = 50 if options.small else SAMPLE
    labeled = sorted(others[num_queries:][:most_labeled])
    classifier = plain_classifier(network, X.iloc[labeled], y[labeled])
    return Scene(Path(options.table).name, X, y, labeled, queries, classifier)


@torch.no_grad()
def explain(scene: Scene, layer: int, head: int) -> Explanation:
    """Predict the query rows of a scene, and explain what one head does with the first of them.

    Scores are computed again in float64, step by step: q . k, divided by sqrt(d), with each factor of the scaling rule,
    and the logits, whose softmax gives the weights.

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

    # The vectors of this head: n keys, and the query without, with one and with both factors of the scaling rule.
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

    # The score of each key after each step, (n,), by the fields of KeyRow.
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

    # The keys with the largest weights, the middle one of the others, and the last one; the rest together.
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

    # The query, and the numbers about the whole head.
    query = QueryRow(
        **shown_row(scene, scene.queries[0]),
        token=nine_digits(sequence.x[0]),
        q=nine_digits(plain_q),
        base=None if base is None else nine_digits(base[head].expand(d)),
        gate=None if gate is None else nine_digits(gate[0, head].expand(d)),
        scaled=nine_digits(q[0, head]),
    )

    entropy = None  # with a single key, log n is 0
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
        raise ConfigError([f"{name} has no layers of in-context learning in which only labeled rows are keys"])
    return layers


def predict_and_record(scene: Scene, attention: Attention) -> tuple[Sequence, list[float]]:
    """Return what a layer computes for the query rows, and the class probabilities of the first one."""
    classifier = scene.classifier
    kept: list[Sequence] = []

    def watch(_: Any, sequences: list[Sequence]) -> None:
        kept.extend(sequence for sequence in sequences if sequence.kind != LABELED)

    # The rows as the only member of the classifier's ensemble reads them.
    (labeled,) = classifier._tables(classifier.X_).values()
    (queries,) = classifier._tables(classifier._encode(scene.X.iloc[scene.queries])).values()
    rows = torch.from_numpy(np.concatenate([labeled, queries]))[None]
    y = torch.from_numpy(classifier.y_)[None]
    with recorded({"keys": attention}, watch):  # the estimator itself stores keys and values only, no queries
        logits_of_rows = classifier.network_(Pack.stack(rows, y))[:, : len(classifier.classes_)]
    probabilities = torch.softmax(logits_of_rows / classifier.softmax_temperature, -1)
    (sequence,) = kept
    return sequence, probabilities[0].tolist()


def by_label(labels: Iterable[str], weights: Iterable[float]) -> list[dict[str, Any]]:
    """Return the number of keys with each label and the sum of their weights, the largest sum first."""
    groups = pd.DataFrame({"label": labels, "weight": weights}).groupby("label", sort=False)["weight"]
    sums = groups.agg(rows="size", weight="sum").sort_values("weight", ascending=False)
    return sums.reset_index().to_dict("records")


def nine_digits(values: Tensor) -> list[float]:
    """Round numbers to nine digits, which distinguish all values of float32."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def shown_row(scene: Scene, row: int) -> dict[str, Any]:
    """Return the fields of a ShownRow."""
    cells = [cell_text(value) for value in scene.X.iloc[row, :CELLS]]
    return {"row": int(scene.X.index[row]), "label": scene.y[row], "cells": cells}


def cell_text(value: Any) -> str:
    if pd.isna(value):
        return "missing"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def page(explanation: Explanation) -> str:
    """Return the HTML page for what `explain` has returned."""
    from tabicl_train.report.page import fill_template  # here, since the help does not need jinja2

    rule = RULES[explanation.rule]
    return fill_template(TEMPLATE, data=asdict(explanation), rule=rule, table=table_of_keys(explanation))


def table_of_keys(explanation: Explanation) -> pd.DataFrame:
    """Return the numbers of the shown keys as a table, without steps that the layer does not have."""
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
