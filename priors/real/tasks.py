"""The tasks in a folder of tables: targets that `tasks.csv` names (see priors/real/README.md), or guesses.

tabicl-evaluate suite=folder reads the same tasks.csv.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from priors.real.csv_format import separator_of, without_declaration
from priors.real.files import (
    FEW_VALUES,
    OLDEST,
    TASKS,
    USUAL_TARGETS,
    ColumnFacts,
    Entry,
    LeftOut,
    decode_text,
    guess_target,
)
from priors.table import MIN_ROWS, PriorError

COLUMNS = ("item", "target")
RULE = f"a column called {', '.join(USUAL_TARGETS[:-1])} or {USUAL_TARGETS[-1]}, else the last one"
IDENTIFIER = re.compile(r"(?i:(.*[\s_.-])?id|row[\s_.-]?(names?|numbers?))|.*[a-z]I[dD]")
# In fewer rows, values of ordinary columns often differ too: 20 rows of 100 equally frequent categories do in 13 % of
# all tables, 30 rows in 0.8 %.
ROWS_TO_TELL = 30
# Names repeat at times: in real tables 98 % of 515 dishes and 93 % of 536 samples of wood were different ones. 100 rows
# of 200 equally frequent categories have 79 different ones. None of the columns of 165 real tables is named falsely.
MANY_ROWS = 100
MOSTLY_DIFFERENT = 0.9


@dataclass(frozen=True)
class RealTask:
    """A table and its target."""

    entry: Entry
    target: str  # the column that tasks.csv names, or a guess
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()  # numeric columns that are categories
    is_guessed: bool = False  # whether tasks.csv does not list the file
    family: str = ""  # name of a group of related tables, or ""

    @property
    def cluster(self) -> str:
        """The family, or the file."""
        return self.family or self.entry.path

    @property
    def place(self) -> int:
        """A hash of the family or of the table's values, 0..2^64 - 1, which decides what the table is drawn for."""
        name = blake2b(self.family.encode(), digest_size=8).hexdigest() if self.family else self.entry.content
        return int(name, 16)

    @cached_property
    def columns(self) -> list[ColumnFacts]:
        return [facts for facts in self.entry.columns if facts.name not in self.drop]

    def targets(self, rows: int, numeric: bool) -> list[str]:
        """List the columns that can be the target of a table with so many rows: a number, or classes."""
        return [facts.name for facts in self.possible_targets(numeric) if facts.known >= rows]

    def most_rows(self, numeric: bool) -> int:
        """Return the largest number of rows for which some column can be the target, or 0."""
        return max((facts.known for facts in self.possible_targets(numeric)), default=0)

    def possible_targets(self, numeric: bool) -> list[ColumnFacts]:
        """List the columns that can be the target of a table of some length: a number, or classes."""
        if numeric:
            return [facts for facts in self.columns if self.is_number(facts)]
        return [facts for facts in self.columns if self.has_classes(facts)]

    def is_category(self, facts: ColumnFacts) -> bool:
        return facts.kind == "category" or facts.name in self.categorical

    def is_number(self, facts: ColumnFacts) -> bool:
        if facts.kind != "number" or facts.name in self.categorical:
            return False
        return facts.distinct > FEW_VALUES or facts.name == self.target

    def has_classes(self, facts: ColumnFacts) -> bool:
        """Whether it holds numbers, which are cut into classes, or categories with two rows or more on average."""
        if self.is_category(facts):
            return facts.distinct <= facts.known / 2
        return facts.kind == "number"

    def problem(self, named_by: str = TASKS) -> str | None:
        """Return why the table cannot be used, or None. named_by: where its columns are named."""
        names = {facts.name for facts in self.entry.columns} | self.entry.left_out.keys()
        unknown = [name for name in (self.target, *self.drop, *self.categorical) if name not in names]
        if unknown:
            return f"{named_by} names the columns {', '.join(unknown)}, which it does not have"
        if self.target in self.drop:
            return f"{named_by} drops its target {self.target}"
        if self.target in self.entry.left_out:
            return f"its target {self.target!r} has {self.entry.left_out[self.target]}"
        facts = next(facts for facts in self.entry.columns if facts.name == self.target)
        if facts.known < MIN_ROWS:
            return f"its target {self.target!r} has a value in {facts.known} rows, fewer than {MIN_ROWS}"
        if facts.kind == "time":
            return f"its target {self.target!r} has times"
        if not self.has_classes(facts):
            return f"its target {self.target!r} has {facts.distinct} different texts in {facts.known} rows"
        if len(self.columns) < 2:
            return "it has no column other than its target"
        return None


