"""classes: how a network with ten outputs predicts up to a thousand classes, how well and how fast."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from priors.options import option
from priors.random import rng_at
from tabicl_train import TabICLClassifier
from tabicl_train.console import counted
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.lab.folder import Folder, markdown, plot_estimates, share
from tabicl_train.lab.tables import load_classifier
from tabicl_train.model.encoding import label_digits, split_classes
from tabicl_train.model.tabicl import TabICL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES = 6
NOISE = 0.3  # standard deviation of a class around its center; centers are standard normal
CLASSES = (2, 5, 10, 11, 20, 57, 100, 101, 300, 1000)
TABLES = 3  # for each number of classes
ROWS, QUERIES = 8, 256  # labeled rows of each class, and query rows of a table
# How the members of an ensemble differ, and the columns with their scores.
DIFFERENCES = {
    "numbers and columns": "accuracy_members",
    "numbers": "accuracy_numbers",
    "columns": "accuracy_columns",
}

QUESTION = """
A network that was trained with ten classes has ten outputs, and cannot be told a label above nine. It still predicts a
table with a thousand classes, in two steps. Going in, a label is written in digits, like a number: with 57 classes, as
two digits below 8, so that class 42 is 5 and 2. The network reads the table once for each digit, and averages what it
has read. Coming out, the classes are put into groups, and those into smaller groups: 57 classes form six groups of 9 or
10. The network predicts the group, then the class within each group, always among ten at most, and the probabilities
along the way are multiplied. What does that cost, and how much is lost?
"""


@dataclass
class ClassesOptions:
    """tabicl-lab classes folder=DIR checkpoint=RUN_DIR_OR_FILE [members=8] [small=true]

    Accuracy and time of a checkpoint against the number of classes, and how labels are written in digits and groups.
    """

    folder: str = option()
    """Folder to write."""
    checkpoint: str = option()
    """Folder of a run, a checkpoint, or an export: a public file or a hub folder."""
    weights: str | None = None
    """Which weights of a run directory: best (by validation), newest, or ema, the average that the run keeps. Default:
    best if the run has them, otherwise newest."""
    members: int = option(1, at_least=1)
    """With more than one: also the accuracy of so many ensemble members, which differ in the numbers of the classes, in
    the order of the columns, or in both."""
    small: bool = False
    """A small and a larger number of classes, one table for each, and no real data."""


def run(options: ClassesOptions) -> None:
    network = load_classifier(options.checkpoint, options.weights)
    most = network.config.max_classes
    folder = Folder("classes", options)
    X, y, asked, _, _ = draw_clusters(most + 1, 2, 2, 0)
    predict_classes(network, X, y, asked)  # not timed: the first prediction compiles and allocates
    tables = [(4, 0), (23, 0)] if options.small else list(itertools.product(CLASSES, range(TABLES)))
    rows = [score_classes(network, classes, number, options.members) for classes, number in tqdm(tables, unit="table")]
    scores = pd.DataFrame(rows)
    folder.csv("classes", scores)
    folder.csv("decomposition", decomposition(57, most))
    folder.figure("classes", draw(scores, most))
    folder.figure("decomposition", draw_decomposition(decomposition(57, most)))
    folder.page("More classes than outputs", QUESTION, findings(scores, most, options.members))


def draw_clusters(
    classes: int, rows: int, queries: int, number: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw a table whose classes are clusters.

    Parameters
    ----------
    classes : int
        Number of classes.
    rows : int
        Labeled rows of each class.
    queries : int
        Number of query rows.
    number : int
        The number of the table, from which it is drawn.

    Returns
    -------
    X, y : ndarray
        Labeled rows, (n, FEATURES) and (n,).
    asked, truth : ndarray
        Query rows, (queries, FEATURES) and (queries,).
    centers : ndarray
        Centers of the classes, (classes, FEATURES).
    """
    rng = rng_at((classes, number), "classes")
    centers = rng.standard_normal((classes, FEATURES))
    y = rng.permutation(np.repeat(np.arange(classes), rows))
    truth = rng.integers(classes, size=queries)
    X = centers[y] + NOISE * rng.standard_normal((len(y), FEATURES))
    asked = centers[truth] + NOISE * rng.standard_normal((queries, FEATURES))
    return X, y, asked, truth, centers


