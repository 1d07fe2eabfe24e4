"""The tasks of suite=openml: a folder that the package openml has filled, read without it and without a network.

openml_tasks.csv lists the tasks of each protocol by their numbers on OpenML; the section OpenML of README.md says
where the lists and the protocols come from, and how exact they are. These files of the folder are read:

org/openml/www/tasks/ID/task.xml                data set, target and kind of the task
org/openml/www/tasks/ID/datasplits.arff         labeled and query rows of each repeat and fold
org/openml/www/datasets/ID/description.xml      name, and columns that are no features
org/openml/www/datasets/ID/dataset_ID.pq        the table, or dataset.arff

The package itself is only used for downloads: when it reads the folder, it also unpickles other files there, which
runs code of whoever made them, and it deletes the files of a task that it cannot read.
"""

from __future__ import annotations

import csv
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
from sklearn.model_selection import StratifiedKFold, train_test_split
from tqdm import tqdm

from priors.real.preprocessing import as_numbers, reads_as_numbers
from tabicl_train.console import counted, first_line, info, print_line
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.evaluation.keel import read_arff
from tabicl_train.evaluation.suites import Protocol, Source, Split, Task, make_features

OPENML_TASKS = Path(__file__).with_name("openml_tasks.csv")
SERVER = Path("org", "openml", "www")  # www.openml.org
TAG = "{http://openml.org/openml}"
KINDS = {"1": "classes", "2": "numbers"}  # supervised classification and regression, by task_type_id

Fold = tuple[np.ndarray, np.ndarray]  # indices of labeled and of query rows

NANO = Protocol("nano", 5, 1000, "a random forest has 0.8068 (arXiv 2606.03681)")
TABARENA_LITE = Protocol("tabarena_lite", 1, None)
CC18_D3 = Protocol(
    "cc18_d3",
    5,
    1000,
    "CatBoost has 0.9023, a random forest 0.8933, LightPFN with one estimator 0.9109 (GioOtto/LightPFN)",
)
PROTOCOLS = {protocol.name: protocol for protocol in (NANO, TABARENA_LITE, CC18_D3)}
WITH_OWN_FOLDS = (NANO, CC18_D3)  # instead of those of OpenML
MOST_FEATURES = 100  # of nano and cc18_d3
FOLDS = 5  # of both
NANO_SEED = 11  # of the columns, rows and folds of nano
LEAST_CLASS_ROWS = 5  # of a class in cc18_d3, if it has them


@dataclass
class Sample:
    """What a protocol takes of a table."""

    rows: np.ndarray
    columns: np.ndarray
    folds: list[Fold]  # positions in `rows`


@dataclass
class FoldedTask(Task):
    """A table with fixed folds; `splits` yields as many of them as are asked for."""

    folds: list[Fold]
    usual_splits: int
    is_pooled: bool  # whether a score is one of all folds together, instead of a mean over them

    @property
    def sizes(self) -> dict[str, int]:
        """Those of the first fold."""
        return super().sizes | {"labeled_rows": len(self.folds[0][0])}

    def splits(self, number: int | None) -> Iterator[Split]:
        """Yield the first folds; None stands for those of the protocol."""
        for labeled, query in self.folds[: number or self.usual_splits]:
            yield Split(self.X, self.y, labeled, query)

    def scored_together(self, number: int | None) -> Iterator[list[Split]]:
        """Yield the folds one by one, or all of them at once."""
        if self.is_pooled:
            yield list(self.splits(number))
        else:
            yield from super().scored_together(number)


