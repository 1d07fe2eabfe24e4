"""codes: many classes by digits and groups, or by error-correcting output codes with the same number of passes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from priors.options import option
from priors.random import rng_at
from tabicl_train import TabICLClassifier
from tabicl_train.console import counted, info
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.classes import QUERIES, ROWS, TABLES, draw_clusters, nodes, predict_classes
from tabicl_train.lab.folder import Folder, markdown, plot_estimates, share
from tabicl_train.lab.tables import load_classifier
from tabicl_train.model.encoding import label_digits, split_classes
from tabicl_train.model.tabicl import TabICL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS, CODES, FEW = "digits and groups", "codes, as many passes", "codes, as many readings"

QUESTION = """
There is another way to predict hundreds of classes with ten outputs. Write each class as a word of many symbols below
ten, predict each symbol by a pass of its own over all labeled rows, and take the class whose word is the most probable:
error-correcting output codes. The more passes, the more errors they correct. Digits and groups need a fixed number of
predictions among few classes, most of them from few labeled rows. Which way is better with the same number of passes,
and how long do both take? As groups divide the labeled rows, so many passes of codes read many more rows. Therefore
codes are also scored with as few passes as the groups have levels, which read as many labeled rows.
"""


@dataclass
class CodesOptions:
    """tabicl-lab codes folder=DIR checkpoint=RUN_DIR_OR_FILE [classes=[20,100]]

    Accuracy and time of a checkpoint for 10 to 1,000 classes: digits and groups, and error-correcting output codes.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str = option()
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    classes: list[int] = option([10, 20, 57, 100, 300, 1000], at_least=2)
    """Numbers of classes; a thousand take 111 passes over 8,000 rows for each table."""
    small: bool = False
    """Two small numbers of classes, one table for each."""


def run(options: CodesOptions) -> None:
    if not options.classes:
        raise ConfigError(["classes is empty; name at least one number"])
    network = load_classifier(options.checkpoint, options.weights)
    folder = Folder("codes", options)
    most = network.config.max_classes
    # The first prediction compiles and allocates, and is not timed.
    predict_classes(network, *draw_clusters(most + 1, 2, 2, 0)[:3])
    counts = [most, 2 * most] if options.small else sorted(set(options.classes))
    scores = []
    for classes in counts:
        for table in range(1 if options.small else TABLES):
            info(f"{classes:,} classes, table {table}")
            scores += score_both_ways(network, classes, table)
            folder.csv("codes", pd.DataFrame(scores))
    frame = pd.DataFrame(scores)
    folder.figure("codes", draw(frame, most))
    folder.page("Groups of classes, or codes", QUESTION, findings(frame))


def reads_of_a_row(classes: int, most: int) -> int:
    """Return the number of levels of groups, which is how often in-context learning reads each labeled row."""
    return 1 if classes <= most else 1 + reads_of_a_row(split_classes(classes, most)[0], most)


def code_words(classes: int, passes: int, most: int, seed: int) -> np.ndarray:
    """Draw a code word for each class.

    The symbols are the digits of the class in a random order of all classes, then its digits in another order, and so
    on. The digits of one order tell all classes apart, and the symbols of a pass have nearly equal numbers of classes.

    Parameters
    ----------
    classes : int
        Number of classes.
    passes : int
        Length of a word.
    most : int
        Number of symbols.
    seed : int
        Seed of the random orders.

    Returns
    -------
    ndarray of shape (classes, passes)
        Symbols in 0..most-1.
    """
    rng = rng_at((classes, seed), "codes")
    columns: list[np.ndarray] = []
    while len(columns) < passes:
        order = torch.from_numpy(rng.permutation(classes))
        columns += [digit.numpy() for digit in label_digits(order, classes, most)]
    return np.stack(columns[:passes], 1)


def score_both_ways(network: TabICL, classes: int, number: int) -> list[dict[str, float | str]]:
    """Score both ways on one table; returns rows with classes, table, way, passes, accuracy and cpu_seconds."""
    # Digits and groups.
    X, y, asked, truth, _ = draw_clusters(classes, ROWS, QUERIES, number)
    most = network.config.max_classes
    started = time.process_time()
    predicted = predict_classes(network, X, y, asked)
    known = {"classes": classes, "table": number}
    passes = nodes(classes, most)
    found = [score_row(known, GROUPS, passes, predicted == truth, started)]

    # Codes: a classifier for each symbol, whose probabilities are multiplied along the word of each class. Symbols that
    # no labeled row has get 1e-9.
    words = code_words(classes, passes, most, number)
    logarithms = np.zeros((len(asked), classes))
    started = time.process_time()
    for number_of_passes in range(1, passes + 1):
        word = words[:, number_of_passes - 1]  # symbol of each class in this pass, (classes,)
        model = TabICLClassifier(network, n_estimators=1, norm_methods=("none",)).fit(X, word[y])
        p = np.full((len(asked), most), 1e-9)
        p[:, model.classes_] = model.predict_proba(asked)
        logarithms += np.log(p[:, word])
        correct = logarithms.argmax(1) == truth
        if number_of_passes == reads_of_a_row(classes, most):
            found.append(score_row(known, FEW, number_of_passes, correct, started))
        if number_of_passes == passes:
            found.append(score_row(known, CODES, passes, correct, started))
    return found


def score_row(
    known: dict[str, int], way: str, passes: int, correct: np.ndarray, started: float
) -> dict[str, float | str]:
    return {
        **known,
        "way": way,
        "passes": passes,
        "accuracy": float(correct.mean()),
        "cpu_seconds": time.process_time() - started,
    }


def draw(frame: pd.DataFrame, most: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way, rows in frame.groupby("way", sort=False):
        by_classes = rows.groupby("classes")
        plot_estimates(left, by_classes["accuracy"].agg(share), label=way)
        right.plot(by_classes["cpu_seconds"].mean(), "o-", label=way)
    left.set(title="accuracy", ylim=(-0.02, 1.02))
    right.set(title="CPU seconds for a table", yscale="log")
    for axes in (left, right):
        axes.set(xscale="log", xlabel=f"classes (vertical line: the network's {most} outputs)")
        axes.axvline(most, color="0.7", linewidth=1, zorder=0)
    left.legend(fontsize="small")
    return figure


def findings(frame: pd.DataFrame) -> str:
    rows = []
    for classes, own in frame.groupby("classes"):
        accuracy = own.pivot(index="table", columns="way", values="accuracy")
        seconds = own.groupby("way")["cpu_seconds"].mean()
        passes = own.groupby("way")["passes"].max()
        for way in (GROUPS, FEW, CODES):
            change = "" if way == GROUPS else f"{mean_interval((accuracy[way] - accuracy[GROUPS]).to_numpy()):+.3f}"
            mean = share(accuracy[way])
            rows.append((f"{classes:,}", way, passes[way], f"{mean:.3f}", change, f"{seconds[way]:.1f}"))
    columns = ["classes", "way", "passes", "accuracy", "minus groups", "CPU seconds"]
    return f"""
![accuracy and time by number of classes](codes.png)

{markdown(pd.DataFrame(rows, columns=columns))}

Means over {counted(frame["table"].nunique(), "table")}, with 95 % intervals for other tables, of `tabicl-lab classes`:
{ROWS} labeled rows of each class, {QUERIES} query rows. **passes**: predictions among few classes. This is one network,
so one seed: nothing is claimed about others.
"""
