"""Draws training tables from real ones, prepared as an estimator does; nothing is fitted on query rows.

A draw from one of several tables picks a target, rows and columns. A draw from the rows of a single table, on which a
model is fine-tuned, labels some of them, and others are queries.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from priors.finish import Rejected, split_rows, standardize_target
from priors.real import TEST, TRAINING, VALIDATION
from priors.real.files import FEW_VALUES, Column, Entry, mix_bits, read_table, value_hashes
from priors.real.preprocessing import FeatureEncoder, Member, Normalizer, TargetScale, as_numbers, reads_as_numbers
from priors.real.tasks import RealTask
from priors.table import MIN_ROWS, PriorError, Table, TableSpec

OWN_TARGET = 0.5  # probability that a draw predicts the table's own target, if it can; else another column of it
NORM_METHODS = ("none", "power")  # the default of estimators
MIN_CLASS_ROWS = 4  # of a drawn table: with fewer, a class is often missing from the labeled or the query rows
MIN_SCORED = 2  # rows for validation or the final test, as a confidence interval needs two


class TableCache:
    """The columns of the tables of a folder; those used last stay in memory, up to `most_bytes`."""

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.bytes = 0  # of what is held
        self.held: OrderedDict[str, dict[str, Column]] = OrderedDict()

    def columns(self, entry: Entry) -> dict[str, Column]:
        """Return the columns of a file; see read_columns."""
        if entry.path not in self.held:
            self.held[entry.path] = read_columns(self.folder, entry)
            self.bytes += size_of(self.held[entry.path])
        self.held.move_to_end(entry.path)
        columns = self.held[entry.path]
        while self.bytes > self.most_bytes:
            _, oldest = self.held.popitem(last=False)
            self.bytes -= size_of(oldest)
        return columns


def read_columns(folder: Path, entry: Entry) -> dict[str, Column]:
    """Read the columns of a file by name; raises PriorError if it has changed since it was indexed."""
    path = folder / entry.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PriorError(f"{path} cannot be read any more: {error}") from None
    if blake2b(content, digest_size=16).hexdigest() != entry.hash:
        raise PriorError(
            f"{path} has changed since it was indexed, so its draws would differ from earlier ones: "
            "restore it, or `touch` it and begin another run"
        )
    return read_table(content, entry.path, entry.form, entry.targets).columns


def size_of(columns: dict[str, Column]) -> int:
    """Estimate the bytes of the values, with 100 for each different text."""
    size = 0
    for column in columns.values():
        if isinstance(column, pd.Categorical):
            size += column.codes.nbytes + 100 * len(column.categories)
        else:
            size += column.nbytes
    return size


@dataclass
class TablePlan:
    """What was drawn from a table."""

    task: RealTask
    rows: np.ndarray
    features: list[str]
    target: str  # the column, and how it became the target
    norm_method: str

    def __str__(self) -> str:
        rows = f"{len(self.rows)} of {self.task.entry.rows} rows"
        columns = f"{len(self.features)} columns ({', '.join(map(repr, self.features))})"
        return f"tables {self.task.entry.path!r}: {rows}, {columns}, normalization {self.norm_method}; {self.target}"


def draw_table_of_task(task: RealTask, columns: dict[str, Column], spec: TableSpec, rng: np.random.Generator) -> Table:
    """Draw a table from the file of a task.

    Parameters
    ----------
    task : RealTask
        A task whose file has enough rows.
    columns : dict of str to Column
        The columns of the file.
    spec : TableSpec
        The request. The table has as many rows, and fewer features if the file has.
    rng : numpy.random.Generator
        The source of randomness.

    Returns
    -------
    Table

    Raises
    ------
    Rejected
        If the drawn target or features cannot be used.
    """
    # The rows: some of those that have a value of the target.
    target = draw_target(task, spec, rng)
    values = columns[target]
    rows = rng.choice(rows_with_value(values), spec.num_rows, replace=False)
    train_size = spec.train_size

    # The target: numbers, or classes in random order, the same in labeled and query rows.
    if spec.max_classes == 0:
        y = standardize_target(torch.from_numpy(values[rows]))
        num_classes = 0
        made = "numeric target"
    else:
        is_category = any(facts.name == target and task.is_category(facts) for facts in task.columns)
        labels, made = draw_classes(values[rows], is_category, spec.max_classes, rng)
        num_classes = int(labels.max()) + 1
        order = split_rows(labels, num_classes, train_size, rng)
        if order is not None:
            rows = rows[order]
            labels = labels[order]
        y = torch.from_numpy(rng.permutation(num_classes)[labels])

    # The features, prepared as an estimator does.
    others = [facts.name for facts in task.columns if facts.name != target]
    features = [others[j] for j in rng.permutation(len(others))[: spec.num_features]]
    frame = frame_of(task, columns, features, rows)
    norm_method = str(rng.choice(NORM_METHODS))
    X = torch.from_numpy(prepare_columns(frame, train_size, norm_method, spec.keeps_missing))
    plan = TablePlan(task, rows, features, f"{made}: {target}", norm_method)
    missing = float(frame.isna().to_numpy().mean())
    return Table(X, y, train_size, num_classes, plan=plan, missing=missing)


def rows_with_value(values: Column) -> np.ndarray:
    """Return the numbers of the rows in which a column has a value."""
    if isinstance(values, pd.Categorical):
        return np.flatnonzero(values.codes >= 0)
    return np.flatnonzero(~np.isnan(values))


def frame_of(task: RealTask, columns: dict[str, Column], features: list[str], rows: np.ndarray) -> pd.DataFrame:
    """Return some columns and rows of a table as an estimator takes them."""
    frame = {}
    for name in features:
        values = columns[name][rows]
        frame[name] = pd.Categorical(values) if name in task.categorical else values
    return pd.DataFrame(frame)


def draw_target(task: RealTask, spec: TableSpec, rng: np.random.Generator) -> str:
    """Draw a target: half of the time the task's own, otherwise any other column, if possible."""
    targets = task.targets(spec.num_rows, spec.max_classes == 0)
    others = [name for name in targets if name != task.target]
    takes_own = rng.random() < OWN_TARGET
    if task.target in targets and (takes_own or not others):
        return task.target
    return others[rng.integers(len(others))]


