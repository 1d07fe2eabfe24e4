"""Scores on real data, beside baselines on the same splits."""

from __future__ import annotations

import csv

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from tabicl_train.config import ConfigError
from tabicl_train.export import load_model
from tabicl_train.model import TabICL
from tabicl_train.predict import predict_proba

DATASETS = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
QUERY_SHARE = 0.3
METRICS = ("roc_auc", "log_loss", "accuracy")


def evaluate(checkpoint: str, output: str | None = None, splits: int = 3) -> list[dict]:
    """Score a checkpoint on scikit-learn's bundled sets; prints a table, writes the rows to a CSV file if asked.

    splits: stratified 70/30 splits a data set, over which each figure is averaged
    """
    if splits < 1:
        raise ConfigError([f"splits is {splits}; it must be at least 1"])
    model = load_model(checkpoint)
    # One thread: a second one that shares its core with another process made gradient boosting 20 times slower.
    with threadpool_limits(1):
        rows = score_all(model, splits)
    print(as_table(rows))
    if output is not None:
        with open(output, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    return rows


def score_all(model: TabICL, splits: int) -> list[dict]:
    """A row a data set, split and method."""
    methods = {
        "this model": lambda X, y, Q: predict_proba(model, X, y, Q),
        "logistic regression": fit(lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))),
        "gradient boosting": fit(lambda: HistGradientBoostingClassifier(random_state=0)),
    }
    rows = []
    for name, load in DATASETS.items():
        X, y = load(return_X_y=True)
        splitter = StratifiedShuffleSplit(splits, test_size=QUERY_SHARE, random_state=0)
        for split, (train, query) in enumerate(splitter.split(X, y)):
            for method, predict in methods.items():
                scores = score(y[query], predict(X[train], y[train], X[query]))
                rows.append({"data": name, "split": split, "method": method, **scores})
    return rows


def fit(make):
    return lambda X, y, Q: make().fit(X, y).predict_proba(Q)


def score(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """ROC AUC (one versus rest, macro), log loss and accuracy of probabilities (n, classes)."""
    auc = roc_auc_score(y, p[:, 1]) if p.shape[1] == 2 else roc_auc_score(y, p, multi_class="ovr")
    return {
        "roc_auc": float(auc),
        "log_loss": float(log_loss(y, p, labels=np.arange(p.shape[1]))),
        "accuracy": float(accuracy_score(y, p.argmax(axis=1))),
    }


def as_table(rows: list[dict]) -> str:
    """ROC AUC, log loss and accuracy, a line a data set and one of means."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    names = list(dict.fromkeys(row["data"] for row in rows))
    width = 25
    lines = [f"{'':15}" + "".join(f"{m:>{width}}" for m in methods)]
    lines.append(f"{'':15}" + "".join(f"{'ROC AUC  log loss   acc.':>{width}}" for _ in methods))
    for name in [*names, "mean"]:
        cells = []
        for method in methods:
            mine = [r for r in rows if r["method"] == method and name in (r["data"], "mean")]
            auc, loss, accuracy = (float(np.mean([r[m] for r in mine])) for m in METRICS)
            cells.append(f"{auc:.4f}  {loss:8.3f}  {accuracy:.3f}".rjust(width))
        lines.append(f"{name:15}" + "".join(cells))
    return "\n".join(lines)
