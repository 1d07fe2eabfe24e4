"""Scores on real data, beside baselines on the same splits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.model_selection import StratifiedShuffleSplit
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from tabicl_train.baselines import BASELINES, public_client
from tabicl_train.classifier import TabICLClassifier
from tabicl_train.config import ConfigError, at_least, require_matplotlib
from tabicl_train.export import load_model
from tabicl_train.scores import BUCKETS, METRICS, by_bucket, by_task, score, summarise
from tabicl_train.suites import Task, load_suite

QUERY_SHARE = 0.3
HERE = "this model"


def evaluate(
    checkpoint: str,
    suite: str = "sklearn",
    folder: str | None = None,
    splits: int = 3,
    rows: int = 1000,
    n_estimators: int = 8,
    client_weights: str | None = None,
    output: str | None = None,
    figure: str | None = None,
) -> pd.DataFrame:
    """Score a checkpoint on a suite; prints tables, and writes the results to a CSV file and a picture if asked.

    folder: of suite=folder
    splits: stratified 70/30 splits a task, over which each figure is averaged
    rows: the most that are used of a task
    n_estimators: of the classifier
    client_weights: a file with which the public client is measured as well
    returns: see `scores`
    """
    problems = at_least(1, splits=splits, n_estimators=n_estimators) + at_least(20, rows=rows)
    if client_weights is not None and not Path(client_weights).is_file():
        problems.append(f"client_weights is {client_weights!r}; there is no such file")
    if problems:
        raise ConfigError(problems)
    if figure is not None:
        require_matplotlib()
    network = load_model(checkpoint)
    methods: dict[str, Callable[[], ClassifierMixin]] = {
        HERE: lambda: TabICLClassifier(network, n_estimators=n_estimators),
        **BASELINES,
    }
    if client_weights is not None:
        methods["public client"] = lambda: public_client(client_weights, n_estimators)
    tasks = tqdm(load_suite(suite, folder, rows), unit="task", file=sys.stderr)
    results = pd.DataFrame([row for task in tasks for row in score_task(task, methods, splits)])
    print(as_text(results))
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        results.to_csv(output, index=False)
    if figure is not None:
        from tabicl_train.scores_figure import save_figure

        save_figure(results, Path(figure))
    return results


def score_task(task: Task, methods: dict[str, Callable[[], ClassifierMixin]], splits: int) -> list[dict]:
    """A row a split and method."""
    sizes = {"rows": len(task.X), "features": task.X.shape[1], "classes": int(task.y.max()) + 1}
    splitter = StratifiedShuffleSplit(splits, test_size=QUERY_SHARE, random_state=0)
    rows = []
    for split, (train, query) in enumerate(splitter.split(task.X, task.y)):
        for method, make in methods.items():
            started = time.perf_counter()
            # One thread: a second one that shares its core with another process made gradient boosting 20 times slower.
            with threadpool_limits(1 if method in BASELINES else None):
                model = make().fit(task.X.iloc[train], task.y[train])
                p = model.predict_proba(task.X.iloc[query])
            seconds = time.perf_counter() - started
            scores = score(task.y[query], p)
            rows.append({"data": task.name, "split": split, "method": method, **sizes, **scores, "seconds": seconds})
    return rows


def as_text(results: pd.DataFrame) -> str:
    """Tables of the tasks, of the methods, and by rows, features and classes."""
    return "\n\n".join(
        [tasks_text(results), *(bucket_text(results, quantity) for quantity in BUCKETS), summary_text(results)]
    )


def tasks_text(results: pd.DataFrame) -> str:
    """ROC AUC, log loss and accuracy, a line a task and one of means."""
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


def summary_text(results: pd.DataFrame) -> str:
    tasks = results["data"].nunique()
    lines = [
        f"{f'means of {tasks} tasks':20}{'ROC AUC':>9}{'log loss':>10}{'acc.':>7}{'norm. acc.':>12}{'calib. err.':>13}"
        f"{'rank':>7}{HERE + ' wins':>23}{'and leads by (ROC AUC)':>29}"
    ]
    for method, row in summarise(results).iterrows():
        line = (
            f"{method:20}{row.roc_auc:9.4f}{row.log_loss:10.3f}{row.accuracy:7.3f}{row.normalised_accuracy:12.3f}"
            f"{row.calibration_error:13.3f}{row.mean_rank:7.2f}"
        )
        if method != HERE:
            wins = f"{row.win_rate:.2f} [{row.win_low:.2f}, {row.win_high:.2f}]"
            lead = f"{row.lead:+.3f} [{row.lead_low:+.3f}, {row.lead_high:+.3f}]"
            line += f"{wins:>23}{lead:>29}"
        lines.append(line)
    return "\n".join(lines)
