"""tables: real tables in a folder of CSV, Parquet and Arrow files, of which rows, columns and targets are drawn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.real import TEST, TRAINING, VALIDATION, DividedTables, Eligible
from priors.real.csv_format import AUTO, csv_format, format_problems
from priors.table import Largest, PriorError, Table, TableSpec

if TYPE_CHECKING:  # pandas and scikit-learn take two seconds to import, and only runs on real tables need them
    from priors.real.draws import TableCache
    from priors.real.files import Entry
    from priors.real.tasks import RealTask

__all__ = ["FolderOfTables"]

NAME = "tables"
CACHE_BYTES = 2**30  # of the tables that were used last, in each process that draws


@dataclass
class FolderOfTables(Prior, DividedTables):
    """Real tables: each draw takes some rows and columns of one of them.

    Only tables with enough rows for a draw take part in it, each with a probability proportional to the square root of
    its rows: a table of a million rows has more to offer than one of a hundred, but not ten thousand times as much.
    """

    numeric_targets = True
    shared = ("contents",)

    folder: str = ""
    """Folder with .csv, .parquet, .arrow or .feather files, in subfolders too, and perhaps a tasks.csv that names
    their targets."""
    validation_fraction: float = option(0.05, at_least=0, below=1)
    """Share of the tables, chosen by a hash of their values or family, that validation draws and training never
    does."""
    test_fraction: float = option(0.05, at_least=0, below=1)
    """Share of the tables, chosen in the same way, that neither training nor validation draws: the gain of the training
    is measured on them at the end."""
    separator: str = "auto"
    """What separates the columns of all CSV files: comma, semicolon, tab, bar, space, colon or another mark; or auto,
    the comma, semicolon or tab that divides the first line of a file most."""
    decimal: str = "point"
    """Decimal mark of the numbers in all CSV files: point or comma."""
    missing_words: list[str] = field(default_factory=lambda: [AUTO])
    """Words in CSV files that mean a missing value, as an empty cell does. auto stands for NA, N/A, None, null, nan and
    the others that pandas knows, which a target keeps as classes unless its other values are numbers."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        # The options alone.
        problems = self.fraction_problems("tables")
        if wrong := format_problems(self.separator, self.decimal, self.missing_words):
            return problems + wrong
        if not self.folder:
            return [*problems, "folder is not set; it is a folder of tables"]
        if not Path(self.folder).is_dir():
            return [*problems, f"folder is {self.folder!r}; there is no such folder"]

        # The folder.
        try:
            entries, _, left_out = self.contents
        except PriorError as error:
            return [*problems, str(error)]
        if not problems and not self.tasks:
            where = f"folder is {self.folder!r}; "
            if not entries:
                problems.append(where + "there are no .csv, .parquet, .arrow or .feather files in it")
            elif len(left_out) == len(entries):
                from priors.real.tasks import reasons

                problems.append(where + f"no file in it can be used: {reasons(left_out)}")
            else:
                problems.append(where + "no table is for training; lower validation_fraction or test_fraction")
        return problems

    @cached_property
    def contents(self) -> tuple[dict[str, Entry], list[RealTask], dict[str, str]]:
        """The files by path, the tables of all sides, and why other files are left out; raises PriorError."""
        from priors.real.files import index_folder
        from priors.real.tasks import find_tasks, named_targets

        folder = Path(self.folder)
        form = csv_format(self.separator, self.decimal, self.missing_words)
        entries = index_folder(folder, form, named_targets(folder))
        return entries, *find_tasks(folder, entries)

    @property
    def tasks(self) -> list[RealTask]:
        """The tables that are drawn, in the order of their content."""
        return self.sides[self.side]

    @cached_property
    def sides(self) -> dict[str, list[RealTask]]:
        """The tables by what they are drawn for; if validation would have none, it gets those of the test."""
        sides: dict[str, list[RealTask]] = {TRAINING: [], VALIDATION: [], TEST: []}
        _, tasks, _ = self.contents
        for task in tasks:
            place = task.place / 2**64  # uniform in [0, 1)
            if place < self.validation_fraction:
                sides[VALIDATION].append(task)
            elif place < self.validation_fraction + self.test_fraction:
                sides[TEST].append(task)
            else:
                sides[TRAINING].append(task)
        if self.validation_fraction > 0 and not sides[VALIDATION]:
            sides[VALIDATION] = sides[TEST]
            sides[TEST] = []
        return sides

    @cached_property
    def most_rows(self) -> dict[bool, np.ndarray]:
        """The largest number of rows for which a table can be drawn, by whether its target is a number."""
        most_rows = {}
        for numeric in (False, True):
            most_rows[numeric] = np.array([task.most_rows(numeric) for task in self.tasks], dtype=int)
        return most_rows

    @cached_property
    def weights(self) -> np.ndarray:
        """Square roots of the numbers of rows, to which the probabilities of the tables are proportional."""
        return np.sqrt([task.entry.rows for task in self.tasks])

    @cached_property
    def cache(self) -> TableCache:
        """The tables in memory."""
        from priors.real.draws import TableCache

        return TableCache(Path(self.folder), CACHE_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without the tables in memory."""
        state = vars(self).copy()
        state.pop("cache", None)
        return state

    @property
    def kind_of_clusters(self) -> str:  # type: ignore[override]
        """Families if there are any, else tables."""
        if any(task.family for task in self.tasks):
            return "families"
        return "tables"

    def clusters(self, table: Table) -> list[Hashable]:
        """Return the family of the table, or its file, for each query row."""
        query_rows = len(table.y) - table.train_size
        return [table.plan.task.cluster] * query_rows

    def eligible(self, rows: int, numeric: bool) -> Eligible:
        """Count the tables that are long enough to draw so many rows."""
        long_enough = int((self.most_rows[numeric] >= rows).sum())
        return Eligible(long_enough, len(self.tasks))

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the most features and classes of the tables that are long enough; see Prior.largest."""
        features = 0
        classes = 0
        for task in self.tasks:
            targets = [facts for facts in task.possible_targets(numeric) if facts.known >= rows]
            if targets:
                features = max(features, len(task.columns) - 1)
                classes = max(classes, *(facts.distinct for facts in targets))
        return Largest(features=features or None, classes=None if numeric else classes or None)

    def fingerprint(self) -> str:
        """Return a hash of the tables of all sides and of what is predicted in them."""
        from priors.real.tasks import fingerprint_of_tasks

        _, tasks, _ = self.contents
        return fingerprint_of_tasks(tasks)

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        """Describe the tables and what is left out, in lines for the user."""
        from priors.real.tasks import RULE, columns_left_out, identifiers, reading_remarks, reasons, shortened

        # How many tables there are, and the longest ones.
        entries, tasks, left_out = self.contents
        total_rows = sum(task.entry.rows for task in tasks)
        lines = [f"{self.folder}: {len(tasks)} tables with {total_rows:,} rows, from {len(entries)} files"]
        longest_first = sorted(tasks, key=lambda task: -task.entry.rows)
        lengths = [f"{task.entry.path} {task.entry.rows:,}" for task in longest_first]
        lines.append(f"rows: {shortened(lengths, most)}")

        # Which ones are not for training.
        for side in (VALIDATION, TEST):
            # A file may have several targets.
            paths = sorted({task.entry.path for task in self.sides[side]})
            if paths:
                lines.append(f"{len(paths)} for {side}: {shortened(paths, most)}")
        if self.sides[VALIDATION] and not self.sides[TEST]:
            lines.append(f"none for the final test: raise {key}.test_fraction, or add tables")

        # How they are read, and what is not.
        guessed = [f"{task.entry.path} ({task.target})" for task in tasks if task.is_guessed]
        if guessed:
            lines.append(f"{len(guessed)} not in tasks.csv, so their target is {RULE}: {shortened(guessed, most)}")
        if left_out:
            lines.append(f"{len(left_out)} files left out: {reasons(left_out, most)}")
        lines += reading_remarks(tasks, most)
        lines += columns_left_out(tasks, most)
        lines += identifiers(tasks, "the column drop of tasks.csv")
        return lines

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        """Draw a table; see Prior.attempt."""
        from priors.real.draws import draw_table_of_task

        most_rows = self.most_rows[spec.max_classes == 0]
        thresholds = np.cumsum(np.where(most_rows >= spec.num_rows, self.weights, 0.0))
        if len(thresholds) == 0 or thresholds[-1] == 0:
            longest = most_rows.max(initial=0)
            raise PriorError(f"no table has {spec.num_rows} rows with a target; the longest one has {longest}")
        rng = rng_at(seed, "table")
        task = self.tasks[np.searchsorted(thresholds, rng.random() * thresholds[-1], side="right")]
        table = draw_table_of_task(task, self.cache.columns(task.entry), spec, rng)
        table.source = (NAME, task.entry.path)
        return table
