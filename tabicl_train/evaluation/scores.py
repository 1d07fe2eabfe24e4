"""Scores of predictions, and their means over tasks, also as tables for the terminal.

Results are a data frame with a row per task, split and method: data, split, method, rows, labeled_rows, features,
seconds, trained_range (inside, outside or unknown), n_estimators (ensemble members, nan for methods that are no
networks), weights (which ones of the run, or NO_WEIGHTS for other methods), and for classification classes and the
CLASS_METRICS, for regression the NUMBER_METRICS. Files of earlier versions lack the column n_estimators.

Means are first over the splits of a task, so that all tasks have the same weight. Methods are judged by ROC AUC or by
R2; values of R2 below 0 count as 0, since otherwise a single task could decide a mean. What is paired, such as the lead
of one method over another, is in compare.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import accuracy_score, log_loss, r2_score, roc_auc_score, root_mean_squared_error

from priors.real.preprocessing import TargetScale
from tabicl_train.config.schema import INTERVAL, REAL_SCORES, judged_by
from tabicl_train.console import counted, one_line, text_table
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.model.quantiles import pinball
from tabicl_train.run.curves import INSIDE, OUTSIDE, UNKNOWN
from tabicl_train.weights.pretrained import TrainedRange

CLASS_METRICS = ("roc_auc", "log_loss", "accuracy", "calibration_error")
BINS = 10  # of the calibration error
NUMBER_METRICS = ("r2", "rmse", "pinball", "coverage", "width")
LEVELS = np.linspace(*INTERVAL, 9)  # 0.1, 0.2, ..., 0.9, of the pinball loss
MARGINAL = "marginal quantiles"  # the method that predicts those of the labeled rows
# In standard deviations of the target. On a task that a forest solves up to rounding, others have 1e14 times its RMSE.
LEAST_RMSE = 0.01
NO_WEIGHTS = "-"  # the weights of other methods
TABICL_PACKAGE = "tabicl package"  # the method that is a network, too
TASK_SCORES = {"roc_auc": ("roc_auc", "log_loss", "accuracy"), "r2": ("r2", "relative_rmse", "pinball", "coverage")}
FORMATS = {  # heading and format of each score
    "roc_auc": ("ROC AUC", ".4f"),
    "log_loss": ("log loss", ".3f"),
    "accuracy": ("accuracy", ".3f"),
    "normalized_accuracy": ("norm. accuracy", ".3f"),
    "calibration_error": ("calibration error", ".3f"),
    "r2": ("R2", ".3f"),
    "r2_median": ("median R2", ".3f"),
    "relative_rmse": ("RMSE to the best", ".3f"),
    "pinball": ("pinball loss", ".3f"),
    "width": ("width", ".2f"),
    "coverage": ("coverage", ".2f"),
}
BUCKETS = {  # the upper bound of each bucket
    "rows": [199, 499, 999, math.inf],
    "features": [5, 10, 20, math.inf],
    "classes": [2, 5, 10, math.inf],
}


def weights_of_first(results: pd.DataFrame) -> str | None:
    """Name the weights of the first method, the network; None for scores of earlier versions, which did not say."""
    if "weights" not in results:
        return None
    first = results["method"].iloc[0]
    return next(iter(results["weights"][results["method"] == first].dropna()), None)


def differing_members(networks: Mapping[str, pd.DataFrame]) -> str:
    """Warn of networks that were scored with other numbers of ensemble members than others.

    Eight members against one would look like a difference of the networks.

    Parameters
    ----------
    networks : mapping of str to DataFrame
        The rows of each network.

    Returns
    -------
    str
        A line with the numbers; "" if all are the same, or no table says it.
    """
    members = {}
    for name, rows in networks.items():
        members[name] = "not recorded"
        if "n_estimators" in rows and rows["n_estimators"].notna().any():
            members[name] = " and ".join(f"{number:g}" for number in rows["n_estimators"].dropna().unique())
    if len(set(members.values())) < 2:
        return ""
    listed = ", ".join(f"{name} {number}" for name, number in members.items())
    return f"the networks were not scored with the same number of ensemble members (n_estimators): {listed}"


def class_scores(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Compute CLASS_METRICS of probabilities p (n, C) for labels y (n,), all of which occur.

    ROC AUC is one versus rest.
    """
    auc = roc_auc_score(y, p[:, 1]) if p.shape[1] == 2 else roc_auc_score(y, p, multi_class="ovr")
    return {
        "roc_auc": float(auc),
        "log_loss": float(log_loss(y, p, labels=np.arange(p.shape[1]))),
        "accuracy": float(accuracy_score(y, p.argmax(axis=1))),
        "calibration_error": calibration_error(y, p),
    }


