"""What a prior draws, in numbers: distributions over tables, and why draws were rejected."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable

import numpy as np

from priors.table import Table

FEW_VALUES = 32  # columns with at most 32 distinct values count as categorical
SCORED_ROWS = 2000  # largest number of rows on which the two models are fitted, and scored
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def statistics(table: Table) -> dict[str, float]:
    """Statistics of one table by name.

    The skill of a model is its accuracy on the query rows, scaled to 0 for the commonest class and 1 for no errors.
    """
    X, y = table.X.cpu().numpy(), table.y.cpu().numpy()
    counts = np.bincount(y, minlength=table.num_classes)
    distinct = np.array([len(np.unique(column)) for column in X.T])
    return {
        "rows": len(y),
        "labelled share": table.train_size / len(y),
        "features": X.shape[1],
        "classes": int((counts > 0).sum()),
        "missing classes": int((counts == 0).sum()),
        "commonest class": counts.max() / len(y),
        "rarest class": counts[counts > 0].min() / len(y),
        "categorical share": float((distinct <= FEW_VALUES).mean()),
        **skills(X, y, table.train_size),
    }


def skills(X: np.ndarray, y: np.ndarray, train_size: int) -> dict[str, float]:
    """Skill of two models by name."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression

    train, query = slice(max(0, train_size - SCORED_ROWS), train_size), slice(train_size, train_size + SCORED_ROWS)
    base = np.bincount(y[query]).max() / len(y[query])
    models = {
        "logistic regression": LogisticRegression(max_iter=200),
        "extra trees": ExtraTreesClassifier(50, min_samples_leaf=2, random_state=0),
    }
    scores = {}
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of 200 iterations, which are enough here
            accuracy = (model.fit(X[train], y[train]).predict(X[query]) == y[query]).mean()
        scores[f"skill of {name}"] = (accuracy - base) / (1 - base) if base < 1 else 0.0
    return scores


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
