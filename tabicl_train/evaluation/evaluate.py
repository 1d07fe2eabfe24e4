"""Scores of a network on real data, and of baselines on the same splits."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from tqdm import tqdm

from priors.options import check
from priors.real.csv_format import csv_format, format_problems
from priors.real.files import TASKS
from priors.real.identifiers import IdentifierWarning
from tabicl_train.config.options import EvaluateOptions
from tabicl_train.console import counted, first_line, info, one_line, print_above_bar
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES, tabicl_package
from tabicl_train.evaluation.identity import identity, identity_changes
from tabicl_train.evaluation.scores import NO_WEIGHTS, TABICL_PACKAGE, scores_as_text
from tabicl_train.evaluation.suites import (
    DATA_PACKAGES,
    STORED_SCORES,
    Methods,
    Source,
    data_version,
    score_task,
    sources,
)
from tabicl_train.model.family import Network
from tabicl_train.outputs import existing_problems, input_problems, is_same, output_problems
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.run.checkpoint import is_run_checkpoint
from tabicl_train.run.curves import THIS_MODEL
from tabicl_train.run.records import Records, number
from tabicl_train.weights.choice import load_checkpoint, say_once
from tabicl_train.weights.pretrained import Pretrained, TrainedRange, position
from tabicl_train.weights.reader import build_model, files_of_weights, read_weights

WRITTEN = ("output", "figure")  # options that name a file to write
TEXTS = ("data", "method", "trained_range", "weights")  # columns of the results; a task may be called 61


def evaluate(options: EvaluateOptions) -> pd.DataFrame:
    """Score a checkpoint on a suite of tasks: print tables, and write a CSV file if asked to."""
    results, trained, tasks = score_checkpoint(options)
    elsewhere = {task.name: task.also_in for task in tasks if task.also_in}
    print(one_line(f"Weights of {THIS_MODEL}: {results['weights'].iloc[0]}"), end="\n\n")
    print(scores_as_text(results, trained, elsewhere, "probe" if options.suite == "probes" else "real task"))
    protocol = tasks[0].protocol
    if protocol is not None:
        print(protocol.remark(options.splits, options.rows, results["data"].nunique(), len(tasks)))
    return results


class Evaluation(NamedTuple):
    """What was scored."""

    results: pd.DataFrame  # as scores.py describes them
    trained_range: TrainedRange | None  # common to all networks that were scored
    tasks: list[Source]


def score_checkpoint(
    options: EvaluateOptions, baselines: Collection[str] | None = None, pretrained: Pretrained | None = None
) -> Evaluation:
    """Score a checkpoint, and write a CSV file if asked to.

    The CSV file is complete after each task. Until the end, NAME.unfinished in the same folder holds the settings of
    the command, which must be the same to continue.

    Parameters
    ----------
    options : EvaluateOptions
        The checkpoint, the suite, and where scores are written.
    baselines : collection of str, optional
        Names of the baselines to score on the same splits, by default all.
    pretrained : Pretrained, optional
        The weights, if they have been read.

    Returns
    -------
    Evaluation
        Without tasks that cannot be read or scored, which are skipped with a message.

    Raises
    ------
    ConfigError
        With all problems of the options, or if no task could be scored.
    """
    # What is scored.
    if problems := evaluation_problems(options):
        raise ConfigError(problems)
    if pretrained is None:
        pretrained = read_weights(options.checkpoint, options.weights)
    form = csv_format(options.separator, options.decimal, options.missing_words)
    tasks = sources(options.suite, options.folder, pretrained.config.is_regression, form, options.tasks)
    if problems := split_problems(options, tasks) + replaced_input_problems(options, tasks):
        raise ConfigError(problems)

    # The network, and the tables that it was trained for.
    network = build_model(pretrained)
    trained = pretrained.trained_range
    if options.tabicl_weights is not None:
        # With a second network, a task is inside if both networks were trained on tables of its size. The `tabicl`
        # package's own weights do not record what they were trained on.
        other = read_weights(options.tabicl_weights).trained_range
        if trained is not None and other is not None:
            trained = trained.common(other)

    # The other methods: those with stored scores are not fitted again.
    methods = competitors(network, options.n_estimators, options.tabicl_weights)
    stored = stored_scores(options, pretrained.config.is_regression)
    if baselines is not None:
        methods = {name: make for name, make in methods.items() if name == THIS_MODEL or name in baselines}
        stored = None if stored is None else stored[stored["method"].isin(baselines)]
    if stored is not None:
        methods = {name: make for name, make in methods.items() if name not in set(stored["method"])}
        if not stored.empty:
            warn_of_version(options.suite, pretrained.config.is_regression)

    # Task by task, after those that an earlier call has scored.
    output = None if options.output is None else Path(options.output).resolve()
    try:
        scores: list[dict] = []
        if output:
            scores = begin_output(output, options, identity(options, pretrained, tasks, baselines))
        if done := {row["data"] for row in scores}:
            info(f"{options.output}: continues after {counted(len(done), 'task')}")
        rest = [task for task in tasks if task.name not in done]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdentifierWarning)  # reading a folder names such columns
            for task_rows in score_tasks(rest, methods, options.rows, options.splits):
                if stored is not None:
                    task_rows += stored_rows(task_rows, stored)
                for row in task_rows:
                    row["trained_range"] = position(trained, row)
                    row["n_estimators"] = members_of_method(row["method"], options)
                    row["weights"] = weights_of_method(row["method"], pretrained)
                    scores.append(row)
                if output:
                    Records(output.parent).replace(output.name, pd.DataFrame(scores).to_csv(index=False))
        if not scores:
            raise ConfigError(["no task could be scored"])
    except OSError as error:  # a full disk
        raise ConfigError([f"{options.output} cannot be written: {error.strerror or first_line(error)}"]) from None

    results = pd.DataFrame(scores)
    if output:
        unfinished(output).unlink(missing_ok=True)
        info(f"scores of {results['data'].nunique()} of {counted(len(tasks), 'task')}: {options.output}")
    return Evaluation(results, trained, tasks)


def weights_of_method(method: str, pretrained: Pretrained) -> str:
    """Return the cell of the column `weights`."""
    return pretrained.name if method == THIS_MODEL else NO_WEIGHTS


def members_of_method(method: str, options: EvaluateOptions) -> float:
    """Return the cell of the column `n_estimators`."""
    return options.n_estimators if method in (THIS_MODEL, TABICL_PACKAGE) else float("nan")


def begin_output(output: Path, options: EvaluateOptions, settings: dict[str, Any]) -> list[dict]:
    """Return the rows that an earlier call of the same command has written, and write its `identity` next to them."""
    before = Records(output.parent).json(unfinished(output).name)
    if output.exists() and before == settings:
        rows = Records(output.parent).rows(output.name)  # pandas 2 rounds a third of the scores
        return [row_of_text(row) for row in rows]
    if output.exists() and not options.overwrite:
        held = "other scores or is finished"
        if before is not None:
            held = f"unfinished scores of something else ({'; '.join(identity_changes(before, settings))})"
        raise ConfigError([f"output is {options.output!r}, which holds {held}: set overwrite=true"])
    output.unlink(missing_ok=True)
    Records(output.parent).replace(unfinished(output).name, json.dumps(settings))
    return []


def row_of_text(row: dict[str, str]) -> dict[str, Any]:
    """Return a row of a CSV file with its numbers as such."""
    values: dict[str, Any] = {}
    for name, text in row.items():
        values[name] = text if name in TEXTS else number(text or "nan")
    return values


def unfinished(output: Path) -> Path:
    return output.with_name(f"{output.name}.unfinished")


def evaluation_problems(options: EvaluateOptions) -> list[str]:
    """List what is wrong with the options.

    What depends on the tasks is in `split_problems` and `replaced_input_problems`.
    """
    problems = check(options)
    if options.tabicl_weights is not None and not Path(options.tabicl_weights).is_file():
        problems.append(f"tabicl_weights is {options.tabicl_weights!r}; there is no such file")
    problems += format_problems(options.separator, options.decimal, options.missing_words)

    # Files to write.
    problems += output_problems("output", options.output)
    for first, second in itertools.combinations(WRITTEN, 2):
        path = getattr(options, second)
        if None not in (getattr(options, first), path) and is_same(getattr(options, first), path):
            problems.append(f"{second} is {path!r}, which is also the {first}; choose another name")
    problems += output_problems("figure", options.figure) or existing_problems(
        "figure", options.figure, options.overwrite
    )
    if options.figure is not None:
        require_matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if Path(options.figure).suffix.lower().removeprefix(".") not in formats:
            known = ", ".join("." + name for name in formats)
            problems.append(f"figure is {options.figure!r}; its name must end in one of {known}")
    return problems


def split_problems(options: EvaluateOptions, tasks: list[Source]) -> list[str]:
    """List the settings that the tasks of the suite do not take."""
    problems = []
    limits = [task.most_splits for task in tasks if task.most_splits is not None]
    if options.splits is not None and limits and options.splits > min(limits):
        problems.append(f"splits is {options.splits}; a task of suite={options.suite} has only {min(limits)}")
    if options.rows is not None and not all(task.takes_rows for task in tasks):
        problems.append(f"rows is {options.rows}; suite={options.suite} has its own numbers of rows")
    return problems


def replaced_input_problems(options: EvaluateOptions, tasks: list[Source]) -> list[str]:
    """List the options that name a file to write which is also an input of the evaluation, and would be replaced."""
    inputs: list[tuple[str, str | Path | None]] = [("tabicl_weights", options.tabicl_weights)]
    inputs += [("checkpoint", path) for path in files_of_weights(options.checkpoint)]
    inputs += [("folder", path) for task in tasks for path in task.files]
    if options.folder is not None:
        inputs.append(("folder", Path(options.folder, TASKS)))

    problems = []
    for name in WRITTEN:
        problems += input_problems(name, getattr(options, name), inputs)
    return problems


def competitors(network: Network, n_estimators: int, tabicl_weights: str | None) -> Methods:
    """List the methods to compare; raises ConfigError for weights that the `tabicl` package cannot use here."""
    numbers = network.config.is_regression
    estimator = TabICLRegressor if numbers else TabICLClassifier
    baselines = NUMBER_BASELINES if numbers else BASELINES
    methods = {THIS_MODEL: lambda: estimator(network, n_estimators=n_estimators), **baselines}
    if tabicl_weights is not None:
        tabicl_package(tabicl_weights, n_estimators, numbers)
        if read_weights(tabicl_weights).config.is_regression != numbers:
            kinds = "classes, but the checkpoint numbers" if numbers else "numbers, but the checkpoint classes"
            raise ConfigError([f"tabicl_weights is {tabicl_weights!r}; it predicts {kinds}"])
        if is_run_checkpoint(load_checkpoint(tabicl_weights)[1]):
            export = shlex.join(["tabicl-export", f"checkpoint={tabicl_weights}", "output=FILE.ckpt"])
            advice = f"is a checkpoint of a run, which the `tabicl` package does not read; export it: {export}"
            raise ConfigError([f"tabicl_weights {advice}"])
        methods[TABICL_PACKAGE] = lambda: tabicl_package(tabicl_weights, n_estimators, numbers)
    return methods


def stored_scores(options: EvaluateOptions, numbers: bool) -> pd.DataFrame | None:
    """Read stored scores of the baselines; None for another suite, more rows or more splits."""
    if options.suite not in STORED_SCORES:
        return None
    path = STORED_SCORES[options.suite][numbers]
    if not path.is_file():
        return None
    known = about_stored_scores(path)
    scores = pd.read_csv(path, skiprows=1)
    splits = known["splits"] if options.splits is None else options.splits  # stored are those of the defaults
    if options.rows not in (None, known["rows"]) or splits > known["splits"]:
        return None
    return scores[scores["split"] < splits]  # the first splits do not depend on their number


def about_stored_scores(path: Path) -> dict[str, Any]:
    """Return the first line of a file of stored scores: its splits, rows and versions of packages."""
    with open(path) as file:
        return json.loads(file.readline().removeprefix("#"))


def warn_of_version(suite: str, numbers: bool) -> None:
    """Say so if the stored scores of the baselines are of another version of the data than is installed."""
    installed = data_version(suite)
    if installed is None:
        return
    package = DATA_PACKAGES[suite]
    stored = about_stored_scores(STORED_SCORES[suite][numbers])["packages"][package]
    if installed != stored:
        are = f"the stored scores of the baselines are of {package} {stored}, and {installed} is installed"
        say_once(f"warning   {are}: splits may differ; tests/benchmarks/store_baselines.py fits them again")


def name_of_checkpoint(checkpoint: str) -> str:
    """Return the last part of a path without the ending of a file."""
    path = Path(checkpoint)
    if path.is_dir() or path.suffix not in (".csv", ".ckpt", ".pt", ".pth", ".safetensors"):
        return path.resolve().name if checkpoint in (".", "..") else path.name
    if path.stem in ("evaluation", "scores", "model", "best"):  # as the demo calls those in its run directory
        folder = path.resolve().parent
        return folder.parent.name if folder.name == "checkpoints" else folder.name
    return path.stem


def stored_rows(task_rows: list[dict], stored: pd.DataFrame) -> list[dict]:
    """Return the stored rows for the splits of a task, with its sizes."""
    sizes = pd.DataFrame(task_rows).filter(["data", "split", "rows", "labeled_rows", "features", "classes"])
    return sizes.drop_duplicates().merge(stored, on=["data", "split"]).to_dict("records")


def score_tasks(tasks: list[Source], methods: Methods, rows: int | None, splits: int | None) -> Iterator[list[dict]]:
    """Yield the rows of one task after another, and print a warning for a task that fails."""
    for source in tqdm(tasks, unit="task", file=sys.stderr):
        try:
            task = source.load(rows)
            scores = score_task(task, methods, splits) + task.known_scores(splits)
        except Exception as error:  # of any type, from reading or from a method
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            print_above_bar(f"warning   {source.name} is skipped: {kind}{first_line(error)}")
            continue
        yield scores
