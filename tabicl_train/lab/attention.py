"""attention: one row of a table through one attention head, step by step, as a page for a browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING
from torch import Tensor

from priors import PriorError, Table
from priors.random import STREAM_VERSION, rng_at
from tabicl_train.errors import ConfigError
from tabicl_train.lab.folder import Folder
from tabicl_train.lab.instruments import LABELED, Call, Sequence, exponents, logits, multipliers, recorded, shape, sites
from tabicl_train.lab.tables import load_classifier, plain_classifier, read_table
from tabicl_train.model.attention import Attention
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.predict import predict_logits
from tabicl_train.report.page import fill

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
    learning, from its tokens to the prediction, every number being the network's own. With table=N step=S, the table is
    one that the run was trained on, by the address that tabicl-prior show and tabicl-replay give.
    """

    folder: str = MISSING
    """Folder to write."""
    checkpoint: str = MISSING
    """Folder of a run (its newest checkpoint is taken), a checkpoint, or an export: a public file or a hub folder."""
    table: str = MISSING
    """CSV file, of which at most 1,000 random rows are labeled; or, with step, the number of a table in a step."""
    step: int | None = None
    """Step of the run, for a synthetic table."""
    row: int | None = None
    """Row to look at, counted from 0; null takes the last one. Of a synthetic table, it must be a query row."""
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
    """A table, the network that predicts it, and the row that is looked at.

    cells: all rows of the table, whose index numbers them, and labels as text
    labeled, queries: positions of these rows in `cells`, in the order in which the network gets them; row is a query
    predict: -> probabilities of the query rows, (query rows, classes)
    """

    name: str
    network: TabICL
    cells: pd.DataFrame
    labels: list[str]
    classes: list[str]
    labeled: list[int]
    queries: list[int]
    row: int
    predict: Callable[[], np.ndarray]


def run(options: Options) -> None:
    if options.step is not None and not options.table.isdecimal():
        raise ConfigError([f"table is {options.table!r}; with step, it is the number of a table in the step"])
    network = load_classifier(options.checkpoint)
    check_place(network, options.layer, options.head)
    scene = synthetic_scene(options, network) if options.step is not None else real_scene(options, network)
    data = explain(scene, options.layer, options.head)
    folder = Folder("attention", options)
    folder.text("attention.html", page(data))
    folder.page("One row through one attention head", QUESTION.format(**data), "[attention.html](attention.html)")


def check_place(network: TabICL, layer: int, head: int) -> None:
    layers = layers_of(network)
    if not -len(layers) <= layer < len(layers):
        raise ConfigError([f"layer is {layer}; the network has the layers 0..{len(layers) - 1}"])
    if not 0 <= head < layers[layer].num_heads:
        raise ConfigError([f"head is {head}; the layer has the heads 0..{layers[layer].num_heads - 1}"])


def layers_of(network: TabICL) -> list[Attention]:
    return [site.attention for site in sites(network) if site.stage == "icl"]


def real_scene(options: Options, network: TabICL) -> Scene:
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

    def predict() -> np.ndarray:
        return classifier.predict_proba(X.iloc[queries])

    classes = [str(label) for label in classifier.classes_]
    name = Path(options.table).name
    return Scene(name, classifier.network_, X, list(y), classes, labeled, queries, row, predict)


def synthetic_scene(options: Options, network: TabICL) -> Scene:
    """A query row of a table of the run's stream."""
    assert options.step is not None
    table = table_at(options.checkpoint, options.step, int(options.table))
    row = len(table.y) - 1 if options.row is None else options.row
    if not table.train_size <= row < len(table.y):
        raise ConfigError([f"row is {row}; the query rows are {table.train_size}..{len(table.y) - 1}"])
    pack, classes = Pack.of([(table.X, table.y, table.train_size)]), int(table.y.max()) + 1

    def predict() -> np.ndarray:
        return torch.softmax(predict_logits(network, pack, classes, tokens=pack.cells * 2).double(), -1).numpy()

    cells = pd.DataFrame(table.X.numpy()).rename(columns=lambda j: f"x{j}")
    labels = [f"class {label}" for label in table.y.tolist()]
    names = [f"class {label}" for label in range(classes)]
    name = f"table {options.table} of step {options.step}"
    labeled, queries = list(range(table.train_size)), list(range(table.train_size, len(table.y)))
    return Scene(name, network, cells, labels, names, labeled, queries, row, predict)


