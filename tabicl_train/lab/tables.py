"""Real tables for experiments, from files with a column of classes, and networks that predict classes."""

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
    """Load the network of a checkpoint; raises ConfigError if it predicts numbers."""
    network = load_model(checkpoint, weights)
    if network.config.is_regression:
        raise ConfigError([f"checkpoint is {checkpoint!r}; its network predicts numbers, and must predict classes"])
    return network


def read_classes(path: str, target: str | None) -> tuple[pd.DataFrame, np.ndarray]:
    """Read a table and its classes from a file.

    Parameters
    ----------
    path : str
        A CSV file.
    target : str or None
        The column with the classes. None: the last one.

    Returns
    -------
    X : DataFrame
        The other columns, without rows that have no class. The index numbers the rows of the file.
    y : ndarray
        The classes as text.

    Raises
    ------
    ConfigError
        If there is no such file or column.
    """
    frame = read_input(path, targets=None if target is None else [target])
    if frame.shape[1] < 2:
        raise ConfigError([f"table is {path!r}; it has one column, and must have features and a target"])
    target = frame.columns[-1] if target is None else target
    if target not in frame:
        raise ConfigError([f"target is {target!r}; {path} has the columns {', '.join(map(str, frame))}"])
    frame = frame[frame[target].notna()]
    y = frame.pop(target).astype(str).to_numpy()
    return frame, y


def plain_classifier(network: TabICL, X: pd.DataFrame, y: np.ndarray) -> TabICLClassifier:
    """Return a fitted classifier that reads the table once, unchanged, and on the CPU, like tables of a prior.

    Raises ConfigError if there are too few or too many classes.
    """
    classes = len(np.unique(y))
    most = network.config.max_classes
    if not 2 <= classes <= most:
        rows = f"{counted(len(y), 'labeled row')}, classes among them: {classes}"
        raise ConfigError([f"{rows}; the network predicts 2..{most} classes at once"])
    return TabICLClassifier(network, n_estimators=1, norm_methods=("none",), device="cpu").fit(X, y)