def calibration_error(y: np.ndarray, p: np.ndarray) -> float:
    """Compute the expected calibration error (arXiv 1706.04599) over equal bins of the confidence.

    It is the sum over bins of |sum of (confidence - correctness)| / n, for probabilities p (n, C) and labels y (n,).
    """
    # torchmetrics agrees to 1e-7, but takes 0.6 s to import, and applies a softmax if rounding has made a probability
    # larger than 1.
    confidence = p.max(axis=1)
    is_correct = p.argmax(axis=1) == y
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    errors = np.bincount(bins, weights=confidence - is_correct, minlength=BINS)
    return float(np.abs(errors).sum() / len(y))


def standardize(y: np.ndarray, labeled: np.ndarray) -> np.ndarray:
    """Standardize a target (rows,) by the rows at the indices `labeled`; raises ConfigError if these are all equal."""
    scale = TargetScale(y[labeled])
    if scale.std == 0:
        raise ConfigError([f"the target of all {len(labeled)} labeled rows of a split is {y[labeled][0]:g}"])
    return scale.standardize(y)


def score_numbers(y: np.ndarray, mean: np.ndarray, quantiles: np.ndarray | None) -> dict[str, float]:
    """Compute NUMBER_METRICS of predictions.

    Parameters
    ----------
    y : ndarray
        (rows,), targets as `standardize` returns them.
    mean : ndarray
        (rows,), the predicted means.
    quantiles : ndarray, optional
        (rows, levels), the predicted quantiles at LEVELS.

    Returns
    -------
    dict of str to float
        r2 and rmse of the mean. Of the quantiles, nan without them: pinball, the mean over them; coverage, the share of
        targets from the first to the last one; width, the mean distance between these two.
    """
    scores = dict.fromkeys(NUMBER_METRICS, float("nan"))
    scores |= {"r2": float(r2_score(y, mean)), "rmse": float(root_mean_squared_error(y, mean))}
    if quantiles is not None:
        low = quantiles[:, 0]
        high = quantiles[:, -1]
        scores["pinball"] = pinball(torch.from_numpy(quantiles), torch.from_numpy(y)).mean().item()
        scores["coverage"] = float(np.mean((low <= y) & (y <= high)))
        scores["width"] = float(np.mean(high - low))
    return scores


