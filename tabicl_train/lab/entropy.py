"""entropy: how even the attention of a network is, against the number of labeled rows of the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

import priors
from priors import Table, TableSpec
from priors.options import option
from tabicl_train.config.schema import one_of
from tabicl_train.console import counted, info
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.folder import Folder, markdown
from tabicl_train.lab.instruments import POINTS, ROWS, measure
from tabicl_train.model.pack import Pack
from tabicl_train.model.recording import attention_layers
from tabicl_train.model.tabicl import TabICL
from tabicl_train.weights.reader import load_model

TABLES = 4  # for each number of rows
FEATURES = 10
QUERY_ROWS = 256  # of each table, so that as many of them as of its labeled rows are measured

QUESTION = """
To predict a row, the network looks at the labeled rows: each attention layer gives every labeled row a weight, and
the weights sum to one. Does it look at a few rows that matter, or a little at all of them? Entropy tells: divided by
log n it is 1 if all n rows have equal weights and 0 if one row has all the weight. A table with ten times as many rows
has ten times as many small weights, so attention may become even merely because a table is long (attention fading).
Networks with a scalable softmax multiply their queries by a learned number that depends on n, to prevent just that.
"""


@dataclass
class EntropyOptions:
    """tabicl-lab entropy folder=DIR checkpoint=RUN_DIR_OR_FILE [prior=NAME] [rows=[100,1000]]

    How even the attention of a network is on tables of more and more labeled rows, in each layer and head.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str = option()
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    prior: str = "graph_scm"
    """Prior that draws the tables, with its default options."""
    rows: list[int] = option([100, 300, 1000, 3000], at_least=10)
    """Numbers of labeled rows."""
    small: bool = False
    """The two smallest numbers of rows, and one table for each."""

    def problems(self) -> list[str]:
        problems = one_of("prior", self.prior, priors.prior_names())
        if not self.rows:
            problems.append("rows is empty; name at least one number")
        return problems


def run(options: EntropyOptions) -> None:
    from tabicl_train.lab.entropy_figure import draw_attention  # here, since the help does not need matplotlib

    network = load_model(options.checkpoint, options.weights)
    attention_layers(network)  # raises an error before anything is written if there are none
    folder = Folder("entropy", options)
    numbers_of_rows = sorted(set(options.rows))
    tables = TABLES
    if options.small:
        numbers_of_rows = numbers_of_rows[:2]
        tables = 1

    # The file is written after each number of rows, since long tables take minutes.
    frames = []
    for n in numbers_of_rows:
        for table in range(tables):
            info(f"{n} labeled rows, table {table}")
            measures = measure(network, prediction(network, options.prior, n, table))
            measures.insert(0, "table", table)
            frames.append(measures)
        frame = pd.concat(frames, ignore_index=True)
        folder.csv("entropy", frame)
    folder.figure("entropy", draw_attention(frame))
    folder.page("Attention against the number of rows", QUESTION, findings(frame, options.prior))


def prediction(network: TabICL, prior: str, n: int, number: int) -> Callable[[], torch.Tensor]:
    """Return a function that predicts the query rows of a table with n labeled rows."""
    table = draw_test_table(prior, n, number, network.config.max_classes)
    pack = Pack.of([(table.X, table.y, n)])
    return lambda: network(pack)


def draw_test_table(prior: str, n: int, number: int, max_classes: int) -> Table:
    """Draw a table with n labeled rows and QUERY_ROWS query rows, the same one in every call."""
    spec = TableSpec(n + QUERY_ROWS, n, FEATURES, min(max_classes, n))
    return priors.build_prior(prior).sample(spec, (0, n, number))


def findings(frame: pd.DataFrame, prior: str) -> str:
    from tabicl_train.lab.entropy_figure import KINDS

    # A row for each layer and kind of queries, from the smallest to the largest n.
    n = np.unique(frame["n"])
    rows = []
    for kind, site in KINDS.items():
        rows_of_kind = frame[frame["queries"] == kind]
        for layer, rows_of_layer in rows_of_kind.groupby("layer"):
            means = rows_of_layer.groupby(["n", "table"]).mean(numeric_only=True)  # over heads
            cells = []
            for measure_name in ("entropy", "top_weight", "base_largest", "gate_mean"):
                shortest = mean_interval(means.loc[n[0]][measure_name].to_numpy())
                longest = mean_interval(means.loc[n[-1]][measure_name].to_numpy())
                cells.append("" if math.isnan(shortest.mean) else f"{shortest:.3f} -> {longest:.3f}")
            rows.append((site, layer, *cells))
    names = ["queries", "layer", "entropy / log n", "largest weight", "largest base multiplier", "mean gate"]
    return f"""
![entropy, largest weight, gap and multipliers against labeled rows](entropy.png)

Means over heads, with 95 % intervals for other tables, from {counted(frame["table"].nunique(), "table")} of {prior} for
each n; from n = {n[0]:,} to n = {n[-1]:,}:

{markdown(pd.DataFrame(rows, columns=names))}

- Layers in which rows are keys are measured. In each column, inducing points (learned queries) attend to the labeled
  cells; in context, labeled rows and query rows attend to the labeled rows. The last layer has no labeled queries.
- **Largest weight**: the weight of the row that a query looks at most. **Logit gap**: the largest logit minus the mean
  of all. If one logit stands out from others that are equal, its weight does not change with n only if the gap grows
  like log n, which is the dashed line.
- **Base multiplier** and **gate** are the two factors by which the scalable softmax multiplies a query: one depends on
  n, the other on the query. They are empty if the layer has none. Base multipliers count by their absolute value.
- {ROWS} random queries of each kind and table are measured, and {POINTS} inducing points of each column. entropy.csv
  has all heads.
- This is one network, so one seed: nothing is claimed about its rule of attention, which networks of other sizes and
  trainings may use differently.
- Weights say where a layer looks, not what caused the prediction.
"""
