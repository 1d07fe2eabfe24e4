"""Does graph_scm draw from the distribution of the released generator? A classifier tries to tell their tables apart.

    python tests/benchmarks/compare_graph_scm.py [tables=1000] [rows=1024] [task=classification]

Prints each statistic of both with its Kolmogorov-Smirnov distance, and the cross-validated ROC AUC of a
gradient-boosted classifier on all statistics. 0.5 means that they are indistinguishable.
"""

from __future__ import annotations

import sys
from itertools import islice

import numpy as np
import torch
from generators import PlainTable, own_tables, released_tables
from scipy.stats import ks_2samp
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingClassifier
from sklearn.inspection import permutation_importance
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.tree import DecisionTreeClassifier

from priors import build_prior

FEW = 32  # columns with at most this many different values count as discrete


def skill(model, X: np.ndarray, y: np.ndarray) -> float:
    """Return the skill of a model on the second half of the rows after a fit to the first half.

    It is (accuracy - share) / (1 - share), where share is that of the most frequent class.
    """
    half = len(y) // 2
    base = np.bincount(y).max() / len(y)
    if len(np.unique(y[:half])) < 2:
        return 0.0
    return ((model.fit(X[:half], y[:half]).predict(X[half:]) == y[half:]).mean() - base) / (1 - base)


def statistics(table: PlainTable) -> dict[str, float]:
    """Return the statistics of a table that are compared."""
    X, y, _ = table
    Z = (X - X.mean(0)) / X.std(0).clip(1e-9)
    target_statistics = class_statistics(X, Z, y) if y.dtype == np.int64 else number_statistics(X, Z, y)
    return feature_statistics(X, Z) | target_statistics


def feature_statistics(X: np.ndarray, Z: np.ndarray) -> dict[str, float]:
    """Return the statistics of X (N, M) and of the standardized Z (N, M)."""
    # Discrete columns, and whether their values are evenly spaced.
    num_rows, num_features = X.shape
    distinct = np.array([len(np.unique(column)) for column in X.T])
    discrete = distinct <= FEW
    steps = [np.diff(np.unique(column)) for column in X.T[discrete & (distinct > 2)]]
    even = [step.max() < 1.01 * step.min() for step in steps]
    mode_share = np.array([np.unique(column, return_counts=True)[1].max() / num_rows for column in X.T])

    # Shapes of the distributions, and dependence between at most 40 columns.
    kurtosis, skewness = (Z**4).mean(0), np.abs((Z**3).mean(0))
    kept = np.linspace(0, num_features - 1, min(num_features, 40)).astype(int)
    correlation = np.abs(np.corrcoef(Z[:, kept].T).reshape(len(kept), -1)[np.triu_indices(len(kept), 1)])
    ranks = Z[:, kept].argsort(0).argsort(0)
    rank_correlation = np.abs(np.corrcoef(ranks.T).reshape(len(kept), -1)[np.triu_indices(len(kept), 1)])
    if not len(correlation):
        correlation = rank_correlation = np.zeros(1)
    eigenvalues = np.linalg.eigvalsh(Z[:, kept].T @ Z[:, kept] / num_rows)
    continuous = Z[:, ~discrete]
    quantiles = np.quantile(continuous, [0.01, 0.25, 0.75, 0.99], axis=0) if continuous.size else np.zeros((4, 1))
    return {
        "features": num_features,
        "discrete": discrete.mean(),
        "binary": (distinct == 2).mean(),
        "cardinality_mean": distinct[discrete].mean() if discrete.any() else 0,
        "cardinality_max": distinct[discrete].max() if discrete.any() else 0,
        "cardinality_evenly_spaced": np.mean(even) if even else -1,
        "distinct_continuous": distinct[~discrete].mean() / num_rows if continuous.size else 0,
        "mode_share_mean": mode_share.mean(),
        "mode_share_max": mode_share.max(),
        "kurtosis_median": np.log1p(np.median(kurtosis)),
        "kurtosis_max": np.log1p(kurtosis.max()),
        "kurtosis_min": np.log1p(kurtosis.min()),
        "skewness_median": np.median(skewness),
        "skewness_max": skewness.max(),
        "outliers": (np.abs(Z) > 4).mean(),
        "low_tail": np.mean(quantiles[0]),
        "high_tail": np.mean(quantiles[3]),
        "inner_range": np.mean(quantiles[2] - quantiles[1]),
        "inner_range_spread": np.std(quantiles[2] - quantiles[1]),
        "correlation_mean": correlation.mean(),
        "correlation_max": correlation.max(),
        "correlation_spread": correlation.std(),
        "rank_correlation_mean": rank_correlation.mean(),
        "copies": (correlation > 0.999).mean(),
        "effective_rank": eigenvalues.sum() ** 2 / (eigenvalues**2).sum() / len(kept),
        "duplicate_rows": 1 - len(np.unique(X, axis=0)) / num_rows,
    }