def by_task(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Average over splits: a row per task, a column per method, both in the order of the results."""
    means = results.groupby(["data", "method"])[metric].mean().unstack()
    return means.loc[list(dict.fromkeys(results["data"])), list(dict.fromkeys(results["method"]))]


def judged(results: pd.DataFrame) -> pd.DataFrame:
    """Return the scores by which methods are judged, as `by_task` does: ROC AUC, or R2, at least 0."""
    return by_task(results, judged_by(results)).clip(lower=0)


def relative_rmse(results: pd.DataFrame) -> pd.DataFrame:
    """Divide RMSE by that of the best method of the task, as in by_task; values below LEAST_RMSE count as it."""
    rmse = by_task(results, "rmse").clip(lower=LEAST_RMSE)
    return rmse.div(rmse.min(axis=1), axis=0)


def summarize(results: pd.DataFrame) -> pd.DataFrame:
    """Average scores over tasks.

    Parameters
    ----------
    results : DataFrame
        As described at the top.

    Returns
    -------
    DataFrame
        A row per method. Of classification CLASS_METRICS, and normalized_accuracy, which is 0 for the worst method on a
        task and 1 for the best (1 for all if they are equal). Of regression r2 and r2_median (R2 below 0 counts as 0),
        relative_rmse (RMSE divided by that of the best method of the task, both at least LEAST_RMSE), pinball,
        width and coverage, with coverage_low and coverage_high, its 95 % confidence interval over tasks.
    """
    if "roc_auc" in results:
        summary = pd.DataFrame({metric: by_task(results, metric).mean() for metric in CLASS_METRICS})
        accuracy = by_task(results, "accuracy")
        low = accuracy.min(axis=1)
        high = accuracy.max(axis=1)
        summary["normalized_accuracy"] = accuracy.sub(low, axis=0).div(high - low, axis=0).fillna(1.0).mean()
        return summary
    summary = pd.DataFrame({metric: by_task(results, metric).mean() for metric in ("pinball", "width", "coverage")})
    table = judged(results)
    summary = summary.assign(r2=table.mean(), r2_median=table.median(), relative_rmse=relative_rmse(results).mean())
    for method, coverage in by_task(results, "coverage").items():
        found = mean_interval(coverage.to_numpy(), 0, 1)
        summary.loc[method, ["coverage_low", "coverage_high"]] = found.low, found.high
    return summary


def summary_table(results: pd.DataFrame) -> pd.DataFrame:
    """Return the means over tasks as text: a row per method; a mean and its interval are one cell."""
    summary = summarize(results)
    columns = {}
    for name, (heading, form) in FORMATS.items():
        if name not in summary:
            continue
        texts = [score_cell(value, form) for value in summary[name]]
        if f"{name}_low" in summary:
            ends = zip(summary[f"{name}_low"], summary[f"{name}_high"], strict=True)
            intervals = ["" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]" for low, high in ends]
            texts = [text + interval for text, interval in zip(texts, intervals, strict=True)]
        columns[heading] = texts
    return pd.DataFrame(columns, index=summary.index)


def ranked(results: pd.DataFrame) -> pd.Series:
    """Average over tasks, by method, the best first, without the marginal quantiles, a trivial method."""
    return judged(results).mean().drop(MARGINAL, errors="ignore").sort_values(ascending=False, kind="stable")


def standing(results: pd.DataFrame, kind: str = "real task") -> str:
    """Describe in a line which methods the first one is above, level with (to three digits) and below."""
    means = ranked(results).round(3)
    first = results["method"].iloc[0]
    others = means.drop(first)
    groups = []
    for words, sign in (("above", 1), ("level with", 0), ("below", -1)):
        group = others[np.sign(means[first] - others) == sign]
        if len(group):
            *most, last = [f"{name} {mean:.3f}" for name, mean in group.items()]
            listed = f"{', '.join(most)} and {last}" if most else last
            groups.append(f"{words} {listed}")
    tasks = counted(results["data"].nunique(), kind)
    return f"mean {REAL_SCORES[judged_by(results)]} {means[first]:.3f} on {tasks}: {', '.join(groups)}"


def by_bucket(results: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Count and average tasks by rows, features or classes: a row per bucket that has any task."""
    edges = BUCKETS[quantity]
    sizes = results.drop_duplicates("data").set_index("data")[quantity]
    labels = [bucket_name(low, high) for low, high in zip([None, *edges], edges, strict=False)]
    buckets = pd.cut(sizes, [-math.inf, *edges], labels=labels)
    means = judged(results).groupby(buckets, observed=True).mean()
    means.insert(0, "tasks", buckets.value_counts())
    return means


def bucket_name(low: float | None, high: float) -> str:
    if low is None:
        return f"up to {high}"
    return f"{low + 1} or more" if high == math.inf else f"{low + 1} to {high}"


def scores_as_text(
    results: pd.DataFrame,
    trained: TrainedRange | None,
    elsewhere: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    kind: str = "real task",
) -> str:
    """Format scores for the terminal.

    Tasks outside the range that the network was trained on are in a separate table, and do not count in the means by
    size. The means at the end are of all tasks, then of those inside; the last line is the standing of the first
    method.

    Parameters
    ----------
    results : DataFrame
        As described at the top.
    trained : TrainedRange, optional
        The range, for the headings.
    elsewhere : mapping of str to tuple of str
        The other suites in which a task is; with such tasks the means without them are given, too.
    kind : str
        What a task is called.

    Returns
    -------
    str
        Tables of tasks, of means by rows, features and classes, and of the means of each method.
    """
    # A table of the tasks inside, and one of those outside.
    headings = {
        UNKNOWN: "The checkpoint does not record which tables its network was trained on; that of a run does.",
        INSIDE: f"Inside the trained range ({trained}):",
        OUTSIDE: f"Outside the trained range ({trained}), where the network extrapolates:",
    }
    groups = dict(list(results.groupby("trained_range")))
    parts = []
    for name, heading in headings.items():
        if name in groups:
            parts += [heading, tasks_text(groups[name])]

    # Means by size.
    has_both = len(groups) > 1
    which = " inside" if has_both else ""
    for quantity in BUCKETS:
        if quantity in results:
            parts.append(bucket_text(groups[INSIDE] if has_both else results, quantity, which))

    # Means of all tasks.
    parts.append(summary_text(results))
    if has_both:
        parts.append(summary_text(groups[INSIDE], which))
    if suites := {name for names in elsewhere.values() for name in names}:
        only_here = results[~results["data"].isin(elsewhere)]
        if not only_here.empty:
            parts.append(summary_text(only_here, f" that are not in {', '.join(sorted(suites))}"))
    parts.append(one_line(standing(results, kind)))
    return "\n\n".join(parts)


def tasks_text(results: pd.DataFrame) -> str:
    """Format the TASK_SCORES of each task and method, and their means, in which R2 below 0 counts as 0."""
    # The numbers.
    by = judged_by(results)
    tables = {}  # of each score: a row per task, a column per method
    means = {}  # of each score, by method
    headings = []
    formats = []
    for name in TASK_SCORES[by]:
        tables[name] = relative_rmse(results) if name == "relative_rmse" else by_task(results, name)
        means[name] = judged(results).mean() if name == by else tables[name].mean()
        heading, form = FORMATS[name]
        headings.append(heading)
        formats.append(form)

    # A line for each task and method, then the means.
    tasks = tables[by].index
    methods = tables[by].columns
    lines = []
    for task in tasks:
        for method in methods:
            values = [table.loc[task, method] for table in tables.values()]
            lines.append([task, method, *map(score_cell, values, formats)])
    for method in methods:
        values = [means_of_score[method] for means_of_score in means.values()]
        lines.append(["mean", method, *map(score_cell, values, formats)])
    return text_table(["task", "method", *headings], lines)


def score_cell(value: float, form: str) -> str:
    """Format a number, nan as a dash, and a long one with few digits, since an R2 may be -1e30."""
    if math.isnan(value):
        return "-"
    text = f"{value:{form}}"
    return text if len(text) <= 9 else f"{value:.0e}"


def bucket_text(results: pd.DataFrame, quantity: str, which: str) -> str:
    """Format means over tasks by a quantity; which: an addition to the heading."""
    table = by_bucket(results, quantity)
    title = f"{REAL_SCORES[judged_by(results)]} by {quantity}{which}"
    lines = []
    for bucket, (tasks, *values) in zip(table.index, table.itertuples(index=False), strict=True):
        lines.append([bucket, tasks, *(f"{value:.4f}" for value in values)])
    return text_table([title, *table], lines)


def summary_text(results: pd.DataFrame, which: str = "") -> str:
    """Format means over tasks, a line per method; which: an addition to the heading."""
    title = f"means of {counted(results['data'].nunique(), 'task')}{which}"
    table = summary_table(results).rename_axis(title).reset_index()
    return text_table(table.columns, table.to_numpy())