def predict_classes(
    network: TabICL,
    X: np.ndarray,
    y: np.ndarray,
    asked: np.ndarray,
    members: int = 1,
    differ_in: str = "numbers and columns",
) -> np.ndarray:
    """Predict the classes of query rows.

    Parameters
    ----------
    network : TabICL
        The network.
    X, y : ndarray
        Labeled rows, (n, M) and (n,).
    asked : ndarray
        Query rows, (queries, M).
    members : int, optional
        Members of the ensemble.
    differ_in : str, optional
        How they differ, a key of DIFFERENCES.

    Returns
    -------
    ndarray of shape (queries,)
    """
    classifier = TabICLClassifier(network, n_estimators=members, norm_methods=("none",)).fit(X, y)
    first = classifier.members_[0]
    same = {
        "numbers and columns": {},
        "numbers": {"features": first.features},
        "columns": {"shift": first.shift},
    }
    classifier.members_ = [replace(member, **same[differ_in]) for member in classifier.members_]
    return classifier.predict(asked)


def score_classes(network: TabICL, classes: int, number: int, members: int = 1) -> dict[str, float]:
    """Score a network on one table.

    Parameters
    ----------
    network : TabICL
        The network.
    classes : int
        Number of classes.
    number : int
        The number of the table.
    members : int, optional
        If above 1, ensembles of so many members are scored, too.

    Returns
    -------
    dict
        A row of classes.csv: accuracy and seconds of the network, the accuracies of the nearest class mean and of the
        nearest true center, and the numbers of digits and nodes.
    """
    # One member of the network, timed, the nearest class mean, and the nearest true center.
    X, y, asked, truth, centers = draw_clusters(classes, ROWS, QUERIES, number)
    means = np.stack([X[y == label].mean(0) for label in range(classes)])
    started = time.perf_counter()
    predicted = predict_classes(network, X, y, asked)
    seconds = time.perf_counter() - started
    most = network.config.max_classes
    digits = len(label_digits(torch.tensor(0), classes, most)) if classes > most else 1
    row = {
        "classes": classes,
        "table": number,
        "seconds": seconds,
        "accuracy": float((predicted == truth).mean()),
        "class_mean": float((nearest(asked, means) == truth).mean()),
        "best_possible": float((nearest(asked, centers) == truth).mean()),
        "digits": digits,
        "nodes": nodes(classes, most),
    }

    # Ensembles, not timed.
    if members > 1:
        for differ_in, column in DIFFERENCES.items():
            predicted_by_members = predict_classes(network, X, y, asked, members, differ_in)
            row[column] = float((predicted_by_members == truth).mean())
    return row