def class_statistics(X: np.ndarray, Z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the statistics of labels y (N,), and of how they depend on X (N, M)."""
    labels, y, counts = np.unique(y, return_inverse=True, return_counts=True)
    shares = counts / len(y)
    class_means = np.stack([Z[y == k].mean(0) for k in range(len(labels))])
    explained = (shares[:, None] * class_means**2).sum(0)  # share of each feature's variance between classes, (M,)
    return {
        "classes": len(labels),
        "classes_missing": labels.max() + 1 - len(labels),
        "class_entropy": -(shares * np.log(shares)).sum() / np.log(len(labels)),
        "class_min": shares.min(),
        "class_max": shares.max(),
        "explained_mean": explained.mean(),
        "explained_max": explained.max(),
        "explained_spread": explained.std(),
        "neighbor_skill": skill(KNeighborsClassifier(1), X, y),
        "tree_skill": skill(DecisionTreeClassifier(max_depth=4, random_state=0), X, y),
        "linear_skill": skill(RidgeClassifier(), X, y),
    }


def number_statistics(X: np.ndarray, Z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the statistics of a numeric target y (N,), and of how it depends on X (N, M)."""
    # Correlations of the standardized target and of its ranks, and what trees can predict.
    z = (y - y.mean(dtype=float)) / y.std(dtype=float)
    counts = np.unique(y, return_counts=True)[1]
    correlation = np.abs(z @ Z) / len(z)
    ranks, rank = Z.argsort(0).argsort(0), z.argsort().argsort()
    rank_correlation = np.abs(np.corrcoef(ranks.T, rank)[-1, :-1])
    trees = ExtraTreesRegressor(50, max_depth=6, bootstrap=True, oob_score=True, random_state=0).fit(X, z)
    return {
        "target_std": y.std(ddof=1, dtype=float),
        "target_skewness": (z**3).mean(),
        "target_skewness_size": np.abs((z**3).mean()),
        "target_kurtosis": np.log1p((z**4).mean()),
        "target_distinct": len(counts) / len(z),
        "target_mode_share": counts.max() / len(z),
        "target_lowest": z.min(),
        "target_highest": z.max(),
        "target_quantile_05": np.quantile(z, 0.05),
        "target_median": np.median(z),
        "target_quantile_95": np.quantile(z, 0.95),
        "target_inner_range": np.quantile(z, 0.75) - np.quantile(z, 0.25),
        "target_outliers": (np.abs(z) > 3).mean(),
        "target_correlation_max": correlation.max(),
        "target_correlation_mean": correlation.mean(),
        "target_rank_correlation_max": rank_correlation.max(),
        "target_rank_correlation_spread": rank_correlation.std(),
        "out_of_bag_r2": trees.oob_score_,
        "neighbor_r2": r2(KNeighborsRegressor(5), X, z),
        "linear_r2": r2(Ridge(), X, z),
    }


def r2(model, X: np.ndarray, y: np.ndarray) -> float:
    """Return R2 on the second half of the rows after a fit to the first half, at least -1."""
    half = len(y) // 2
    error = np.square(model.fit(X[:half], y[:half]).predict(X[half:]) - y[half:]).sum()
    return max(1 - error / max(np.square(y[half:] - y[half:].mean()).sum(), 1e-9), -1.0)


def tell_apart(ours: np.ndarray, released: np.ndarray) -> tuple[float, np.ndarray]:
    """Train a classifier to tell statistics of both apart, (tables, statistics) each.

    Returns its cross-validated ROC AUC, and the importance of each statistic.
    """
    X = np.concatenate([ours, released])
    y = np.repeat([0, 1], [len(ours), len(released)])
    model = HistGradientBoostingClassifier(max_iter=100, learning_rate=0.05, max_leaf_nodes=8, random_state=0)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    auc = cross_val_score(model, X, y, cv=folds, scoring="roc_auc").mean()
    train, test = next(folds.split(X, y))
    importance = permutation_importance(
        model.fit(X[train], y[train]), X[test], y[test], scoring="roc_auc", n_repeats=3, random_state=0
    )
    return float(auc), importance.importances_mean


def report(ours: list[dict[str, float]], released: list[dict[str, float]]) -> float:
    names = list(ours[0])
    # Rounded, since the last bits of a sum depend on its order and must not tell both apart.
    a, b = (np.round([[row[name] for name in names] for row in rows], 4) for rows in (ours, released))
    auc, importance = tell_apart(a, b)
    print(f"{'statistic':28} {'ours: mean, quartiles':34} {'released':34} {'KS':>5} {'p':>7} importance")
    for i, name in enumerate(names):
        test = ks_2samp(a[:, i], b[:, i])
        sides = [
            f"{v.mean():8.3f} " + " ".join(f"{q:8.3f}" for q in np.quantile(v, [0.25, 0.5, 0.75]))
            for v in (a[:, i], b[:, i])
        ]
        print(f"{name:28} {sides[0]} {sides[1]} {test.statistic:5.3f} {test.pvalue:7.0e} {importance[i]:.3f}")
    print(f"ROC AUC {auc:.3f} on {len(a)} against {len(b)} tables")
    return auc


if __name__ == "__main__":
    args = dict(argument.split("=") for argument in sys.argv[1:])
    tables, rows = int(args.get("tables", 1000)), int(args.get("rows", 1024))
    torch.set_num_threads(1)
    prior = build_prior("graph_scm", preset="released")
    max_classes = {"classification": 10, "regression": 0}[args.get("task", "classification")]
    ours = own_tables(prior, rows, max_classes=max_classes)
    released = released_tables("graph_scm", rows, max_classes=max_classes)
    report(*([statistics(table) for table in islice(side, tables)] for side in (ours, released)))
