"""attention: one row of a table through one attention head, step by step, as a page for a browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING

from priors import PriorError, Table
from priors.random import rng_at
from tabicl_train.config.checks import at_least, one_of
from tabicl_train.errors import ConfigError
from tabicl_train.lab.folder import Folder
from tabicl_train.lab.instruments import sites
from tabicl_train.lab.one_query import Place, find, numbers, site_at
from tabicl_train.lab.tables import load_classifier, plain_classifier, read_table
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.cost import token_groups
from tabicl_train.model.layout import column_layout
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL, feature_index
from tabicl_train.prediction.predict import predict_logits
from tabicl_train.report.page import fill

TEMPLATE = Path(__file__).with_name("attention.html.j2")
OTHERS = 3  # other query rows of a file that are predicted beside the one asked for
CELLS = 8  # columns of the table that are shown
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


@dataclass
class Options:
    """tabicl-lab attention folder=DIR checkpoint=RUN_DIR_OR_FILE table=FILE.csv row=N key=value ...

    Writes attention.html: how one row of a table looks at the labeled rows in one attention head, from its tokens to
    the prediction, every number being the network's own. With table=N step=S, the table is one that the run was trained
    on, by the address that tabicl-prior show and tabicl-replay give.
    """

    folder: str = MISSING
    """Folder to write."""
    checkpoint: str = MISSING
    """Folder of a run (its newest checkpoint is taken), a checkpoint, or an export: a public file or a hub folder."""
    table: str = MISSING
    """CSV file; or, with step, the number of a table in a step of the run."""
    step: int | None = None
    """Step of the run, for a synthetic table."""
    row: int | None = None
    """Row to look at, counted from 0; null takes the last one. Of a synthetic table, it must be a query row."""
    target: str | None = None
    """Column of the file with the classes; null takes the last one."""
    rows: int = 1000
    """Labeled rows of a file, at most: a random sample if it has more."""
    site: str = "icl"
    """icl: rows attend to labeled rows; or column: inducing points of a column attend to its labeled cells, of which
    the one is shown that the row's cell reads most."""
    layer: int = -1
    """Layer of the site; negative numbers count from the last."""
    head: int = 0
    """Head of the layer."""
    column: int = 0
    """For site=column: the column that is shown, as the network counts them: features that are constant among the
    labeled rows are left out, and a column may hold several features, which the page names."""
    small: bool = False
    """At most 50 labeled rows of a file."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each."""
        problems = at_least(2, rows=self.rows) + one_of("site", self.site, ("icl", "column"))
        if self.step is not None and not self.table.isdecimal():
            problems.append(f"table is {self.table!r}; with step, it is the number of a table in the step")
        return problems


@dataclass
class Scene:
    """A table, the network that predicts it, and the row that is looked at.

    cells: all rows of the table, whose index numbers them, and labels as text
    labeled, queries: positions of these rows in `cells`, in the order in which the network gets them; row is a query
    predict: -> probabilities of the query rows, (query rows, classes)
    features: names of those that the network gets, in its order
    """

    name: str
    network: TabICL
    cells: pd.DataFrame
    labels: list[str]
    classes: list[str]
    labeled: list[int]
    queries: list[int]
    row: int
    predict: Any
    features: list[str]


def run(options: Options) -> None:
    if problems := options.problems():
        raise ConfigError(problems)
    network = load_classifier(options.checkpoint)
    place = Place(options.site, options.layer, options.head, options.column)
    site_at(network, place)
    scene = synthetic_scene(options, network) if options.step is not None else real_scene(options, network)
    data = explain(scene, place)
    folder = Folder("attention", options)
    folder.text(
        "attention.html", fill(TEMPLATE, data=data, rule=RULES[data["rule"]], scene=scene, table=frame_of(data))
    )
    folder.page("One row through one attention head", QUESTION.format(**data), "[attention.html](attention.html)")


QUESTION = """
To predict row {row} of {table}, the network compares it with the rows whose class it knows, and takes more from those
that it finds alike. The page attention.html shows one of these comparisons in steps: head {head} of layer {layer},
stage {stage}. Every number on it is the network's own. Weights say where this head looks, not what caused the
prediction.
"""


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
    labeled = sorted(order[len(queries) - 1 :][: min(options.rows, 50) if options.small else options.rows])
    classifier = plain_classifier(network, X.iloc[labeled], y[labeled])

    def predict() -> np.ndarray:
        return classifier.predict_proba(X.iloc[queries])

    classes, name = [str(label) for label in classifier.classes_], Path(options.table).name
    features = [str(feature) for feature in X.columns[classifier.encoder_.varying]] or ["no feature that varies"]
    return Scene(name, classifier.network_, X, list(y), classes, labeled, queries, row, predict, features)


