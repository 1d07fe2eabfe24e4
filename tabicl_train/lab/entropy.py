"""entropy: how even the attention of a network is, against the number of labeled rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING

import priors
from priors import TableSpec
from priors.random import rng_at
from tabicl_train.config.checks import at_least
from tabicl_train.console import info
from tabicl_train.errors import ConfigError
from tabicl_train.lab.folder import Folder, markdown
from tabicl_train.lab.instruments import POINTS, ROWS, measure
from tabicl_train.lab.tables import load_classifier, plain_classifier, read_table
from tabicl_train.model.pack import Pack
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.export import load_model
from tabicl_train.prediction.predict import forward
from tabicl_train.report.figures import KINDS, draw_attention

QUERY_ROWS = 256  # of each table, so that as many of them as of its labeled rows are measured
TOKENS = 2**22  # of a synthetic table, computed at a time: see predict_logits

QUESTION = """
To predict a row, the network looks at the labeled rows: each attention layer gives every labeled row a weight, and
the weights sum to one. Does it look at a few rows that matter, or a little at all of them? Entropy tells: divided by
log n it is 1 if all n rows have equal weights and 0 if one row has all the weight. A table with ten times as many rows
has ten times as many small weights, so attention may become even merely because a table is long (attention fading).
Networks with a scalable softmax multiply their queries by a learned number that depends on n, to prevent just that.
"""


@dataclass
class Options:
    """tabicl-lab entropy folder=DIR checkpoint=RUN_DIR_OR_FILE [prior=NAME or table=FILE.csv] rows=[100,1000]

    How even the attention of a network is on tables of more and more labeled rows, in each layer and head. With
    folder=RUN_DIR/entropy, the figure is also a part of the run's report.
    """

    folder: str = MISSING
    """Folder to write."""
    checkpoint: str = MISSING
    """Folder of a run (its newest checkpoint is taken), a checkpoint, or an export: a public file or a hub folder."""
    prior: str = "graph_scm"
    """Prior that draws the tables, with its default options."""
    features: int = 10
    """Features of the drawn tables."""
    table: str | None = None
    """CSV file from which labeled rows are sampled instead."""
    target: str | None = None
    """Column of the file with the classes; null takes the last one."""
    rows: list[int] = field(default_factory=lambda: [100, 300, 1000, 3000])
    """Numbers of labeled rows."""
    tables: int = 4
    """Tables for each number of rows."""
    seed: int = 0
    """Seed of the tables."""
    small: bool = False
    """The two smallest numbers of rows, and one table for each."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each."""
        problems = at_least(1, features=self.features, tables=self.tables)
        problems += [problem for n in self.rows for problem in at_least(10, rows=n)]
        if not self.rows:
            problems.append("rows is empty; name at least one number of labeled rows")
        if self.table is None and self.prior not in priors.prior_names():
            problems.append(f"prior is {self.prior!r}; there are {', '.join(priors.prior_names())}")
        return problems


def run(options: Options) -> None:
    if problems := options.problems():
        raise ConfigError(problems)
    network = (load_classifier if options.table else load_model)(options.checkpoint)
    passes = real_tables(options, network) if options.table else drawn_tables(options, network)
    folder, found = Folder("entropy", options), []
    for n, table, model, predict in passes:
        info(f"{n} labeled rows, table {table}")
        measures = measure(model, predict)
        measures.insert(0, "table", table)
        found.append(measures)
        folder.csv("entropy", pd.concat(found, ignore_index=True))
    frame = pd.concat(found, ignore_index=True)
    folder.figure("entropy", draw_attention(frame))
    folder.page("Attention against the number of rows", QUESTION, findings(frame, options))


Pass = tuple[int, int, TabICL, Callable[[], Any]]  # labeled rows, number of the table, network, a prediction by it


def sizes(options: Options) -> Iterator[tuple[int, int]]:
    """Numbers of labeled rows, and of the tables of each."""
    rows = sorted(set(options.rows))
    for n in rows[:2] if options.small else rows:
        yield from ((n, table) for table in range(1 if options.small else options.tables))


def drawn_tables(options: Options, network: TabICL) -> Iterator[Pass]:
    prior = priors.build_prior(options.prior)
    for n, number in sizes(options):
        classes = min(network.config.max_classes, n)
        spec = TableSpec(n + QUERY_ROWS, n, options.features, classes)
        table = prior.sample(spec, (options.seed, n, number))
        pack = Pack.of([(table.X, table.y, n)])

        def predict(pack: Pack = pack) -> torch.Tensor:
            return forward(network, pack, network.config.max_classes, 1.0, TOKENS)

        yield n, number, network, predict


def real_tables(options: Options, network: TabICL) -> Iterator[Pass]:
    """Random rows of a file, as the classifier sees them."""
    assert options.table is not None
    X, y = read_table(options.table, options.target)
    if (most := max(n for n, _ in sizes(options))) >= len(y):
        raise ConfigError([f"rows has {most}; {options.table} has {len(y)} rows, and one must not be labeled"])

    def passes() -> Iterator[Pass]:
        for n, number in sizes(options):
            order = rng_at(options.seed, n, number).permutation(len(y))
            labeled, queries = order[:n], order[n : n + QUERY_ROWS]
            classifier = plain_classifier(network, X.iloc[labeled], y[labeled])
            yield n, number, classifier.network_, lambda c=classifier, q=queries: c.predict_proba(X.iloc[q])

    return passes()


def findings(frame: pd.DataFrame, options: Options) -> str:
    n = np.unique(frame["n"])
    rows = []
    for kind, site in KINDS.items():
        of_kind = frame[frame["queries"] == kind]
        for layer, own in of_kind.groupby("layer"):
            means = own.groupby("n")[["entropy", "top_weight", "base_largest", "gate_mean"]].mean().loc[n[[0, -1]]]
            ends = (f"{a:.3f} -> {b:.3f}" if a == a else "" for a, b in means.to_numpy().T)
            rows.append((site, layer, *ends))
    names = ["queries", "layer", "entropy / log n", "largest weight", "largest base multiplier", "mean gate"]
    tables = f"rows of {Path(options.table).name}" if options.table else f"tables of {options.prior}"
    return f"""
![entropy, largest weight, gap and multipliers against labeled rows](entropy.png)

Means over heads and over {frame["table"].nunique()} {tables} for each n; from n = {n[0]:,} to n = {n[-1]:,}:

{markdown(pd.DataFrame(rows, columns=names))}

- The sites are those in which rows are keys. In each column, inducing points (learned queries) attend to the labeled
  cells; in context, labeled rows and query rows attend to the labeled rows. The last layer has no labeled queries.
- **Largest weight** is the weight of the row that a query looks at most. **Logit gap**: the largest logit minus their
  mean. If one logit stands out from others that are all alike, its weight stays where it is only if the gap grows like
  log n, which is the dashed line.
- **Base multiplier** and **gate** are the two factors by which the scalable softmax multiplies a query: one depends on
  n, the other on the query. They are empty if the layer has none. Base multipliers count by their absolute value.
- {ROWS} random queries of each kind and table are measured, and {POINTS} inducing points of each column. In entropy.csv
  are all heads, the gap to the second largest logit, and the spread of the gate.
- Weights say where a layer looks, not what caused the prediction.
"""