def table_at(checkpoint: str, step: int, index: int) -> Table:
    """A table of the stream of a run; raises ConfigError if there is no such table, or this version draws others."""
    from tabicl_train.config.compose import from_values
    from tabicl_train.config.schema import build_prior
    from tabicl_train.curriculum import plan_step
    from tabicl_train.run_dir.checkpoint import is_run_checkpoint, load
    from tabicl_train.stream import draw_table

    path, content = load(checkpoint)
    if not is_run_checkpoint(content):
        raise ConfigError([f"checkpoint is {checkpoint!r}; only a run knows the tables of its steps"])
    if (version := content["run"]["stream_version"]) != STREAM_VERSION:
        raise ConfigError([f"{path}: the version of its table stream is {version}, and here {STREAM_VERSION} is drawn"])
    config = from_values(content["config"])
    if not 0 <= step < config.total_steps:
        raise ConfigError([f"step is {step}; the run has steps 0..{config.total_steps - 1}"])
    plan = plan_step(config.curriculum, config.model, config.seed, step)
    spec = next((group.spec for group in plan.groups if index in group.tables), None)
    if spec is None:
        raise ConfigError([f"table is {index}; a step has the tables 0..{plan.tables - 1}"])
    try:
        return draw_table(build_prior(config.prior), spec, config.seed, step, index)
    except PriorError as error:
        raise ConfigError([str(error)]) from None


@torch.no_grad()
def explain(scene: Scene, layer: int, head: int) -> dict[str, Any]:
    """All that the page shows, in numbers, texts and lists.

    Vectors are lists. keys: those shown, by weight; rest: the others together, None if there are none; by_label: sums
    of weights; context: the sum of all weighted values; hidden: query rows, which are not seen
    """
    attention = layers_of(scene.network)[layer]
    kept: list[Sequence] = []

    def watch(_: Any, call: Call) -> None:
        kept.extend(sequence for sequence in call.sequences() if sequence.kind != LABELED)

    with recorded({"keys": attention}, watch):
        prediction = scene.predict()
    (sequence,) = kept
    i = scene.queries.index(scene.row)
    q, k, v = sequence.q[i : i + 1], sequence.k[:, head].double(), sequence.v[:, head].double()
    n, d = k.shape  # keys, elements of a head
    query, steps = steps_of(attention, sequence, i, head)
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
    hidden = [scene.row, *[row for row in scene.queries if row != scene.row][:OTHERS]]
    return {
        "table": scene.name,
        "row": row_of(scene, scene.row)["row"],
        "layer": layers_of(scene.network).index(attention),
        "layers": len(layers_of(scene.network)),
        "head": head,
        "heads": attention.num_heads,
        "n": n,
        "d": d,
        "root": math.sqrt(d),
        "log_n": math.log(n),
        "rule": scene.network.config.icl_scaling,
        "exponent": None if (p := exponents(attention)) is None else p[head].item(),
        "query": query | row_of(scene, scene.row),
        "keys": keys,
        "rest": others if len(rest) else None,
        "by_label": by_label([scene.labels[row] for row in scene.labeled], w.tolist()),
        "context": plain(w @ v),
        "entropy": shape(attention, q, sequence.k).entropy[0, head].item() if n > 1 else None,
        "columns": [str(name) for name in scene.cells.columns[:CELLS]],
        "features": scene.cells.shape[1],
        "hidden": [row_of(scene, row) | {"weight": 0.0} for row in hidden],
        "unlabeled": len(scene.queries),
        "prediction": [{"label": name, "p": float(p)} for name, p in zip(scene.classes, prediction[i], strict=True)],
    }


def steps_of(attention: Attention, sequence: Sequence, i: int, head: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The vectors of query i, None for a factor that the layer does not have; and its scores (K,) after each step."""
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
    groups = pd.DataFrame({"label": labels, "weight": weights}).groupby("label", sort=False)["weight"]
    sums = groups.agg(rows="size", weight="sum").sort_values("weight", ascending=False)
    return sums.reset_index().to_dict("records")


def plain(values: Tensor) -> list[float]:
    """Numbers with the nine digits that float32 has."""
    return [float(f"{value:.9g}") for value in values.tolist()]


def row_of(scene: Scene, row: int) -> dict[str, Any]:
    cells = [text_of(value) for value in scene.cells.iloc[row, :CELLS]]
    return {"row": int(scene.cells.index[row]), "label": scene.labels[row], "cells": cells}


def text_of(value: Any) -> str:
    if pd.isna(value):
        return "missing"
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def page(data: dict[str, Any]) -> str:
    """The page of what `explain` returns."""
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