def draw_classes(
    values: Column, is_category: bool, max_classes: int, rng: np.random.Generator
) -> tuple[np.ndarray, str]:
    """Make classes of a column.

    Numbers with more than 10 different values are cut at random quantiles. Classes beyond the commonest ones, or with
    fewer than 4 rows, are merged into one.

    Parameters
    ----------
    values : Column
        The values of the drawn rows, none of them missing.
    is_category : bool
        Whether numbers are categories, which are not cut.
    max_classes : int
        Most classes.
    rng : numpy.random.Generator
        The source of randomness.

    Returns
    -------
    labels : ndarray
        int64 (rows,) in 0..C-1 with C <= max_classes.
    text : str
        How they were made.

    Raises
    ------
    Rejected
        "classes": fewer than two are left.
    """
    codes = values.codes if isinstance(values, pd.Categorical) else values
    distinct, labels = np.unique(codes, return_inverse=True)
    made = f"{len(distinct)} classes"
    if not is_category and len(distinct) > FEW_VALUES:
        levels = np.sort(rng.random(rng.integers(1, max_classes)))
        labels = np.searchsorted(np.quantile(values, levels), values)
        made = f"cut at the quantiles {', '.join(f'{level:.2f}' for level in levels)}"
    labels = merge_rare(labels, max_classes)
    return labels, f"{made}, {labels.max() + 1} in this table"


def merge_rare(labels: np.ndarray, max_classes: int) -> np.ndarray:
    """Renumber labels int64 (rows,) consecutively, and merge rare ones; see draw_classes."""
    # How many of the classes are kept, the commonest first; the others become one class.
    distinct, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    common = int((counts >= MIN_CLASS_ROWS).sum())
    kept = common
    if common < len(distinct) or common > max_classes:
        kept = min(common, max_classes - 1)
    rest = counts[order[kept:]].sum()
    if 0 < rest < MIN_CLASS_ROWS:
        # The rest is too small to be a class, and is merged with the rarest class that is kept.
        kept -= 1
    num_classes = min(kept + 1, len(distinct))
    if num_classes < 2:
        raise Rejected("classes")

    number = np.empty(len(distinct), np.int64)
    number[order] = np.minimum(np.arange(len(distinct)), kept)
    return number[labels]


def prepare_columns(frame: pd.DataFrame, train_size: int, norm_method: str, keeps_missing: bool = False) -> np.ndarray:
    """Prepare columns as an estimator does, fitted on the labeled rows alone.

    Parameters
    ----------
    frame : DataFrame
        The columns.
    train_size : int
        The first rows are labeled.
    norm_method : str
        One of NORM_METHODS.
    keeps_missing : bool
        Whether missing values are NaN instead of the mean.

    Returns
    -------
    ndarray
        float32 (rows, columns that vary among the labeled rows).

    Raises
    ------
    Rejected
        "constant": no column varies; "nan": a number is not finite.
    """
    with warnings.catch_warnings():
        # Columns whose power cannot be fitted are no problem here.
        warnings.simplefilter("ignore")
        encoder = FeatureEncoder(keeps_missing).fit(frame.iloc[:train_size])
        if len(encoder.varying) == 0:
            raise Rejected("constant")
        numbers = encoder.transform(frame)
        X = Normalizer(norm_method).fit(numbers[:train_size]).transform(numbers)
    if not np.isfinite(X[~np.isnan(numbers)]).all():
        raise Rejected("nan")
    return X