@dataclass
class OpenMLSource(Source):
    """A task of OpenML before it is read; without a protocol it has the folds of its first repeat, and all rows."""

    place: Path = Path()
    task: int = 0

    @property
    def files(self) -> list[Path]:
        """The table, what describes it and the task, and the folds."""
        dataset, _, _ = read_openml_task(self.place, self.task)
        description = self.place / "datasets" / str(dataset) / "description.xml"
        described = [self.place / "tasks" / str(self.task) / "task.xml", description]
        return [*super().files, *described, folds_path(self.place, self.task)]

    def load(self, rows: int | None) -> FoldedTask:
        """Read it.

        Parameters
        ----------
        rows : int, optional
            Most rows; by default those of the protocol, or all without one.

        Raises
        ------
        ConfigError
            If it cannot be read.
        """
        # The table.
        protocol = self.protocol
        frame, target = self.read()
        y = target_values(frame.pop(target), self.numbers)
        limit = rows
        if rows is None and protocol is not None:
            limit = protocol.rows

        # The rows, columns and folds of the protocol.
        splits = None if protocol is None else protocol.splits
        if protocol == NANO:
            sample = sample_of_nano(y, frame.shape[1], limit)
        elif protocol == CC18_D3:
            sample = sample_of_cc18_d3(y, frame.shape[1], limit, self.task)
        else:
            folds = read_folds(self.place, self.task, len(y))
            sample = sample_of_openml(y, frame.shape[1], limit, [fold for _, fold in folds])
            if splits is None:
                splits = sum(repeat == 0 for repeat, _ in folds)

        X = make_features(frame.iloc[sample.rows, sample.columns].reset_index(drop=True))
        y = y[sample.rows]
        if not self.numbers:
            _, y = np.unique(y, return_inverse=True)  # a sample may lack a class
        return FoldedTask(self.name, X, y, sample.folds, splits, is_pooled=protocol == NANO)


def openml_tasks(folder: str | None, numbers: bool, tasks: str | None = None) -> list[Source]:
    """List the tasks of suite=openml, unread.

    Parameters
    ----------
    folder : str
        The cache of the package openml.
    numbers : bool
        Whether numbers are predicted. Tasks of the other kind are left out.
    tasks : str
        The name of a protocol, or numbers of tasks: 31,37.

    Returns
    -------
    list of Source

    Raises
    ------
    ConfigError
        If one of the tasks is not in the folder or needs a package, or all are of the other kind.
    """
    # Which tasks, and whether all are there.
    if tasks is None:
        raise ConfigError([f"tasks is missing; suite=openml needs one of {', '.join(PROTOCOLS)}, or numbers: 31,37"])
    if folder is None:
        raise ConfigError(["folder is missing; suite=openml needs one that holds its tasks: see evaluation/README.md"])
    place = Path(folder) / SERVER
    listed = chosen_tasks(tasks)
    check_complete(folder, tasks, listed)
    protocol = PROTOCOLS.get(tasks)
    most_splits = protocol.splits if protocol in WITH_OWN_FOLDS else None

    # Those of the kind that the network predicts.
    found: list[Source] = []
    others = 0
    for task in listed:
        dataset, _, kind = read_openml_task(place, task)
        if kind != kind_name(numbers):
            others += 1
            continue
        name = dataset_name(place, dataset)
        if protocol is None:
            name = f"{name} ({task})"  # so that a task has another name than with a protocol, whose scores differ
        path = table_path(place, dataset)
        if not is_installed("pyarrow" if path.suffix == ".pq" else "arff"):
            how = install("pyarrow liac-arff", "openml")
            raise ConfigError([f"{path.suffix} files need a package: {how}"])
        read = partial(read_openml_table, place, task)
        source = OpenMLSource(name, read, numbers, path, most_splits=most_splits, protocol=protocol)
        source.place = place
        source.task = task
        found.append(source)

    if not found:
        kinds = "classes, but the network predicts numbers" if numbers else "numbers, but the network predicts classes"
        raise ConfigError([f"tasks is {tasks!r}, whose targets are all {kinds}"])
    if others and protocol is None:
        info(f"{counted(others, 'task')} of the other kind left out: the network predicts {kind_name(numbers)}")
    return found


def kind_name(numbers: bool) -> str:
    return "numbers" if numbers else "classes"


