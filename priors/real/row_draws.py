"""Tables made of the rows of a single one: some rows are labeled, others are the queries.

A model is fine-tuned on such draws. They are what an estimator makes of labeled rows and queries, and nothing is
fitted on the queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from priors.finish import Rejected
from priors.real.draws import NORM_METHODS, frame_of, known_rows, prepare
from priors.real.features import as_numbers, reads_as_numbers
from priors.real.files import Column
from priors.real.index import mixed, value_hashes
from priors.real.interface import TEST, TRAINING, VALIDATION
from priors.real.normalize import Member, TargetScale
from priors.real.tasks import RealTask
from priors.table import MIN_ROWS, PriorError, Table

MIN_SCORED = 2  # rows for validation or the final test: a confidence interval needs two


@dataclass
class Rows:
    """The rows of a table with their targets: labels int64 in 0..num_classes-1, or float64 if num_classes is 0.

    norm_methods: of the columns; a draw uses one of them
    """

    X: pd.DataFrame
    y: np.ndarray
    num_classes: int
    norm_methods: Sequence[str] = NORM_METHODS
    keeps_missing: bool = False

    def draw(
        self, rows: np.ndarray, num_rows: int, train_size: int, max_features: int | None, rng: np.random.Generator
    ) -> Table:
        """A table drawn from some rows, see draw_rows, for a random ensemble member. Raises Rejected."""
        labeled, queries = draw_rows(self.y[rows], self.num_classes, num_rows, train_size, rng)
        return self.table(rows[labeled], rows[queries], rng, max_features)

    def draw_for(self, queries: np.ndarray, rows: np.ndarray, num_rows: int, rng: np.random.Generator) -> Table:
        """A table of these query rows, with at most `num_rows` labeled ones drawn from `rows`. Raises Rejected."""
        order, _ = shuffled(self.y[rows], self.num_classes, rng)
        return self.table(rows[order[:num_rows]], queries, rng)

    def table(
        self, labeled: np.ndarray, queries: np.ndarray, rng: np.random.Generator, max_features: int | None = None
    ) -> Table:
        """A table of these rows, in this order, with at most so many features, for a random ensemble member."""
        rows = np.concatenate([labeled, queries])
        chosen = np.sort(rng.permutation(self.X.shape[1])[:max_features])
        method = str(rng.choice(self.norm_methods))
        frame = self.X.iloc[rows, chosen]
        X = prepare(frame, len(labeled), method, self.keeps_missing)
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
        """Labels int64 as a member numbers them, or float32 in standard deviations of the labeled rows."""
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
    """What was drawn: numbers of the labeled rows and of the query rows, and how they are seen."""

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
    """Numbers of labeled rows and of query rows: `num_rows` of a table, `train_size` of them labeled.

    A shorter table gives all of its rows, with the same labeled share. A row of each class is among the labeled
    ones, even if that takes more of them than `train_size`, so that no query has a class that the network has not seen.

    num_classes: 0 for numbers
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
    """The rows in random order, one of each class first, and how many classes there are; 0 for numbers."""
    order = rng.permutation(len(y))
    if num_classes == 0:
        return order, 0
    first = np.unique(y[order], return_index=True)[1]
    return np.concatenate([order[first], np.delete(order, first)]), len(first)


def split_by_content(
    rows: Rows, validation_fraction: float, test_fraction: float, names: Sequence[object] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the rows for training, for validation and for the final test, each in order.

    A hash of a row's features and target decides, so that copies of a row are on the same side, and a row stays on its
    side when others are added. All rows of a class of which training would have none are for training.

    validation_fraction, test_fraction: shares of the rows, about; with 0 there are none
    names: of the classes, for messages
    Raises PriorError, a ValueError, if a side has too few rows, or training has less than two classes.
    """
    place = row_hashes(rows.X, rows.y) / 2**64
    sides = np.where(place < test_fraction, 2, np.where(place < test_fraction + validation_fraction, 1, 0))
    if rows.num_classes:
        sides[~np.isin(rows.y, rows.y[sides == 0])] = 0
        present = np.unique(rows.y)
        if len(present) < 2:
            one = names[present[0]] if names is not None and len(present) else "none"
            raise PriorError(f"the target has a single class ({one}); two are needed")
    training, validation, test = (np.flatnonzero(sides == side) for side in range(3))
    for found, share, fewest, purpose in (
        (training, 1 - validation_fraction - test_fraction, MIN_ROWS, "training"),
        (validation, validation_fraction, MIN_SCORED, "validation"),
        (test, test_fraction, MIN_SCORED, "the final test"),
    ):
        if share > 0 and len(found) < fewest:
            raise PriorError(
                f"{len(found)} of the {len(sides)} rows are for {purpose}, where at least {fewest} are needed: "
                "use more rows or other shares; copies of a row are all on one side"
            )
    return training, validation, test


def row_hashes(X: pd.DataFrame, y: np.ndarray) -> np.ndarray:
    """uint64 (rows,): equal for rows with equal values"""
    hashes = value_hashes(np.asarray(y, dtype=float))
    for _, column in X.items():
        hashes = mixed(hashes ^ value_hashes(values_of(column)))
    return hashes


def values_of(column: pd.Series) -> Column:
    """Numbers, or texts as categories."""
    if reads_as_numbers(column):
        return as_numbers(column)
    return pd.Categorical(column.astype(object).where(column.notna()).map(str, na_action="ignore"))


@dataclass
class OwnRows:
    """The rows of a file that have a target, their numbers in the file, and rows by TRAINING, VALIDATION, TEST."""

    rows: Rows
    numbers: np.ndarray
    sides: dict[str, np.ndarray]


def own_rows(
    task: RealTask, columns: dict[str, Column], numeric: bool, validation_fraction: float, test_fraction: float
) -> OwnRows:
    """numeric: whether the target is a number; raises what split_by_content raises."""
    values = columns[task.target]
    numbers = known_rows(values)
    values = values[numbers]
    if numeric:
        names, y = np.array([]), values
    else:
        names, y = np.unique(np.asarray(values), return_inverse=True)
    features = [facts.name for facts in task.columns if facts.name != task.target]
    X = frame_of(task, columns, features, numbers)
    rows = Rows(X, y, len(names))
    sides = split_by_content(rows, validation_fraction, test_fraction, names.tolist())
    return OwnRows(rows, numbers, dict(zip((TRAINING, VALIDATION, TEST), sides, strict=True)))
