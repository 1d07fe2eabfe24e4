"""one_table: draws of labeled and query rows of a single real table, on which a network is fine-tuned."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from priors.options import option
from priors.prior import Prior
from priors.random import rng_at
from priors.real import TRAINING, DividedTables
from priors.real.csv_format import AUTO, csv_format, format_problems
from priors.table import Largest, PriorError, Table, TableSpec

if TYPE_CHECKING:  # pandas and scikit-learn take two seconds to import, and only runs on real tables need them
    from priors.real.draws import OwnRows
    from priors.real.tasks import RealTask

__all__ = ["OneTable"]

NAME = "one_table"


@dataclass
class OneTable(Prior, DividedTables):
    """The rows of one real table: each draw labels some of them, and others are queries.

    A draw prepares the table as a member of an estimator's ensemble does. It has fewer rows than asked for if the table
    is shorter, and fewer features if it is narrower.
    """

    numeric_targets = True
    kind_of_clusters = "rows"
    shared = ("task", "rows_in_memory")

    file: str = ""
    """The table: a .csv, .parquet, .arrow or .feather file."""
    target: str = ""
    """The column to predict; by default a column called target, class, label or y, else the last one."""
    drop: list[str] = field(default_factory=list)
    """Columns to leave out."""
    categorical: list[str] = field(default_factory=list)
    """Numeric columns to treat as categories."""
    validation_fraction: float = option(0.1, above=0, below=1)
    """Share of the rows, chosen by a hash of their values, that validation predicts and training never sees."""
    test_fraction: float = option(0.1, above=0, below=1)
    """Share of the rows, chosen in the same way, that neither training nor validation sees: the gain of the training is
    measured on them at the end."""
    separator: str = "auto"
    """What separates the columns of a CSV file: comma, semicolon, tab, bar, space, colon or another mark; or auto, the
    comma, semicolon or tab that divides the first line most."""
    decimal: str = "point"
    """Decimal mark of the numbers in a CSV file: point or comma."""
    missing_words: list[str] = field(default_factory=lambda: [AUTO])
    """Words in a CSV file that mean a missing value, as an empty cell does. auto stands for NA, N/A, None, null, nan
    and the others that pandas knows, which a target keeps as classes unless its other values are numbers."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        problems = self.fraction_problems("rows")
        if wrong := format_problems(self.separator, self.decimal, self.missing_words):
            return problems + wrong
        if not self.file:
            return [*problems, "file is not set; it is the table to train on"]
        try:
            problem = self.task.problem("the prior")
        except PriorError as error:
            return [*problems, str(error)]
        return [*problems, f"{self.file}: {problem}"] if problem else problems

    @cached_property
    def task(self) -> RealTask:
        """The task in the file; raises PriorError if it cannot be used."""
        from priors.real.files import index_file
        from priors.real.tasks import guess

        form = csv_format(self.separator, self.decimal, self.missing_words)
        task = guess(index_file(Path(self.file), form, (self.target,) if self.target else ()))
        if self.target:
            task = replace(task, target=self.target, is_guessed=False)
        return replace(task, drop=tuple(self.drop), categorical=tuple(self.categorical))

    def ineligible(self, max_classes: int) -> list[str]:
        """Return why the table cannot train a network with so many classes (0: that predicts numbers)."""
        facts = next(column for column in self.task.columns if column.name == self.task.target)
        target = f"the target {facts.name!r} of {self.file}"
        is_number = facts.kind == "number" and facts.name not in self.categorical
        if max_classes == 0 and not is_number:
            return [f"{target} has categories, but the network predicts numbers: set task=classification"]
        if 0 < max_classes < facts.distinct:
            advice = ": set task=regression if they are numbers" if is_number else ""
            return [f"{target} has {facts.distinct} classes, more than the network's {max_classes}{advice}"]
        try:
            self.rows(numeric=max_classes == 0)
        except PriorError as error:
            return [f"{self.file}: {error}"]
        return []

    def rows(self, numeric: bool) -> OwnRows:
        """Return the rows of the file and their sides; PriorError if a side has too few or the file has changed."""
        from priors.real.draws import divide_rows, read_columns

        if numeric not in self.rows_in_memory:
            columns = read_columns(Path(self.file).parent, self.task.entry)
            self.rows_in_memory[numeric] = divide_rows(
                self.task, columns, numeric, self.validation_fraction, self.test_fraction
            )
        return self.rows_in_memory[numeric]

    @cached_property
    def rows_in_memory(self) -> dict[bool, OwnRows]:
        """What `rows` has returned, by its argument."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without the table in memory."""
        state = vars(self).copy()
        state.pop("rows_in_memory", None)
        return state

    def clusters(self, table: Table) -> list[Hashable]:
        """Return the numbers of the query rows in the file, from 0."""
        rows = self.rows(numeric=table.num_classes == 0)
        return rows.numbers[table.plan.queries].tolist()

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the rows for training, the features and the classes of the table; see Prior.largest."""
        divided = self.rows(numeric)
        features = divided.rows.X.shape[1]
        return Largest(len(divided.sides[TRAINING]), features, None if numeric else divided.rows.num_classes)

    def fingerprint(self) -> str:
        """Return a hash of the table and of what is predicted in it."""
        from priors.real.tasks import fingerprint_of_tasks

        return fingerprint_of_tasks([self.task])

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        """Describe the table and what is left out of it, in lines for the user."""
        from priors.real.tasks import RULE, columns_left_out, identifiers, reading_remarks

        entry, task = self.task.entry, self.task
        guessed = f" ({RULE})" if task.is_guessed else ""
        return [
            f"{self.file}: {entry.rows:,} rows, {len(task.columns) - 1} features, target {task.target!r}{guessed}",
            f"{self.validation_fraction:.0%} of the rows for validation, {self.test_fraction:.0%} for the final test",
            *reading_remarks([task], most),
            *columns_left_out([task], most),
            *identifiers([task], f"{key}.drop"),
        ]

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        """Draw a table; see Prior.attempt."""
        divided = self.rows(numeric=spec.max_classes == 0)
        rows = replace(divided.rows, keeps_missing=spec.keeps_missing)
        training = divided.sides[TRAINING]
        rng = rng_at(seed, "rows")
        if self.side == TRAINING:
            table = rows.draw(training, spec.num_rows, spec.train_size, spec.num_features, rng)
        else:
            # Rows of validation or the test, predicted from rows of training.
            table = rows.draw_for(divided.sides[self.side], training, spec.num_rows, rng)
        table.source = (NAME, self.task.entry.path)
        return table
