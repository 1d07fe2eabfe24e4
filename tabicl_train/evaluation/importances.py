"""Importance of the columns of a task for a network: how much its score falls if a column is shuffled."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.inspection import permutation_importance
from tqdm import tqdm

from tabicl_train.config.schema import REAL_SCORES
from tabicl_train.console import first_line, print_above_bar
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.scores import score, score_numbers
from tabicl_train.evaluation.suites import Source, Task

REPEATS = 5  # shuffles of a column, scikit-learn's default
COLUMNS = ("data", "column", "score", "score_of_all", "importance", "deviation")


def importances_of_tasks(
    tasks: list[Source], make: Callable[[], BaseEstimator], rows: int | None, splits: int | None
) -> pd.DataFrame:
    """Compute the importances of the columns of each task, and print a warning for a task where that fails.

    Parameters
    ----------
    tasks : list of Source
        The tasks of a suite.
    make : callable
        `make()` returns an estimator of this project that is not fitted.
    rows, splits : int or None
        As `tabicl-evaluate` takes them.

    Returns
    -------
    DataFrame
        A row for each task and column: data, column, score (roc_auc or r2), score_of_all (the score with the table as
        it is), importance (the mean fall of the score over REPEATS shuffles) and deviation (their standard deviation).

    Raises
    ------
    ConfigError
        If there are importances of no task.
    """
    frames = []
    for source in tqdm(tasks, unit="task", desc="importances", file=sys.stderr):
        try:
            frames.append(importances_of(source.load(rows), make(), splits))
        except Exception as error:  # of any type, from reading or from the network
            print_above_bar(f"warning   no importances of {source.name}: {first_line(error)}")
    if not frames:
        raise ConfigError(["the importances of no task could be computed"])
    return pd.concat(frames, ignore_index=True)


def importances_of(task: Task, estimator: BaseEstimator, splits: int | None) -> pd.DataFrame:
    """Return the rows of one task, of the query rows of its first split."""
    split = next(iter(task.scored_together(splits)))[0]
    name = "r2" if task.is_regression else "roc_auc"

    def score_of(fitted: BaseEstimator, X: pd.DataFrame, y: np.ndarray) -> float:
        if task.is_regression:
            return score_numbers(y, fitted.predict(X), None)["r2"]
        return score(y, fitted.predict_proba(X))["roc_auc"]

    X = split.X.iloc[split.query]
    y = split.y[split.query]
    estimator.fit(split.X.iloc[split.labeled], split.y[split.labeled])
    found = permutation_importance(estimator, X, y, scoring=score_of, n_repeats=REPEATS, random_state=0)
    table = pd.DataFrame(
        {
            "data": task.name,
            "column": [str(column) for column in X.columns],
            "score": name,
            "score_of_all": score_of(estimator, X, y),
            "importance": found.importances_mean,
            "deviation": found.importances_std,
        },
        columns=list(COLUMNS),
    )
    return table.sort_values("importance", ascending=False, kind="stable")


def as_text(table: pd.DataFrame) -> str:
    """Say for each task which columns matter most."""
    lines = []
    for data, rows in table.groupby("data", sort=False):
        name = REAL_SCORES[rows["score"].iloc[0]]
        columns = [f"{row.column} {row.importance:.3f}" for row in rows.head(5).itertuples()]
        lines.append(f"{data}: fall of {name} if a column is shuffled: {', '.join(columns)}")
    return "\n".join(lines)
