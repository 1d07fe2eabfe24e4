"""Real tables for the experiments, files with a column of classes, and networks that predict classes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tabicl_train.console import counted
from tabicl_train.errors import ConfigError
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.predict_files import read_input
from tabicl_train.weights.reader import load_model


def load_classifier(checkpoint: str, weights: str | None = None) -> TabICL:
    """The network of a checkpoint; raises ConfigError if it predicts numbers."""
    network = load_model(checkpoint, weights)
    if network.config.is_regression:
        raise ConfigError([f"checkpoint is {checkpoint!r}; its network predicts numbers, and here classes are needed"])
    return network


def read_classes(path: str, target: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    """The columns of a file and the classes in its column `target`, as text; by default, the last column.

    Rows without a class are left out; the index counts the rows of the file. Raises ConfigError if there is no such
    file or column.
    """
    frame = read_input(path, targets=None if target is None else [target])
    if frame.shape[1] < 2:
        raise ConfigError([f"table is {path!r}; it has one column, and needs features and a target"])
    target = frame.columns[-1] if target is None else target
    if target not in frame:
        raise ConfigError([f"target is {target!r}; {path} has the columns {', '.join(map(str, frame))}"])
    frame = frame[frame[target].notna()]
    y = frame.pop(target).astype(str).to_numpy()
    return frame, y


def plain_classifier(network: TabICL, X: pd.DataFrame, y: np.ndarray) -> TabICLClassifier:
    """A classifier that sees the table once, as it is, on the CPU like drawn tables; raises ConfigError for too few or
    too many classes."""
    classes = len(np.unique(y))
    most = network.config.max_classes
    if not 2 <= classes <= most:
        rows = f"{counted(len(y), 'labeled row')}, classes among them: {classes}"
        raise ConfigError([f"{rows}; the network takes 2..{most} classes at once"])
    return TabICLClassifier(network, n_estimators=1, norm_methods=("none",), device="cpu").fit(X, y)