def find_tasks(folder: Path, entries: dict[str, Entry]) -> tuple[list[RealTask], dict[str, str]]:
    """Find the tasks of a folder of tables.

    Parameters
    ----------
    folder : Path
        The folder.
    entries : dict of str to Entry
        Its files by path.

    Returns
    -------
    tasks : list of RealTask
        In the order of the hashes of their content. Of several files with the same content, the one that tasks.csv
        lists is used, or the first one.
    left_out : dict of str
        Why other files are not used, by path.

    Raises
    ------
    PriorError
        For a faulty tasks.csv.
    """
    # Those that tasks.csv lists, then all other files with a guessed target.
    left_out = {path: entry.reason for path, entry in entries.items() if entry.reason is not None}
    candidates = tasks_of_file(folder, entries)
    listed_paths = {task.entry.path for task in candidates}
    for path, entry in entries.items():
        if path not in listed_paths and path not in left_out:
            candidates.append(guess(entry))

    # Those that can be used, each content once.
    tasks: list[RealTask] = []
    path_of: dict[str, str] = {}  # the first file that holds some content
    for task in candidates:
        entry = task.entry
        if entry.path in left_out:
            continue
        problem = task.problem()
        if problem is not None:
            left_out[entry.path] = problem
        elif path_of.setdefault(entry.content, entry.path) != entry.path:
            left_out[entry.path] = f"it has the rows and columns of {path_of[entry.content]}"
        else:
            tasks.append(task)
    return sorted(tasks, key=lambda task: (task.entry.content, task.entry.hash, task.target)), left_out


def guess(entry: Entry) -> RealTask:
    """Return a table with the target that RULE describes."""
    names = [*(facts.name for facts in entry.columns), *entry.left_out]
    return RealTask(entry, guess_target(names, entry.last), is_guessed=True)


