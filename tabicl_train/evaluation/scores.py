"""Scores of predictions, and comparisons of methods over tasks.

Results are a data frame with a row a task, split and method: data, split, method, rows, labelled_rows, features,
classes, the METRICS, seconds, and trained_range (inside, outside or unknown, see trained_range.py).

Comparisons first average a task's splits, so that every task counts the same.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy.stats import norm
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

METRICS = ("roc_auc", "log_loss", "accuracy", "calibration_error")
BINS = 10  # of the calibration error
CONFIDENCE = 0.95
RESAMPLES = 2000
BUCKETS = {  # the largest value of each bucket
    "rows": [199, 499, 999, math.inf],
    "features": [5, 10, 20, math.inf],
    "classes": [2, 5, 10, math.inf],
}


def score(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """The METRICS of probabilities (n, C) for labels (n,) that hold all of 0..C-1; ROC AUC is one versus rest."""
    auc = roc_auc_score(y, p[:, 1]) if p.shape[1] == 2 else roc_auc_score(y, p, multi_class="ovr")
    return {
        "roc_auc": float(auc),
        "log_loss": float(log_loss(y, p, labels=np.arange(p.shape[1]))),
        "accuracy": float(accuracy_score(y, p.argmax(axis=1))),
        "calibration_error": calibration_error(y, p),
    }


def calibration_error(y: np.ndarray, p: np.ndarray) -> float:
    """Expected calibration error (arXiv 1706.04599): confidence minus accuracy in equal bins of the confidence."""
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, weights=confidence - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(y))


def by_task(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Means over splits: a row a task, a column a method, both in the order of the results."""
    table = results.pivot_table(metric, "data", "method", sort=False)
    return table[list(dict.fromkeys(results["method"]))]


def summarise(results: pd.DataFrame) -> pd.DataFrame:
    """A row a method: means over tasks, and how the first method compares with it.

    normalised_accuracy: 0 for the worst method on a task and 1 for the best (1 for all where they are equal)
    mean_rank: by ROC AUC, 1 is the best
    win_rate, win_low, win_high: share of tasks on which the first method has the higher ROC AUC, ties count half, with
        its Wilson interval
    lead, lead_low, lead_high: ROC AUC of the first method minus that of the method, with its bootstrap interval
    """
    summary = pd.DataFrame({metric: by_task(results, metric).mean() for metric in METRICS})
    accuracy, auc = by_task(results, "accuracy"), by_task(results, "roc_auc")
    low, high = accuracy.min(axis=1), accuracy.max(axis=1)
    summary["normalised_accuracy"] = accuracy.sub(low, axis=0).div(high - low, axis=0).fillna(1.0).mean()
    summary["mean_rank"] = auc.rank(axis=1, ascending=False).mean()
    first, *others = auc.columns
    for method in others:
        lead = (auc[first] - auc[method]).to_numpy()
        wins = np.mean((lead > 0) + 0.5 * (lead == 0))
        summary.loc[method, ["win_rate", "win_low", "win_high"]] = wins, *wilson(wins, len(lead))
        summary.loc[method, ["lead", "lead_low", "lead_high"]] = lead.mean(), *bootstrap(lead)
    return summary


def wilson(share: float, n: int) -> tuple[float, float]:
    """Confidence interval of a share among n (Wilson 1927)."""
    z = norm.ppf((1 + CONFIDENCE) / 2)
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Percentile confidence interval of the mean of values, resampled with a fixed seed."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    return tuple(np.quantile(drawn.mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]))


def by_bucket(results: pd.DataFrame, quantity: str, metric: str = "roc_auc") -> pd.DataFrame:
    """Means over the tasks of each bucket of rows, features or classes that holds any: a row a bucket."""
    edges = BUCKETS[quantity]
    sizes = results.drop_duplicates("data").set_index("data")[quantity]
    labels = [bucket_name(low, high) for low, high in zip([None, *edges], edges, strict=False)]
    buckets = pd.cut(sizes, [-math.inf, *edges], labels=labels)
    table = by_task(results, metric)
    means = table.groupby(buckets, observed=True).mean()
    means.insert(0, "tasks", buckets.value_counts())
    return means


def bucket_name(low: float | None, high: float) -> str:
    if low is None:
        return f"..{high}"
    return f"{low + 1}.." if high == math.inf else f"{low + 1}..{high}"
