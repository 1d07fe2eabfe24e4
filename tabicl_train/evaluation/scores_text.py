"""The comparison of methods over tasks, as tables for the terminal."""

from __future__ import annotations

import pandas as pd

from tabicl_train.evaluation.scores import BUCKETS, METRICS, by_bucket, by_task, summarize
from tabicl_train.prediction.trained_range import TrainedRange

THIS_MODEL = "this model"


def as_text(results: pd.DataFrame, trained: TrainedRange | None) -> str:
    """Tables of the tasks, by rows, features and classes, and of the means of each method.

    Tasks outside the range that the network was trained on have a table of their own. The means at the end are of all
    tasks, then of those inside.
    """
    headings = {
        "unknown": "The checkpoint does not say on which tables its network was trained; the checkpoint of a run does.",
        "inside": f"Inside the trained range ({trained}):",
        "outside": f"Outside the trained range ({trained}), where the network extrapolates:",
    }
    groups = dict(list(results.groupby("trained_range")))
    parts = [text for name in headings if name in groups for text in (headings[name], tasks_text(groups[name]))]
    parts += [bucket_text(results, quantity) for quantity in BUCKETS]
    parts.append(summary_text(results))
    if len(groups) > 1:
        parts.append(summary_text(groups["inside"], " inside"))
    return "\n\n".join(parts)


def tasks_text(results: pd.DataFrame) -> str:
    """ROC AUC, log loss and accuracy of every method: a line per task, and one of the means."""
    tables = {metric: by_task(results, metric) for metric in METRICS[:3]}
    methods = tables["roc_auc"].columns
    width = max(20, *(len(name) + 2 for name in tables["roc_auc"].index))
    lines = [" " * width + "".join(f"{method:>25}" for method in methods)]
    lines.append(" " * width + f"{'ROC AUC  log loss   acc.':>25}" * len(methods))
    for name in [*tables["roc_auc"].index, "mean"]:
        line = f"{name:{width}}"
        for method in methods:
            auc, loss, accuracy = ((t.mean() if name == "mean" else t.loc[name])[method] for t in tables.values())
            line += f"{auc:.4f}  {loss:8.3f}  {accuracy:.3f}".rjust(25)
        lines.append(line)
    return "\n".join(lines)


def bucket_text(results: pd.DataFrame, quantity: str) -> str:
    table = by_bucket(results, quantity)
    lines = [f"{'ROC AUC by ' + quantity:20}" + "".join(f"{column:>21}" for column in table)]
    for bucket, (tasks, *values) in zip(table.index, table.itertuples(index=False), strict=True):
        lines.append(f"{bucket:20}{tasks:>21}" + "".join(f"{value:>21.4f}" for value in values))
    return "\n".join(lines)


def summary_text(results: pd.DataFrame, which: str = "") -> str:
    """Means over tasks, a line per method; which: what the heading adds to "means of N tasks"."""
    tasks = results["data"].nunique()
    title = f"means of {tasks} task{'s' if tasks > 1 else ''}{which}"
    lines = [
        f"{title:24}{'ROC AUC':>9}{'log loss':>10}{'acc.':>7}{'norm. acc.':>12}{'calib. err.':>13}"
        f"{'rank':>7}{'win rate of ' + THIS_MODEL:>23}{'its lead in ROC AUC':>29}"
    ]
    for method, row in summarize(results).iterrows():
        line = (
            f"{method:24}{row.roc_auc:9.4f}{row.log_loss:10.3f}{row.accuracy:7.3f}{row.normalized_accuracy:12.3f}"
            f"{row.calibration_error:13.3f}{row.mean_rank:7.2f}"
        )
        if method != THIS_MODEL:
            wins = f"{row.win_rate:.2f} [{row.win_low:.2f}, {row.win_high:.2f}]"
            lead = f"{row.lead:+.3f} [{row.lead_low:+.3f}, {row.lead_high:+.3f}]"
            line += f"{wins:>23}{lead:>29}"
        lines.append(line)
    return "\n".join(lines)