@dataclass
class SourceRows:
    """The rows of a table with their targets."""

    X: pd.DataFrame
    y: np.ndarray  # labels int64 in 0..num_classes-1, or float64 if num_classes is 0
    num_classes: int
    keeps_missing: bool = False

    def draw(
        self, rows: np.ndarray, num_rows: int, train_size: int, max_features: int | None, rng: np.random.Generator
    ) -> Table:
        """Draw a table from some rows, see draw_rows, for a random ensemble member. Raises Rejected."""
        labeled, queries = draw_rows(self.y[rows], self.num_classes, num_rows, train_size, rng)
        return self.make_table(rows[labeled], rows[queries], rng, max_features)

    def draw_for(self, queries: np.ndarray, rows: np.ndarray, num_rows: int, rng: np.random.Generator) -> Table:
        """Draw a table of these query rows with at most `num_rows` labeled ones from `rows`. Raises Rejected."""
        order, _ = shuffled(self.y[rows], self.num_classes, rng)
        return self.make_table(rows[order[:num_rows]], queries, rng)

    def make_table(
        self, labeled: np.ndarray, queries: np.ndarray, rng: np.random.Generator, max_features: int | None = None
    ) -> Table:
        """Make a table of these rows, in this order, for a random ensemble member."""
        rows = np.concatenate([labeled, queries])
        chosen = np.sort(rng.permutation(self.X.shape[1])[:max_features])
        method = str(rng.choice(NORM_METHODS))
        frame = self.X.iloc[rows, chosen]
        X = prepare_columns(frame, len(labeled), method, self.keeps_missing)
        features = rng.permutation(X.shape[1])
        shift = int(rng.integers(max(self.num_classes, 1)))
        member = Member(method, features, shift)
        return Table(
            X=torch.from_numpy(X[:, member.features]),
            y=torch.from_numpy(self.target(rows, len(labeled), member)),
            train_size=len(labeled),
            num_classes=self.num_classes,
            plan=RowPlan(labeled, queries, member, self.num_classes),
            missing=float(frame.isna().to_numpy().mean()),
        )

    def target(self, rows: np.ndarray, train_size: int, member: Member) -> np.ndarray:
        """Return labels int64 as a member numbers them, or float32 in standard deviations of the labeled rows."""
        y = self.y[rows]
        if self.num_classes:
            return (y + member.shift) % self.num_classes
        scale = TargetScale(y[:train_size])
        with np.errstate(over="ignore"):
            numbers = scale.standardize(y).astype(np.float32)
        if scale.std == 0 or not np.isfinite(numbers).all():
            raise Rejected("target")
        return numbers


@dataclass
class RowPlan:
    """What was drawn: the numbers of the labeled rows and of the query rows, and the ensemble member."""

    labeled: np.ndarray
    queries: np.ndarray
    member: Member
    num_classes: int

    def __str__(self) -> str:
        rows = f"{len(self.labeled)} labeled rows, {len(self.queries)} query rows"
        target = f"{self.num_classes} classes" if self.num_classes else "numeric target"
        return f"{rows}, {len(self.member.features)} columns, normalization {self.member.norm_method}; {target}"