def nearest(X: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the index of the nearest of the points (P, M) for each row of X (N, M), (N,)."""
    return ((X**2).sum(1)[:, None] - 2 * X @ points.T + (points**2).sum(1)).argmin(1)


def nodes(classes: int, most: int) -> int:
    """Return how many predictions among at most `most` classes a table with `classes` classes needs."""
    return 1 if classes <= most else 1 + sum(nodes(size, most) for size in split_classes(classes, most))


def decomposition(classes: int, most: int) -> pd.DataFrame:
    """Return a row for each class: class, its digits, most significant first, and its group at the top level."""
    digits = torch.stack(label_digits(torch.arange(classes), classes, most)).T.numpy()
    sizes = split_classes(classes, most)
    frame = pd.DataFrame(digits, columns=[f"digit {i + 1}" for i in range(digits.shape[1])])
    return frame.rename_axis("class").reset_index().assign(group=np.repeat(np.arange(len(sizes)), sizes))


def draw(scores: pd.DataFrame, most: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = scores.groupby("classes").mean(numeric_only=True)
    for name, label in {"best_possible": "known centers (best possible)", "class_mean": "nearest class mean"}.items():
        left.plot(means.index, means[name], "--", label=label)
    plot_estimates(left, scores.groupby("classes")["accuracy"].agg(share), label="network")
    left.plot(means.index, 1 / means.index, ":", color="0.5", label="chance")
    left.set(title="accuracy", ylim=(-0.02, 1.02))
    left.legend(fontsize="small")
    right.plot(means.index, means["seconds"], "o-")
    right.set(title="seconds for a table", yscale="log")
    for axes in (left, right):
        axes.set(xscale="log", xlabel=f"classes (vertical line: the network's {most} outputs)")
        axes.axvline(most, color="0.7", linewidth=1, zorder=0)
    return figure


def draw_decomposition(frame: pd.DataFrame) -> Figure:
    """Draw classes with two digits at the place of their digits, in the color of their group."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for label, row, column, group in frame.to_numpy():
        place = column - 0.47, row - 0.47
        axes.add_patch(Rectangle(place, 0.94, 0.94, color=f"C{group}", alpha=0.35, linewidth=0))
        axes.text(column, row, str(label), ha="center", va="center", fontsize="small")
    radix = int(frame["digit 2"].max()) + 1
    axes.set(xlim=(-0.5, radix - 0.5), ylim=(radix - 0.5, -0.5), aspect="equal")
    axes.set(xlabel="second digit", ylabel="first digit", title=f"{len(frame)} classes: digits, and groups by color")
    return figure


def findings(scores: pd.DataFrame, most: int, members: int = 1) -> str:
    # A row for each number of classes, means and shares with intervals over tables.
    tables = counted(scores["table"].nunique(), "table")
    groups = scores.groupby("classes")
    means = groups.mean(numeric_only=True)
    columns = {}
    for name in ("digits", "nodes"):
        columns[name] = means[name].astype(int).map("{:,}".format)
    for name in ("accuracy", "class_mean", "best_possible"):
        columns[name] = groups[name].agg(share)

    # What an ensemble gains over one member on the same tables.
    text_of_members = ""
    if members > 1:
        text_of_members = (
            f"\n\nThe seconds are those of one member. {members} members give the classes other numbers (**numbers**), "
            f"read the columns in other orders (**columns**), or both. With up to {most} classes there are neither "
            "digits nor groups, but also little to gain; beyond, other numbers are other digits and other groups."
        )
        for differ_in, column in DIFFERENCES.items():
            differences = scores[column] - scores["accuracy"]
            gain = differences.groupby(scores["classes"]).agg(lambda values: f"{mean_interval(values.to_numpy()):+.3f}")
            columns[f"{members} members minus one: {differ_in}"] = gain

    columns["seconds"] = means["seconds"].map("{:.2f}".format)
    table = pd.DataFrame(columns).reset_index()
    return f"""
![accuracy and time by number of classes](classes.png)

{markdown(table)}

Means over {tables}, with 95 % intervals for other tables. This is one network, so one seed: nothing is claimed about
others, and what a network loses to the class means depends on its size and training. Each class is a normal
distribution in {FEATURES} dimensions with a standard deviation of {NOISE:g} around its center, and the centers are
standard normal. The more classes there are, the closer are their centers, so even a prediction that knows them is wrong
more often. Its accuracy is the best possible one, and the network loses the distance to it. **digits**: how often the
table is read. **nodes**: predictions among at most {most} classes. The number of labeled rows grows with the number of
classes, and the time with both.{text_of_members}

![digits and groups of 57 classes](decomposition.png)

Each square is a class, at the place of its two digits, in the color of its group. Empty squares are numbers that no
class has. Digits and groups cut the labels differently: one says what the network is told, the other what it is asked.
decomposition.csv lists them.
"""
