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

from tabicl_train.config.checks import at_least
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.evaluation.baselines import BASELINES, public_client
from tabicl_train.evaluation.scores import BUCKETS, METRICS, by_bucket, by_task, score, summarise
from tabicl_train.evaluation.suites import Task, sources
from tabicl_train.evaluation.trained_range import TrainedRange, trained_range
from tabicl_train.model import TabICL
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.export import build_model, weights_of
from tabicl_train.run_dir.checkpoint import load
from tabicl_train.run_dir.console import first_line, tell
from tabicl_train.run_dir.outputs import output_problems
from tabicl_train.run_dir.records import Records

QUERY_SHARE = 0.3
HERE = "this model"


def evaluate(
    checkpoint: str,
    suite: str = EvaluateOptions.suite,
    folder: str | None = None,
    splits: int = EvaluateOptions.splits,
    rows: int = EvaluateOptions.rows,
    n_estimators: int = EvaluateOptions.n_estimators,
    client_weights: str | None = None,
    output: str | None = None,
    figure: str | None = None,
) -> pd.DataFrame:
    """Score a checkpoint on a suite; prints tables, and writes the results to a CSV file and a picture if asked.

    A task that cannot be read or scored is reported and left out. The CSV file holds all tasks scored so far, whenever
    the process is killed. Exits with 1 if the evaluation was interrupted or a file could not be written in the end.

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
    problems += output_problems("output", output) + output_problems("figure", figure)
    if figure is not None:
        require_matplotlib()
        from tabicl_train.evaluation.scores_figure import save_figure, unknown_format

        problems += unknown_format(figure)
    if problems:
        raise ConfigError(problems)
    tasks = sources(suite, folder)
    path, content = load(checkpoint)
    network, trained = build_model(*weights_of(path, content)), trained_range(content)
    methods = competitors(network, n_estimators, client_weights)

    scores: list[dict] = []
    left_out: list[str] = []
    errors: list[str] = []
    csv, records = "", Records(Path(output or ".").resolve().parent)
    try:
        for source in (bar := tqdm(tasks, unit="task", file=sys.stderr)):
            try:
                of_task = score_task(source.load(rows), methods, splits)
            except Exception as error:  # of reading, or of a method; the other tasks are worth more than a stack trace
                kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
                left_out.append(f"warning   {source.name} is left out: {kind}{first_line(error)}")
                bar.write(left_out[-1], file=sys.stderr)
                continue
            scores += [row | {"trained_range": side(trained, row)} for row in of_task]
            if output is not None:
                csv = pd.DataFrame(scores).to_csv(index=False)
                records.replace(Path(output).name, csv)
    except KeyboardInterrupt:
        errors.append(f"interrupted; {len({row['data'] for row in scores})} of {len(tasks)} tasks are scored")
    if not scores:
        raise ConfigError(errors or ["no task could be scored"])

    results = pd.DataFrame(scores)
    print(as_text(results, trained))
    for line in left_out:
        tell(line)
    if output is not None and not (Path(output).is_file() and Path(output).read_text() == csv):
        errors.append(f"{output} could not be written and lacks scores")
    if figure is not None:
        try:
            save_figure(results, Path(figure))
        except OSError as error:
            errors.append(f"{figure} could not be written: {first_line(error)}")
    if errors:
        sys.exit("\n".join(f"error: {error}" for error in errors))
    return results


def competitors(
    network: TabICL, n_estimators: int, client_weights: str | None
) -> dict[str, Callable[[], ClassifierMixin]]:
    """What makes an estimator of each method; raises ConfigError if the public client is needed and not installed."""
    methods = {HERE: lambda: TabICLClassifier(network, n_estimators=n_estimators), **BASELINES}
    if client_weights is not None:
        public_client(client_weights, n_estimators)
        methods["public client"] = lambda: public_client(client_weights, n_estimators)
    return methods


def side(trained: TrainedRange | None, row: dict) -> str:
    """The column trained_range of a row of results."""
    if trained is None:
        return "unknown"
    return "inside" if trained.holds(row["labelled_rows"], row["features"]) else "outside"


def score_task(task: Task, methods: dict[str, Callable[[], ClassifierMixin]], splits: int) -> list[dict]:
    """A row a split and method."""
    splitter = StratifiedShuffleSplit(splits, test_size=QUERY_SHARE, random_state=0)
    rows = []
    for split, (train, query) in enumerate(splitter.split(task.X, task.y)):
        sizes = {
            "rows": len(task.X),
            "labelled_rows": len(train),
            "features": task.X.shape[1],
            "classes": int(task.y.max()) + 1,
        }
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


def as_text(results: pd.DataFrame, trained: TrainedRange | None) -> str:
    """Tables of the tasks, of the methods, and by rows, features and classes.

    Tasks outside the range that the network was trained on have a table of their own; the means at the end are of all
    tasks, then of those inside.
    """
    headings = {
        "unknown": "The checkpoint does not say which tables its network was trained on; that of a run does.",
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


def summary_text(results: pd.DataFrame, which: str = "") -> str:
    tasks = results["data"].nunique()
    title = f"means of {tasks} task{'s' if tasks > 1 else ''}{which}"
    lines = [
        f"{title:24}{'ROC AUC':>9}{'log loss':>10}{'acc.':>7}{'norm. acc.':>12}{'calib. err.':>13}"
        f"{'rank':>7}{HERE + ' wins':>23}{'and leads by (ROC AUC)':>29}"
    ]
    for method, row in summarise(results).iterrows():
        line = (
            f"{method:24}{row.roc_auc:9.4f}{row.log_loss:10.3f}{row.accuracy:7.3f}{row.normalised_accuracy:12.3f}"
            f"{row.calibration_error:13.3f}{row.mean_rank:7.2f}"
        )
        if method != HERE:
            wins = f"{row.win_rate:.2f} [{row.win_low:.2f}, {row.win_high:.2f}]"
            lead = f"{row.lead:+.3f} [{row.lead_low:+.3f}, {row.lead_high:+.3f}]"
            line += f"{wins:>23}{lead:>29}"
        lines.append(line)
    return "\n".join(lines)