def chosen_tasks(tasks: str) -> list[int]:
    """Return the numbers of the tasks of a protocol, or those that are given; raises ConfigError."""
    if tasks in PROTOCOLS:
        found = []
        with open(OPENML_TASKS, newline="") as file:
            for row in csv.DictReader(file):
                if tasks in row["lists"].split():
                    found.append(int(row["task"]))
        return found
    words = [word.strip() for word in tasks.split(",")]
    if not all(word.isdecimal() for word in words):
        known = ", ".join(PROTOCOLS)
        raise ConfigError([f"tasks is {tasks!r}; it must be one of {known}, or numbers of OpenML tasks: 31,37"])
    return [int(word) for word in dict.fromkeys(words)]


def check_complete(folder: str, tasks: str, listed: list[int]) -> None:
    """Raise ConfigError if the folder lacks files of a task, with the command that downloads them."""
    place = Path(folder) / SERVER
    missing = [task for task in listed if not is_complete(place, task, needs_folds(tasks))]
    if not missing:
        return
    which = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
    number = f"{len(missing)} of {counted(len(listed), 'task')} ({which})"
    raise ConfigError([f"{folder} lacks {number}; where there is a network: {download_command(folder, tasks)}"])


def download_command(folder: str, tasks: str) -> str:
    words = ["python", "-m", "tabicl_train.evaluation.openml_cache", f"folder={folder}", f"tasks={tasks}"]
    return shlex.join(words)


def needs_folds(tasks: str) -> bool:
    """Whether tasks are scored on the folds of OpenML."""
    return PROTOCOLS.get(tasks) not in WITH_OWN_FOLDS


def is_complete(place: Path, task: int, with_folds: bool) -> bool:
    """Whether the files of a task are in the folder."""
    if not (place / "tasks" / str(task) / "task.xml").is_file():
        return False
    if with_folds and not folds_path(place, task).is_file():
        return False
    dataset, _, _ = read_openml_task(place, task)
    description = place / "datasets" / str(dataset) / "description.xml"
    return description.is_file() and table_path(place, dataset).is_file()


def folds_path(place: Path, task: int) -> Path:
    return place / "tasks" / str(task) / "datasplits.arff"


def table_path(place: Path, dataset: int) -> Path:
    """Return the file with a table, which the package downloads as ARFF where it cannot get Parquet."""
    folder = place / "datasets" / str(dataset)
    parquet = folder / f"dataset_{dataset}.pq"
    arff = folder / "dataset.arff"
    return arff if arff.is_file() and not parquet.is_file() else parquet


def read_openml_task(place: Path, task: int) -> tuple[int, str, str]:
    """Return the data set of a task, its target, and whether it predicts classes or numbers; raises ConfigError."""
    path = place / "tasks" / str(task) / "task.xml"
    root = read_xml(path)
    kind = KINDS.get(root.findtext(f"{TAG}task_type_id", ""))
    if kind is None:
        name = root.findtext(f"{TAG}task_type", "unknown")
        raise ConfigError([f"task {task} of OpenML is of the kind {name!r}; supervised tasks can be scored"])
    data = root.find(f".//{TAG}data_set")
    if data is None:
        raise ConfigError([f"{path} names no data set"])
    number = data.findtext(f"{TAG}data_set_id", "")
    if not number.strip().isdecimal():
        raise ConfigError([f"{path} names the data set {number!r}, which is not a number"])
    return int(number), data.findtext(f"{TAG}target_feature", ""), kind


