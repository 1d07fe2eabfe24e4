"""What a prior draws, in numbers: distributions over tables, and why draws were rejected."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable

import numpy as np

from priors.realism import fill
from priors.table import Table

FEW_VALUES = 32  # columns with at most 32 distinct values count as categorical
SCORED_ROWS = 2000  # largest number of rows on which the two models are fitted, and scored
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def statistics(table: Table) -> dict[str, float]:
    """Statistics of one table by name.

    The skill of a model is its accuracy on the query rows, scaled to 0 for the commonest class and 1 for no errors, or
    for a numeric target R2, raised to 0 if it is below.
    """
    X, y = table.X.cpu().numpy().copy(), table.y.cpu().numpy()
    fill(X, np.isnan(X), table.train_size)
    distinct = np.array([len(np.unique(column)) for column in X.T])
    return {
        "rows": len(y),
        "labeled share": table.train_size / len(y),
        "features": X.shape[1],
        "missing cells": table.missing,
        **(of_classes(y, table.num_classes) if table.num_classes else of_numbers(y)),
        "categorical share": float((distinct <= FEW_VALUES).mean()),
        **skills(X, y, table.train_size, table.num_classes == 0),
    }


def of_classes(y: np.ndarray, num_classes: int) -> dict[str, float]:
    """Statistics of labels y (N,)."""
    counts = np.bincount(y, minlength=num_classes)
    return {
        "classes": int((counts > 0).sum()),
        "missing classes": int((counts == 0).sum()),
        "commonest class": counts.max() / len(y),
        "rarest class": counts[counts > 0].min() / len(y),
    }


def of_numbers(y: np.ndarray) -> dict[str, float]:
    """Statistics of a standardized target y (N,)."""
    counts = np.unique(y, return_counts=True)[1]
    return {
        "distinct targets": len(counts),
        "commonest target": counts.max() / len(y),
        "lowest target": y.min(),
        "highest target": y.max(),
        "skewness of target": (y.astype(float) ** 3).mean(),
        "kurtosis of target": (y.astype(float) ** 4).mean(),
    }


def skills(X: np.ndarray, y: np.ndarray, train_size: int, numeric: bool) -> dict[str, float]:
    """Skill of two models by name."""
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    train, query = slice(max(0, train_size - SCORED_ROWS), train_size), slice(train_size, train_size + SCORED_ROWS)
    trees = {"n_estimators": 50, "min_samples_leaf": 2, "random_state": 0}
    if numeric:
        models = {"ridge regression": Ridge(), "extra trees": ExtraTreesRegressor(**trees)}
        score = r2
    else:
        models = {"logistic regression": LogisticRegression(max_iter=200), "extra trees": ExtraTreesClassifier(**trees)}
        score = scaled_accuracy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 200 iterations, which are enough here
        fitted = {name: model.fit(X[train], y[train]) for name, model in models.items()}
    return {f"skill of {name}": score(y[query], model.predict(X[query])) for name, model in fitted.items()}


def scaled_accuracy(y: np.ndarray, predicted: np.ndarray) -> float:
    base = np.bincount(y).max() / len(y)
    return ((predicted == y).mean() - base) / (1 - base) if base < 1 else 0.0


def r2(y: np.ndarray, predicted: np.ndarray) -> float:
    total = np.square(y - y.mean()).sum()
    return max(1 - np.square(y - predicted).sum() / total, 0.0) if total > 0 else 0.0


def describe(tables: Iterable[Table]) -> str:
    """A text with the distribution of each statistic, the accept rate, and the reasons for rejections."""
    rows, rejections = [], Counter()
    for table in tables:
        rows.append(statistics(table))
        rejections.update(table.rejections)
    heads = ["lowest", "10 %", "median", "90 %", "highest", "mean"]
    lines = [f"{'':28}" + "".join(f"{head:>10}" for head in heads)]
    for name in rows[0]:
        values = np.array([row[name] for row in rows], dtype=float)
        figures = [*np.quantile(values, QUANTILES), values.mean()]
        lines.append(f"{name:28}" + "".join(f"{figure:>10.5g}" for figure in np.round(figures, 3)))
    draws = len(rows) + rejections.total()
    lines.append(f"\n{len(rows)} tables from {draws} draws: {len(rows) / draws:.1%} accepted")
    for reason, count in rejections.most_common():
        lines.append(f"  rejected as {reason:16} {count:6}  ({count / draws:.1%} of the draws)")
    return "\n".join(lines)