def named_targets(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the targets that tasks.csv names, by the CSV file; raises PriorError for a table that cannot be read."""
    path = folder / TASKS
    targets: dict[str, set[str]] = {}
    for row in read_tasks(path, COLUMNS) if path.exists() else []:
        if row["item"].lower().endswith(".csv"):
            targets.setdefault(row["item"], set()).add(row["target"])
    return {item: tuple(sorted(names)) for item, names in targets.items()}


def tasks_of_file(folder: Path, entries: dict[str, Entry]) -> list[RealTask]:
    """Return the tasks of tasks.csv, in its order, or [] without such a file. Raises PriorError for a faulty file."""
    # The rows of the file, which name files and targets, none of them twice.
    path = folder / TASKS
    if not path.exists():
        return []
    rows = read_tasks(path, COLUMNS)
    unknown = [str(row["item"]) for row in rows if row["item"] not in entries]
    if unknown:
        raise PriorError(f"{path} lists files that are not there, or of no known kind: {shortened(unknown)}")
    aimless = [row["item"] for row in rows if not row["target"]]
    if aimless:
        raise PriorError(f"{path} names no target of {shortened(aimless)}")
    counts = Counter((row["item"], row["target"]) for row in rows)
    twice = [f"{item} with the target {target}" for (item, target), count in counts.items() if count > 1]
    if twice:
        raise PriorError(f"{path} lists twice: {shortened(twice)}")

    # A file may be in several rows, with different targets, but is in one family.
    tasks = []
    families: dict[str, set[str]] = {}
    for row in rows:
        family = (row.get("family") or "").strip()
        families.setdefault(row["item"], set()).add(family)
        drop, categorical = named_columns(row)
        tasks.append(RealTask(entries[row["item"]], row["target"], drop, categorical, family=family))
    divided = sorted(item for item, names in families.items() if len(names) > 1)
    if divided:
        raise PriorError(f"{path} gives several families to {shortened(divided)}")
    return tasks


def read_tasks(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Read the rows of a table of tasks; raises PriorError if it cannot be read or lacks some of these columns."""
    try:
        text, form = without_declaration(decode_text(path.read_bytes()))
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(lines, restval="", delimiter=separator_of(text, form))
        rows = list(reader)
        names = reader.fieldnames or ()
    except (OSError, LeftOut, csv.Error) as error:
        raise PriorError(f"{path} cannot be read: {error}") from None
    missing = [column for column in columns if column not in names]
    if missing:
        raise PriorError(f"{path} lacks the columns {', '.join(missing)}")
    return rows


def named_columns(row: dict[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that a row of a table of tasks drops, and those that it calls categorical."""
    return split_names(row.get("drop") or ""), split_names(row.get("categorical") or "")


def split_names(text: str) -> tuple[str, ...]:
    """Split names at semicolons, or without any at spaces."""
    names = text.split(";") if ";" in text else text.split()
    return tuple(name.strip() for name in names if name.strip())


def fingerprint_of_tasks(tasks: Iterable[RealTask]) -> str:
    """Return a hash of tables, of how they are read, and of their targets."""
    tasks = list(tasks)
    version = max((task.entry.version for task in tasks), default=OLDEST)
    values = [(task.entry.hash, task.target, task.drop, task.categorical, task.family) for task in tasks]
    return blake2b(json.dumps([version, values]).encode(), digest_size=8).hexdigest()


def columns_left_out(tasks: Iterable[RealTask], most: int) -> list[str]:
    """Describe columns that are not used, in a line for the user, or []."""
    columns = {}
    for task in tasks:
        for name, reason in task.entry.left_out.items():
            if name not in task.drop:
                columns[f"{name!r} of {task.entry.path}"] = reason
    return [f"{len(columns)} columns left out: {reasons(columns, most)}"] if columns else []


def reading_remarks(tasks: Iterable[RealTask], most: int) -> list[str]:
    """Describe how files were read, where users should know it, in a line for the user, or []."""
    lines = {f"{task.entry.path}: {remark}": None for task in tasks for remark in task.entry.remarks}  # a file once
    return [f"how files are read: {shortened(lines, most, '; ')}"] if lines else []


def is_identifier(name: str, distinct: int, rows: int) -> bool:
    """Whether a column is called id, customer_id, customerId or rownames, and has a different value in each row."""
    return distinct == rows and IDENTIFIER.fullmatch(name) is not None


def are_names(distinct: int, known: int) -> bool:
    """Whether so many different texts in so many rows with a value are rather names than categories."""
    if known >= MANY_ROWS:
        return distinct >= MOSTLY_DIFFERENT * known
    return known >= ROWS_TO_TELL and distinct == known


def identifiers(tasks: Iterable[RealTask], drop: str) -> list[str]:
    """Describe features that look like identifiers, in a line for the user, or []. drop: the setting to drop them."""
    columns = []
    for task in tasks:
        for facts in task.columns:
            if facts.name != task.target and looks_like_identifier(facts, task.entry.rows):
                columns.append(f"{facts.name!r} of {task.entry.path}")
    if not columns:
        return []
    return [f"{len(columns)} columns look like identifiers; {drop} leaves them out: {shortened(columns)}"]


def looks_like_identifier(facts: ColumnFacts, rows: int) -> bool:
    """Whether a column has the name of an identifier or texts like names; row numbers are left out already."""
    if is_identifier(facts.name, facts.distinct, rows):
        return True
    return facts.kind == "category" and are_names(facts.distinct, facts.known)


def reasons(left_out: dict[str, str], most: int = 3) -> str:
    return shortened((f"{name} ({reason})" for name, reason in left_out.items()), most, "; ")


def shortened(texts: Iterable[str], most: int = 5, between: str = ", ") -> str:
    """Join the first texts, with the number of others."""
    texts = list(texts)
    joined = between.join(texts[:most])
    if len(texts) > most:
        joined += f" and {len(texts) - most} more"
    return joined