def synthetic_scene(options: Options, network: TabICL) -> Scene:
    """A query row of a table of the run's stream."""
    assert options.step is not None
    table = table_at(options.checkpoint, options.step, int(options.table))
    row = len(table.y) - 1 if options.row is None else options.row
    if not table.train_size <= row < len(table.y):
        raise ConfigError([f"row is {row}; the query rows are {table.train_size}..{len(table.y) - 1}"])
    pack, classes = Pack.of([(table.X, table.y, table.train_size)]), int(table.y.max()) + 1
    queries = list(range(table.train_size, len(table.y)))

    def predict() -> np.ndarray:
        return torch.softmax(predict_logits(network, pack, classes, tokens=pack.cells * 2).double(), -1).numpy()

    cells = pd.DataFrame(table.X.numpy()).rename(columns=lambda j: f"x{j}")
    labels = [f"class {label}" for label in table.y.tolist()]
    names = [f"class {label}" for label in range(classes)]
    name = f"table {options.table} of step {options.step}"
    labeled = list(range(table.train_size))
    return Scene(name, network, cells, labels, names, labeled, queries, row, predict, list(cells.columns))


def table_at(checkpoint: str, step: int, index: int) -> Table:
    """A table of the stream of a run; raises ConfigError if there is no such table, or this version draws others."""
    from tabicl_train.config.compose import from_values
    from tabicl_train.config.schema import build_prior
    from tabicl_train.curriculum import plan_step
    from tabicl_train.debugging.replay import version_problems
    from tabicl_train.run_dir.checkpoint import is_run_checkpoint, load
    from tabicl_train.stream import draw_table

    path, content = load(checkpoint)
    if not is_run_checkpoint(content):
        raise ConfigError([f"checkpoint is {checkpoint!r}; only a run knows the tables of its steps"])
    if problems := version_problems(content):
        raise ConfigError([f"{path}: its tables cannot be drawn again: {problem}" for problem in problems])
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


def explain(scene: Scene, place: Place) -> dict[str, Any]:
    """All that the page shows: `numbers`, the rows of the table, the rows that are not seen, and the prediction."""
    found = find(scene.network, scene.predict, place, scene.queries.index(scene.row))
    data = numbers(found, place.head, [scene.labels[row] for row in scene.labeled])
    for key in data["keys"]:
        key |= row_of(scene, scene.labeled[key.pop("index")])
    data["query"] |= row_of(scene, scene.row)
    others = [row for row in scene.queries if row != scene.row][:OTHERS]
    p = found.prediction[scene.queries.index(scene.row)]
    return data | {
        "table": scene.name,
        "row": data["query"]["row"],
        "heads": found.site.attention.num_heads,
        "layers": sum(site.stage == place.stage for site in sites(scene.network)),
        "column": place.column,
        "group": [scene.features[j] for j in group(scene.network.config, place.column, len(scene.features))],
        "columns": [str(name) for name in scene.cells.columns[:CELLS]],
        "features": scene.cells.shape[1],
        "rule": getattr(scene.network.config, f"{'col' if place.stage == 'column' else 'icl'}_scaling"),
        "hidden": [row_of(scene, row) | {"weight": 0.0} for row in [scene.row, *others]],
        "unlabeled": len(scene.queries),
        "prediction": [{"label": label, "p": float(of)} for label, of in zip(scene.classes, p, strict=True)],
    }


def group(config: TabICLConfig, column: int, features: int) -> list[int]:
    """The features that the tokens of a column see, in a table with so many."""
    shape, tokens = (1, 1, features), (1, 1, token_groups(config, features))
    columns = column_layout(torch.tensor([tokens]), [tokens], 1)
    seen = feature_index(torch.tensor([shape]), [shape], columns, config.col_grouping, config.group_size)
    return [j for j in dict.fromkeys(seen[column].tolist()) if j < features]  # disjoint groups may lack some


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