def read_xml(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigError([f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"]) from None


def dataset_name(place: Path, dataset: int) -> str:
    return read_xml(place / "datasets" / str(dataset) / "description.xml").findtext(f"{TAG}name", str(dataset))


def read_openml_table(place: Path, task: int) -> tuple[pd.DataFrame, str]:
    """Return the table of a task, without identifiers and columns that OpenML ignores, and its target."""
    dataset, target, _ = read_openml_task(place, task)
    description = read_xml(place / "datasets" / str(dataset) / "description.xml")
    ignored = [tag.text for tag in description.iter(f"{TAG}row_id_attribute")]
    ignored += [tag.text for tag in description.iter(f"{TAG}ignore_attribute")]
    path = table_path(place, dataset)
    try:
        frame = pd.read_parquet(path) if path.suffix == ".pq" else read_arff_table(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    if target not in frame:
        raise ConfigError([f"{path} has no column {target}, which task {task} predicts"])
    features_left_out = [name for name in ignored if name in frame and name != target]
    return frame.drop(columns=features_left_out), target


def read_arff_table(path: Path) -> pd.DataFrame:
    """Read a table in ARFF, whose texts may hold commas and quotes; nominal attributes become categories."""
    import arff

    with open(path, encoding="utf-8") as file:
        content = arff.load(file)
    frame = pd.DataFrame(content["data"], columns=[name for name, _ in content["attributes"]])
    for name, kind in content["attributes"]:
        if isinstance(kind, list):  # of the categories
            frame[name] = pd.Categorical(frame[name], kind)
    return frame


def read_folds(place: Path, task: int, num_rows: int) -> list[tuple[int, Fold]]:
    """Return the folds of a task in the order of repeats, each with the number of its repeat.

    Raises
    ------
    ConfigError
        If a fold has no labeled or no query rows, a row that the table lacks, or a row twice, or if a row is a query
        row of two folds of a repeat.
    """
    # The table of the folds: a row for each row of the data in each fold.
    path = folds_path(place, task)
    try:
        table = read_arff(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    if missing := [name for name in ("type", "rowid", "repeat", "fold") if name not in table]:
        raise ConfigError([f"{path} has no column {', '.join(missing)}"])

    # Its values, which are indices later.
    for name, most in (("rowid", num_rows - 1), ("repeat", math.inf), ("fold", math.inf)):
        numbers = pd.to_numeric(table[name], errors="coerce")
        wrong = table[name][~((numbers >= 0) & (numbers <= most) & (numbers % 1 == 0))]
        if len(wrong):
            allowed = f"0..{most}" if name == "rowid" else "0, 1, ..."
            raise ConfigError([f"{path} has the {name} {wrong.iloc[0]}; it must be one of {allowed}"])
        table[name] = numbers.astype(int)
    wrong = table["type"][~table["type"].isin(["TRAIN", "TEST"])]
    if len(wrong):
        raise ConfigError([f"{path} has the type {wrong.iloc[0]}; it must be TRAIN or TEST"])

    # The folds.
    folds = []
    for (repeat, fold), rows in table.groupby(["repeat", "fold"]):
        is_labeled = (rows["type"] == "TRAIN").to_numpy()
        index = rows["rowid"].to_numpy()
        problem = None
        if is_labeled.all() or not is_labeled.any():
            problem = f"no {'query' if is_labeled.all() else 'labeled'} rows"
        elif rows["rowid"].duplicated().any():
            problem = f"the row {rows['rowid'][rows['rowid'].duplicated()].iloc[0]} twice"
        if problem is not None:
            raise ConfigError([f"{path}: fold {fold} of repeat {repeat} has {problem}"])
        folds.append((int(repeat), (index[is_labeled], index[~is_labeled])))
    if not folds:
        raise ConfigError([f"{path} has no folds"])

    # Each row is predicted once in a repeat.
    tested = table[table["type"] == "TEST"]
    again = tested[tested.duplicated(["repeat", "rowid"])]
    if len(again):
        which = f"row {again['rowid'].iloc[0]}"
        raise ConfigError([f"{path}: {which} is a query row of two folds of repeat {again['repeat'].iloc[0]}"])
    return folds


def target_values(target: pd.Series, numbers: bool) -> np.ndarray:
    """Return the target as numbers, float64 (rows,), or as classes in sorted order, int64 (rows,)."""
    if target.isna().any():
        raise ConfigError([f"{target.name} has missing values"])
    if not numbers:
        return np.unique(target.astype(str), return_inverse=True)[1]
    if not reads_as_numbers(target):
        raise ConfigError([f"{target.name} does not hold numbers"])
    return as_numbers(target)


def sample_of_nano(y: np.ndarray, features: int, limit: int) -> Sample:
    """Sample columns, rows and folds as the evaluation of modded-nanotabpfn does, all of them with one seed."""
    columns = np.arange(features)
    if features > MOST_FEATURES:
        columns = np.random.default_rng(NANO_SEED).choice(features, MOST_FEATURES, replace=False)
    rows = np.arange(len(y))
    if len(y) > limit:
        _, rows = train_test_split(rows, test_size=limit, stratify=y, random_state=NANO_SEED)
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=NANO_SEED)
    return Sample(rows, columns, list(splitter.split(rows, y[rows])))


def sample_of_cc18_d3(y: np.ndarray, features: int, limit: int, task: int) -> Sample:
    """Sample rows, columns and folds as LightPFN's evaluation does, from one generator for each task."""
    rng = np.random.default_rng([0, task, 0])  # seed, task, repeat
    rows = np.arange(len(y)) if len(y) <= limit else stratified_rows(rng, y, limit)
    columns = np.arange(features)
    if features > MOST_FEATURES:
        columns = np.sort(rng.choice(features, MOST_FEATURES, replace=False))
    splitter = StratifiedKFold(FOLDS, shuffle=True, random_state=int(rng.integers(2**31)))
    return Sample(rows, columns, list(splitter.split(rows, y[rows])))


def stratified_rows(rng: np.random.Generator, y: np.ndarray, limit: int) -> np.ndarray:
    """Draw rows in the proportions of the classes, but five of each class that has them."""
    counts = np.bincount(y)
    least = np.minimum(counts, LEAST_CLASS_ROWS)
    numbers = np.maximum(counts * limit // len(y), least)
    while numbers.sum() > limit:
        numbers[np.argmax(numbers - least)] -= 1
    drawn = [rng.choice(np.flatnonzero(y == label), number, replace=False) for label, number in enumerate(numbers)]
    rows = np.concatenate(drawn)
    if len(rows) < limit:  # shares are rounded down
        others = np.setdiff1d(np.arange(len(y)), rows)
        rows = np.concatenate([rows, rng.choice(others, limit - len(rows), replace=False)])
    return np.sort(rows)


def sample_of_openml(y: np.ndarray, features: int, limit: int | None, folds: list[Fold]) -> Sample:
    """Take all columns and the folds of OpenML; with a limit, those rows of each fold that are in a sample."""
    columns = np.arange(features)
    rows = np.arange(len(y))
    if limit is None or len(y) <= limit:
        return Sample(rows, columns, folds)
    stratify = None if y.dtype.kind == "f" else y
    rows, _ = train_test_split(rows, train_size=limit, stratify=stratify, random_state=0)
    position = np.full(len(y), -1)
    position[rows] = np.arange(limit)
    kept = []
    for labeled, query in folds:
        kept.append((position[labeled][position[labeled] >= 0], position[query][position[query] >= 0]))
    return Sample(rows, columns, kept)


def download(folder: str, tasks: str) -> None:
    """Download what a folder lacks of the tasks, with the package openml; raises ConfigError."""
    try:
        import openml
    except ImportError:
        raise ConfigError([f"downloads need the package: {install('openml', 'openml')}"]) from None
    with_folds = needs_folds(tasks)
    place = Path(folder) / SERVER
    listed = chosen_tasks(tasks)
    missing = [task for task in listed if not is_complete(place, task, with_folds)]
    openml.config.set_root_cache_directory(folder)
    for task in tqdm(missing, unit="task", file=sys.stderr):
        try:
            openml.tasks.get_task(task, download_splits=with_folds, download_data=True, download_qualities=False)
        except Exception as error:  # of any type: the network, the server, a full disk
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError([f"task {task} cannot be downloaded ({reason}); the same command continues"]) from None
    check_complete(folder, tasks, listed)
    info(f"{counted(len(listed), 'task')} of {tasks}: {folder}")


def main(arguments: list[str]) -> None:
    settings = dict(argument.partition("=")[::2] for argument in arguments)
    try:
        if set(settings) != {"folder", "tasks"} or not all(settings.values()):
            usage = "python -m tabicl_train.evaluation.openml_cache folder=CACHE tasks="
            raise ConfigError([f"usage: {usage}{'|'.join(PROTOCOLS)}|ID,ID"])
        download(**settings)
    except ConfigError as error:
        print_line(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