def draw_rows(
    y: np.ndarray, num_classes: int, num_rows: int, train_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw labeled rows and query rows of a table.

    Parameters
    ----------
    y : ndarray
        (rows,), the target.
    num_classes : int
        0 if the target are numbers.
    num_rows, train_size : int
        Rows to draw, and how many of them are labeled. From a shorter table all rows are drawn, with the same labeled
        share. Each class has a labeled row, even if that takes more of them, since a class without one cannot be
        predicted.
    rng : numpy.random.Generator
        The source of randomness.

    Returns
    -------
    labeled, queries : ndarray
        int64, the numbers of the rows.

    Raises
    ------
    PriorError
        If no row is left for a query.
    """
    order, classes = shuffled(y, num_classes, rng)
    fewest = max(classes, 1)
    count = min(num_rows, len(y))
    labeled = max(min(round(count * train_size / num_rows), count - 1), fewest)
    if labeled >= count:
        of_classes = f" of {classes} classes" if classes else ""
        raise PriorError(f"{count} rows{of_classes} are too few: none is left for a query")
    return rng.permutation(order[:labeled]), order[labeled:count]


def shuffled(y: np.ndarray, num_classes: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Return the rows in random order, one of each class first, and the number of classes; 0 for numbers."""
    order = rng.permutation(len(y))
    if num_classes == 0:
        return order, 0
    _, first = np.unique(y[order], return_index=True)  # a row of each class
    return np.concatenate([order[first], np.delete(order, first)]), len(first)


def split_by_content(
    rows: SourceRows, validation_fraction: float, test_fraction: float, names: Sequence[object] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divide rows into those for training, for validation and for the final test.

    A hash of a row's features and target decides, so that copies of a row are on the same side, and a row stays on its
    side when others are added. A class without training rows goes to training completely.

    Parameters
    ----------
    rows : SourceRows
        The rows.
    validation_fraction, test_fraction : float
        Shares of the rows, which hold approximately; with 0 there are none.
    names : sequence, optional
        The names of the classes, for messages.

    Returns
    -------
    training, validation, test : ndarray
        int64, the numbers of the rows of each side, in order.

    Raises
    ------
    PriorError
        If a side has too few rows, or there are less than two classes.
    """
    # The side of each row.
    place = row_hashes(rows.X, rows.y) / 2**64  # uniform in [0, 1)
    sides = np.zeros(len(place), int)  # 0 training, 1 validation, 2 test
    sides[place < test_fraction + validation_fraction] = 1
    sides[place < test_fraction] = 2
    if rows.num_classes:
        sides[~np.isin(rows.y, rows.y[sides == 0])] = 0
        present = np.unique(rows.y)
        if len(present) < 2:
            name = names[present[0]] if names is not None and len(present) else "none"
            raise PriorError(f"the target has a single class ({name}); two are needed")

    # Enough rows on each side that is wanted.
    training = np.flatnonzero(sides == 0)
    validation = np.flatnonzero(sides == 1)
    test = np.flatnonzero(sides == 2)
    for numbers, share, fewest, purpose in (
        (training, 1 - validation_fraction - test_fraction, MIN_ROWS, "training"),
        (validation, validation_fraction, MIN_SCORED, "validation"),
        (test, test_fraction, MIN_SCORED, "the final test"),
    ):
        if share > 0 and len(numbers) < fewest:
            raise PriorError(
                f"{len(numbers)} of the {len(sides)} rows are for {purpose}, where at least {fewest} are needed: "
                "use more rows or other shares; copies of a row are all on one side"
            )
    return training, validation, test


def row_hashes(X: pd.DataFrame, y: np.ndarray) -> np.ndarray:
    """Hash rows, uint64 (rows,); rows with equal values have equal hashes."""
    hashes = value_hashes(np.asarray(y, dtype=float))
    for _, column in X.items():
        hashes = mix_bits(hashes ^ value_hashes(column_values(column)))
    return hashes


def column_values(column: pd.Series) -> Column:
    """Return a column as numbers, or as categories of text."""
    if reads_as_numbers(column):
        return as_numbers(column)
    return pd.Categorical(column.astype(object).where(column.notna()).map(str, na_action="ignore"))


@dataclass
class OwnRows:
    """The rows of a file that have a target, their numbers in the file, and rows by TRAINING, VALIDATION, TEST."""

    rows: SourceRows
    numbers: np.ndarray
    sides: dict[str, np.ndarray]


def divide_rows(
    task: RealTask, columns: dict[str, Column], numeric: bool, validation_fraction: float, test_fraction: float
) -> OwnRows:
    """Divide the rows of a table that have a target.

    Parameters
    ----------
    task : RealTask
        The table.
    columns : dict of str to Column
        Its columns.
    numeric : bool
        Whether the target is a number.
    validation_fraction, test_fraction : float
        See `split_by_content`, as for what is raised.

    Returns
    -------
    OwnRows
    """
    values = columns[task.target]
    numbers = rows_with_value(values)
    values = values[numbers]
    if numeric:
        names = np.array([])
        y = values
    else:
        names, y = np.unique(np.asarray(values), return_inverse=True)
    features = [facts.name for facts in task.columns if facts.name != task.target]
    X = frame_of(task, columns, features, numbers)
    rows = SourceRows(X, y, len(names))
    sides = split_by_content(rows, validation_fraction, test_fraction, names.tolist())
    return OwnRows(rows, numbers, dict(zip((TRAINING, VALIDATION, TEST), sides, strict=True)))
