"""From a table on the disk to a training table: rows, target and columns are drawn, and prepared as an estimator would.

Nothing about a column is fitted on query rows.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from priors.finish import Rejected, split_rows, standardize_target
from priors.real.features import FeatureEncoder
from priors.real.files import Column
from priors.real.index import Entry, read_table
from priors.real.normalize import Normalizer
from priors.real.tasks import FEW_VALUES, RealTask
from priors.table import PriorError, Table, TableSpec

OWN_TARGET = 0.5  # probability that a draw predicts the table's own target, if it can; else another column of it
NORM_METHODS = ("none", "power")  # those of an estimator by default
MIN_CLASS_ROWS = 4  # of a drawn table: with fewer, a class often misses among the labeled or the query rows


class TableCache:
    """The columns of the tables of a folder, of which those used last stay in memory; most_bytes: that they may take"""

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder, self.most_bytes, self.bytes = folder, most_bytes, 0
        self.held: OrderedDict[str, dict[str, Column]] = OrderedDict()

    def columns(self, entry: Entry) -> dict[str, Column]:
        """What read_columns returns."""
        if entry.path not in self.held:
            self.held[entry.path] = read_columns(self.folder, entry)
            self.bytes += size_of(self.held[entry.path])
        self.held.move_to_end(entry.path)
        columns = self.held[entry.path]
        while self.bytes > self.most_bytes:
            self.bytes -= size_of(self.held.popitem(last=False)[1])
        return columns


def read_columns(folder: Path, entry: Entry) -> dict[str, Column]:
    """The columns of a file by name; raises PriorError if it is not the file that the index knows."""
    path = folder / entry.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PriorError(f"{path} cannot be read any more: {error}") from None
    if blake2b(content, digest_size=16).hexdigest() != entry.hash:
        raise PriorError(
            f"{path} has changed since it was indexed, and draws from it would be others than before: "
            "restore it, or `touch` it and begin another run"
        )
    return read_table(content, entry.path).columns


def size_of(columns: dict[str, Column]) -> int:
    """Bytes of the values; 100 for each different text."""
    return sum(
        column.codes.nbytes + 100 * len(column.categories) if isinstance(column, pd.Categorical) else column.nbytes
        for column in columns.values()
    )


@dataclass
class TablePlan:
    """What was drawn of a table; target: the column, and what was made of it"""

    task: RealTask
    rows: np.ndarray
    features: list[str]
    target: str
    norm_method: str

    def __str__(self) -> str:
        rows = f"{len(self.rows)} of {self.task.entry.rows} rows"
        columns = f"{len(self.features)} columns ({', '.join(self.features)})"
        return f"tables {self.task.entry.path}: {rows}, {columns}, normalization {self.norm_method}; {self.target}"


def draw_table(task: RealTask, columns: dict[str, Column], spec: TableSpec, rng: np.random.Generator) -> Table:
    """A table of spec.num_rows rows of a task; raises Rejected."""
    target = draw_target(task, spec, rng)
    values = columns[target]
    rows = rng.choice(known_rows(values), spec.num_rows, replace=False)
    train_size = spec.train_size
    if spec.max_classes == 0:
        y, num_classes, made = standardize_target(torch.from_numpy(values[rows])), 0, "numeric target"
    else:
        is_category = any(facts.name == target and task.is_category(facts) for facts in task.columns)
        labels, made = draw_classes(values[rows], is_category, spec.max_classes, rng)
        num_classes = int(labels.max()) + 1
        order = split_rows(labels, num_classes, train_size, rng)
        rows, labels = (rows, labels) if order is None else (rows[order], labels[order])
        y = torch.from_numpy(rng.permutation(num_classes)[labels])
    others = [facts.name for facts in task.columns if facts.name != target]
    features = [others[j] for j in rng.permutation(len(others))[: spec.num_features]]
    frame = frame_of(task, columns, features, rows)
    norm_method = str(rng.choice(NORM_METHODS))
    X = torch.from_numpy(prepare(frame, train_size, norm_method, spec.keeps_missing))
    plan = TablePlan(task, rows, features, f"{made}: {target}", norm_method)
    missing = float(frame.isna().to_numpy().mean())
    return Table(X, y, train_size, num_classes, plan=plan, missing=missing)


def known_rows(values: Column) -> np.ndarray:
    """Numbers of the rows in which a column has a value."""
    return np.flatnonzero(values.codes >= 0 if isinstance(values, pd.Categorical) else ~np.isnan(values))


def frame_of(task: RealTask, columns: dict[str, Column], features: list[str], rows: np.ndarray) -> pd.DataFrame:
    """Some columns and rows of a table as an estimator takes them."""
    return pd.DataFrame(
        {
            name: pd.Categorical(columns[name][rows]) if name in task.categorical else columns[name][rows]
            for name in features
        }
    )


def draw_target(task: RealTask, spec: TableSpec, rng: np.random.Generator) -> str:
    """The name of a column: the task's own target or any other, each as likely."""
    targets = task.targets(spec.num_rows, spec.max_classes == 0)
    others = [name for name in targets if name != task.target]
    takes_own = rng.random() < OWN_TARGET
    if task.target in targets and (takes_own or not others):
        return task.target
    return others[rng.integers(len(others))]


def draw_classes(
    values: Column, is_category: bool, max_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, str]:
    """Labels int64 (rows,) in 0..C-1 with C <= max_classes, and a text about them.

    Numbers with more than 10 different values are cut at random quantiles. Classes beyond the commonest ones, or with
    fewer than 4 rows, are merged into one. Raises Rejected("classes") if fewer than two are left.
    """
    distinct, labels = np.unique(values.codes if isinstance(values, pd.Categorical) else values, return_inverse=True)
    made = f"{len(distinct)} classes"
    if not is_category and len(distinct) > FEW_VALUES:
        levels = np.sort(rng.random(rng.integers(1, max_classes)))
        labels = np.searchsorted(np.quantile(values, levels), values)
        made = f"cut at the quantiles {', '.join(f'{level:.2f}' for level in levels)}"
    labels = merge_rare(labels, max_classes)
    return labels, f"{made}, {labels.max() + 1} in this table"


def merge_rare(labels: np.ndarray, max_classes: int) -> np.ndarray:
    """Labels int64 (rows,) numbered anew, without gaps; see draw_classes."""
    distinct, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    common = int((counts >= MIN_CLASS_ROWS).sum())
    kept = common if common == len(distinct) <= max_classes else min(common, max_classes - 1)
    rest = counts[order[kept:]].sum()
    if 0 < rest < MIN_CLASS_ROWS:
        kept -= 1  # the rest is too small to be a class; the rarest one that is kept takes it in
    if kept + (kept < len(distinct)) < 2:
        raise Rejected("classes")
    number = np.empty(len(distinct), np.int64)
    number[order] = np.minimum(np.arange(len(distinct)), kept)
    return number[labels]


def prepare(frame: pd.DataFrame, train_size: int, norm_method: str, keeps_missing: bool = False) -> np.ndarray:
    """Columns as an estimator sees them, float32 (rows, columns that vary among the labeled rows).

    keeps_missing: missing values are NaN, rather than the mean
    Raises Rejected("constant") if none does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns whose power cannot be fitted
        encoder = FeatureEncoder(keeps_missing).fit(frame.iloc[:train_size])
        if len(encoder.varying) == 0:
            raise Rejected("constant")
        numbers = encoder.transform(frame)
        X = Normalizer(norm_method).fit(numbers[:train_size]).transform(numbers)
    if not np.isfinite(X[~np.isnan(numbers)]).all():
        raise Rejected("nan")
    return X
