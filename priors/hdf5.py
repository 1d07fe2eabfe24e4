"""hdf5: tables in one file that nanoTabPFN and TFM-Playground read too, with the sizes and splits stored there.

The file holds T tables, padded with zeros to the most rows N and the most features M of them:

X                        float32 (T, N, M)
y                        float32 (T, N): classes 0, 1, ..., or numbers
num_datapoints           int32 (T,): rows of each table; without it, all have N
num_features             int32 (T,): features of each table; without it, all have M
train_test_split_index   int32 (T,): labeled rows of each table, which come first
single_eval_pos          the same under the name that nanoTabPFN reads; one of both is enough
problem_type             text: classification or regression
max_num_classes          (1,): no label is this or more; 0 for regression
original_batch_size      (1,): consecutive tables, from the first on, that have the same rows and labeled rows

Files may come from anyone, so only plain datasets of the file itself are read: links, virtual datasets and external
storage name other files.

The loaders of nanoTabPFN and TFM-Playground take the labeled rows of the first table of a batch for all of it, and rows
of padding for rows of the table. So `dump` writes only files whose batches have tables of equal rows and labeled rows.

In files with the attribute `format`, which `dump` writes, tables are finished as those of other priors; a table that is
not standardized there is refused. Those of other programs are clamped and standardized here, as networks expect it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch

from priors.disk import Request, fixed_order, is_raw, passes_in_words, portable, start_process
from priors.finish import Rejected, clamp_and_standardize, standardize_target, use_again
from priors.prior import Prior
from priors.random import STREAM_VERSION, Seed, as_seed, rng_at
from priors.realism import fill
from priors.table import MIN_ROWS, PriorError, Table, TableSpec

__all__ = ["HDF5"]

FORMAT = "tabicl-train tables 1"
DELETE_FORMAT = "delete that attribute, and tables are standardized here"
MOST_SIZE = 3.0  # of the values of a column, if the table is said to be standardized
PAGE = "priors/README.md says what such a file holds"
NUMBERS = "biuf"  # kinds of NumPy types: truth values, whole numbers, floats
TEXTS = "SO"
KINDS = ("classification", "regression")
SPLITS = ("train_test_split_index", "single_eval_pos")
CHUNK_BYTES = 2**20  # of a piece that is compressed and read as a whole; all of it fits into the cache of an open file
# Of an open file: TFM-Playground compresses whole batches, each of which would be read again for each of its tables.
CACHE_BYTES = 2**26
HASHED = 64  # tables, at equal distances, whose values enter the hash of a file
MOST_COMPRESSED = 2**10  # times smaller; gzip reaches 1032 with zeros alone
BLOCK = 2**24  # labels that are read at a time

Drawn: TypeAlias = tuple[np.ndarray, np.ndarray, int]  # X, y and labeled rows of a table


@dataclass(frozen=True)
class StoredSpec(TableSpec):
    """What is asked of a prior whose tables are stored: the table with this number in a run, with its own sizes."""

    number: int = 0


@dataclass(frozen=True)
class Contents:
    """What a file says about its tables.

    Attributes
    ----------
    sizes : array
        Int64 (T, 3): rows, labeled rows and features of each table.
    kind : str or None
        classification or regression; None if the file does not say it.
    most_classes : int
        No label is this or more.
    is_finished : bool
        Whether tables are used as they are.
    is_standardized : bool
        Whether they must be standardized already: those of a file of ours, unless its prior leaves them raw.
    fingerprint : str
        A hash of the sizes, and of the values of some tables.
    fixed_order : str or None
        Why columns and rows must keep their order, if they must.
    """

    sizes: np.ndarray
    kind: str | None
    most_classes: int
    is_finished: bool
    is_standardized: bool
    fingerprint: str
    fixed_order: str | None


@dataclass
class HDF5(Prior):
    """Tables of an HDF5 file, one after the other, with the rows, labeled rows and features that they have there.

    The file is one of `tabicl-prior dump format=hdf5`, nanoTabPFN or TFM-Playground. Table i of a step is the next one
    after those of the earlier steps, whatever the seed is.
    """

    file: str = ""
    """The file."""
    passes: int = field(default=1, metadata={"resume": "told"})  # the tables so far stay the same
    """How often the tables of the file may be used; then the run must end (trainer.max_steps). Each pass has other
    permutations of columns, rows (so that other rows are labeled) and classes."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        if not self.file:
            return ["file is not set; it is an HDF5 file of tables"]
        if not Path(self.file).is_file():
            return [f"file is {self.file!r}; there is no such file"]
        if self.passes < 1:
            return [f"passes is {self.passes}; it must be at least 1"]
        try:
            why_not = self.contents.fixed_order
        except PriorError as error:
            return [str(error)]
        if self.passes > 1 and why_not is not None:
            return [f"passes is {self.passes}; it must be 1, since {why_not}"]
        return []

    @cached_property
    def contents(self) -> Contents:
        """What the file says about its tables; raises PriorError if it cannot be used."""
        return read_contents(self.file)

    @property
    def classes(self) -> bool:  # type: ignore[override]
        """Whether the tables may have classes."""
        return self.contents.kind != "regression"

    @property
    def numeric_targets(self) -> bool:  # type: ignore[override]
        """Whether the tables may have numeric targets."""
        return self.contents.kind != "classification"

    @property
    def num_tables(self) -> int:  # type: ignore[override]
        """The number of tables in all passes."""
        return self.passes * len(self.contents.sizes)

    @property
    def stored_sizes(self) -> np.ndarray:  # type: ignore[override]
        """Rows, labeled rows and features of each table, int64 (T, 3)."""
        return self.contents.sizes

    @property
    def stored_classes(self) -> int:  # type: ignore[override]
        """No label is this or more; 0 for numeric targets."""
        return self.contents.most_classes

    def fingerprint(self) -> str:
        """Return a hash of the file, without which a run would be continued on other tables."""
        return self.contents.fingerprint

    def stored_spec(self, number: int, wanted: TableSpec) -> TableSpec:
        """Return the sizes of the table with this number in a run."""
        stored = len(self.contents.sizes)
        if number >= self.num_tables:
            advice = f"prior.passes={number // stored + 1} uses them again"
            raise PriorError(f"{self.file} ends after {self.passes} x {stored:,} tables; {advice}")
        rows, labeled, features = self.contents.sizes[number % stored].tolist()
        return StoredSpec(
            rows,
            labeled,
            features,
            wanted.max_classes,
            group_seed=wanted.group_seed,
            keeps_missing=wanted.keeps_missing,
            number=number,
        )

    def pass_lines(self, stages: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return in which steps passes of the file begin; see Prior.pass_lines."""
        stored = len(self.contents.sizes)
        begins: list[int] = []
        tables = 0  # before a step
        step = 0
        for steps, tables_of_step in stages.values():
            end = tables + steps * tables_of_step
            next_pass = stored * (len(begins) + 1)
            while next_pass < end:
                begins.append(step + (next_pass - tables) // tables_of_step)
                next_pass += stored
            tables = end
            step += steps
        return [f"{stored:,} tables are stored; {passes_in_words(begins)}"] if begins else []

    @cached_property
    def handles(self) -> dict[int, Any]:
        """The open file, by the id of the process: after a fork a child must not use that of its parent."""
        return {}

    def opened(self) -> Any:
        """Return the file, open for reading."""
        import h5py

        process = os.getpid()
        if process not in self.handles:
            # Without a lock, which some shared file systems refuse; nothing is written here.
            self.handles[process] = h5py.File(self.file, "r", rdcc_nbytes=CACHE_BYTES, locking=False)
        return self.handles[process]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without the open file."""
        return {name: value for name, value in vars(self).items() if name != "handles"}

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Read the table that `stored_spec` has named; see Prior.sample."""
        if not isinstance(spec, StoredSpec):
            raise PriorError("tables of prior=hdf5 have sizes of their own; ask for one by stored_spec(number, spec)")
        number = spec.number % len(self.contents.sizes)
        N = spec.num_rows
        M = spec.num_features
        with reading(self.file):
            file = self.opened()
            X = needed(file, "X", self.file)[number, :N, :M].astype(np.float32)
            y = needed(file, "y", self.file)[number, :N]
        name = f"table {number} of {self.file}"
        if self.contents.is_standardized:
            check_standardized(X, y if spec.max_classes == 0 else None, name)
        if spec.max_classes == 0:
            labels = numbers(y, name)
            num_classes = 0
        else:
            labels = class_numbers(y, self.contents.most_classes, name)
            num_classes = int(labels.max()) + 1
        missing = ~np.isfinite(X)
        if self.contents.is_finished:
            columns = torch.from_numpy(X)
            target = labels
        else:
            columns, target = standardized(X, missing, labels, spec, name)
        table = Table(
            X=columns,
            y=target,
            train_size=spec.train_size,
            num_classes=num_classes,
            plan=name,
            missing=float(missing.mean()),
        )
        if spec.number == number:  # the first pass
            return table
        return use_again(table, rng_at(as_seed(seed), "pass"))


def standardized(
    X: np.ndarray, missing: np.ndarray, y: torch.Tensor, spec: TableSpec, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamp and standardize a table of another program, as `finish` does; nothing is permuted."""
    has_values = ~missing[: spec.train_size].all(0)  # a column that no labeled row has is worth nothing
    X = X[:, has_values]
    missing = missing[:, has_values]
    if missing.any():
        fill(X, missing, spec.train_size)
    columns = clamp_and_standardize(torch.from_numpy(X))
    varies = (columns != columns[:1]).any(0)
    if not varies.any():
        raise PriorError(f"all features of {name} are constant")
    if spec.keeps_missing:
        columns[torch.from_numpy(missing)] = torch.nan
    columns = columns[:, varies].contiguous()
    if spec.max_classes:
        return columns, y
    try:
        return columns, standardize_target(y)
    except Rejected:
        raise PriorError(f"the target of {name} is constant") from None


def numbers(y: np.ndarray, name: str) -> torch.Tensor:
    """Return a numeric target, float32."""
    if not np.isfinite(y).all():
        raise PriorError(f"the target of {name} has values that are not finite")
    return torch.from_numpy(y.astype(np.float32))


def class_numbers(y: np.ndarray, most: int, name: str) -> torch.Tensor:
    """Return labels, int64."""
    wrong = y[~((y >= 0) & (y < most) & (y == np.floor(y)))]
    if len(wrong):
        raise PriorError(f"the target of {name} has the value {wrong[0]:g}; labels are 0, 1, ..., {most - 1}")
    return torch.from_numpy(y.astype(np.int64))


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise PriorError in place of the errors of HDF5."""
    try:
        yield
    except ImportError:
        advice = "pip install h5py, or pip install -e '.[hdf5]' in the project's folder"
        raise PriorError(f"{path}: HDF5 files need h5py: {advice}") from None
    except PriorError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:  # h5py raises any of them
        raise PriorError(f"{path} cannot be read as an HDF5 file ({first_line(error)})") from None


def read_contents(path: str) -> Contents:
    """Read what a file says about its tables; raises PriorError for a file that cannot be used."""
    with reading(path):
        import h5py

        with h5py.File(path, "r", locking=False) as file:
            return contents_of(file, path)


def plain_dataset(file: Any, name: str, path: str, kinds: str = NUMBERS, count: int | None = None) -> Any | None:
    """Return a dataset of the file itself, unread; None if nothing has the name.

    Parameters
    ----------
    file : h5py.File
        The open file.
    name, path : str
        What is looked for, and what messages call the file.
    kinds : str
        Kinds of NumPy types, of which its values must be.
    count : int, optional
        How many values it must have; a file of a few bytes can say that it has 2^40.

    Raises
    ------
    PriorError
        For anything else. Links, virtual datasets and external storage can name any file of this machine, and none of
        them is followed.
    """
    import h5py

    links = file.id.links
    if not links.exists(name.encode()):
        return None
    if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
        what = "a link"
    elif not isinstance(found := file[name], h5py.Dataset):
        what = f"a {type(found).__name__.lower()}"
    elif found.is_virtual or found.external:
        what = "stored in other files"
    elif found.shape is None:
        what = "empty"
    elif found.dtype.kind not in kinds:
        what = f"of the type {found.dtype}"
    elif count is not None and math.prod(found.shape) != count:
        values = "one is needed" if count == 1 else f"there are {count} tables"
        raise PriorError(f"{name} of {path} has {math.prod(found.shape)} values; {values}")
    else:
        return found
    values = "numbers" if kinds == NUMBERS else "text"
    raise PriorError(f"{name} of {path} is {what}; it must be a dataset of {values} in the file itself")


def needed(file: Any, name: str, path: str) -> Any:
    """Return what `plain_dataset` does; raises PriorError if nothing has the name."""
    found = plain_dataset(file, name, path)
    if found is None:
        raise PriorError(f"{path} has no {name}; {PAGE}")
    return found


def contents_of(file: Any, path: str) -> Contents:
    """Check an open file; see `read_contents`."""
    X = needed(file, "X", path)
    y = needed(file, "y", path)
    if X.ndim != 3 or y.shape != X.shape[:2] or len(X) == 0:
        raise PriorError(
            f"X of {path} has the shape {X.shape}, and y {y.shape}; they must be (tables, rows, features) and "
            "(tables, rows)"
        )
    stored = X.id.get_storage_size()
    if math.prod(X.shape) * X.dtype.itemsize > MOST_COMPRESSED * stored:
        raise PriorError(f"X of {path} has the shape {X.shape}, but only {stored:,} bytes are stored")

    def read(name: str) -> np.ndarray | None:
        """Read a number of each table; None if the file lacks them."""
        return whole_numbers(file, name, path, len(X))

    splits = {name: values for name in SPLITS if (values := read(name)) is not None}
    if not splits:
        raise PriorError(f"{path} has no {' or '.join(SPLITS)}; {PAGE}")
    labeled = splits[min(splits)]
    other = splits[max(splits)]  # the same one, if there are not both
    if (labeled != other).any():
        number = int(np.argmax(labeled != other))
        raise PriorError(
            f"{min(splits)} and {max(splits)} of {path} contradict each other: {labeled[number]} and {other[number]} "
            f"labeled rows of table {number}"
        )
    rows = read("num_datapoints")
    features = read("num_features")
    rows = np.full(len(X), X.shape[1]) if rows is None else rows
    features = np.full(len(X), X.shape[2]) if features is None else features
    sizes = np.stack([rows, labeled, features], axis=1)
    is_possible = (rows >= MIN_ROWS) & (rows <= X.shape[1])
    is_possible &= (labeled >= 1) & (labeled < rows)
    is_possible &= (features >= 1) & (features <= X.shape[2])
    if not is_possible.all():
        number = int(np.argmin(is_possible))
        N, n, M = sizes[number]
        raise PriorError(
            f"table {number} of {path} has {N} rows, {n} of them labeled, and {M} features; there must be "
            f"{MIN_ROWS}..{X.shape[1]} rows, some of them labeled and some not, and 1..{X.shape[2]} features"
        )
    most_classes = stored_classes(file, path)
    kind = problem_type(file, path, most_classes)
    if kind == "regression":
        most_classes = 0
    elif most_classes is None:
        most_classes = classes_of_labels(y, path)
    attributes = own_attributes(file, path)
    return Contents(
        sizes=sizes,
        kind=kind,
        most_classes=most_classes,
        is_finished=attributes is not None,
        is_standardized=attributes is not None and not is_raw(attributes),
        fingerprint=fingerprint(file, sizes),
        fixed_order=None if attributes is None else fixed_order(attributes),
    )


def own_attributes(file: Any, path: str) -> dict[str, str] | None:
    """Return the attributes that `dump` has written; None for a file of another program. Raises PriorError."""
    if file.attrs.get("format") != FORMAT:
        return None
    attributes = {name: str(value) for name, value in file.attrs.items()}
    try:
        if isinstance(json.loads(attributes["options"]), dict) and "prior" in attributes:
            return attributes
    except (KeyError, ValueError):
        pass
    raise PriorError(f"{path} has the attribute format of tabicl-prior dump, but not its others; {DELETE_FORMAT}")


def check_standardized(X: np.ndarray, y: np.ndarray | None, name: str) -> None:
    """Raise PriorError for a table whose features, or whose numbers y, cannot have been standardized."""
    # Of a finished column the root mean square is 1, or some more where cells that were missing hold a mean. Numbers of
    # a real table are standardized by its labeled rows, and others may be far away.
    sizes = np.sqrt(np.mean(X.astype(np.float64) ** 2, axis=0))
    if y is not None:
        sizes = np.append(sizes, np.median(np.abs(y)))
    if not (sizes <= MOST_SIZE).all():
        problem = f"{name} is not standardized (the size of a value is {np.max(sizes):.3g})"
        raise PriorError(f"{problem}, as the attribute format says that it is; {DELETE_FORMAT}")


def whole_numbers(file: Any, name: str, path: str, count: int) -> np.ndarray | None:
    """Read so many whole numbers, int64; None if nothing has the name. Raises PriorError."""
    found = plain_dataset(file, name, path, count=count)
    if found is None:
        return None
    values = np.asarray(found[()]).reshape(-1)
    with np.errstate(invalid="ignore"):
        numbers = values.astype(np.int64)
    if (numbers != values).any():
        wrong = values[np.argmax(numbers != values)]
        raise PriorError(f"{name} of {path} has the value {wrong}; it must hold whole numbers")
    return numbers


def stored_classes(file: Any, path: str) -> int | None:
    """Return max_num_classes; None if the file does not say it."""
    found = whole_numbers(file, "max_num_classes", path, 1)
    if found is None:
        return None
    if found[0] < 0:
        raise PriorError(f"max_num_classes of {path} is {found[0]}; it must be at least 0")
    return int(found[0])


def problem_type(file: Any, path: str, most_classes: int | None) -> str | None:
    """Return classification or regression, or None if the file does not say it."""
    by_classes = None if most_classes is None else KINDS[0 if most_classes > 0 else 1]
    found = plain_dataset(file, "problem_type", path, TEXTS, count=1)
    if found is None:
        return by_classes
    value = np.asarray(found[()]).reshape(-1)[0]
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if text not in KINDS:
        raise PriorError(f"problem_type of {path} is {text[:40]!r}; it must be {' or '.join(KINDS)}")
    if by_classes not in (None, text):
        raise PriorError(f"problem_type and max_num_classes of {path} contradict each other: {text}, {most_classes}")
    return text


def classes_of_labels(y: Any, path: str) -> int:
    """Return one more than the largest label."""
    size = max(1, BLOCK // y.shape[1])
    largest = max(np.fmax.reduce(y[start : start + size], axis=None) for start in range(0, len(y), size))
    if not np.isfinite(largest):
        raise PriorError(f"y of {path} has no values, or infinite ones")
    return int(largest) + 1


def fingerprint(file: Any, sizes: np.ndarray) -> str:
    """Hash the sizes of all tables, and the values of some: those of all would take seconds for each gigabyte."""
    digest = hashlib.sha256(np.ascontiguousarray(sizes, dtype="<i8").data)
    for number in np.unique(np.linspace(0, len(sizes) - 1, HASHED).astype(int)):
        N, _, M = sizes[number]
        digest.update(np.ascontiguousarray(file["X"][number, :N, :M], dtype="<f4").data)
        digest.update(np.ascontiguousarray(file["y"][number, :N], dtype="<f4").data)
    return digest.hexdigest()[:16]


def dump(
    prior: Prior,
    requests: Sequence[Request],
    path: str | Path,
    batch_size: int,
    max_classes: int,
    processes: int = 1,
    prepare: Callable[[], None] | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the requested tables to a file, which is there whole or not at all.

    Parameters
    ----------
    prior : Prior
        It draws them.
    requests : sequence of (address, TableSpec)
        In their order in the file.
    path : str or Path
        The file, which is replaced.
    batch_size : int
        So many consecutive tables have the same rows and labeled rows.
    max_classes : int
        Largest number of classes of a table; 0 for numeric targets.
    processes : int
        Processes that draw tables, a batch at a time.
    prepare : callable, optional
        Called by each process before it unpickles the prior.
    facts : mapping, optional
        What else the file holds about its tables, as attributes.

    Raises
    ------
    PriorError
        If a table cannot be drawn, a batch has tables of different rows or labeled rows, or the file cannot be written.
    """
    from joblib import Parallel, delayed
    from tqdm import tqdm

    path = Path(path)
    attributes = {
        "format": FORMAT,
        "stream_version": str(STREAM_VERSION),
        "seed": str(requests[0][0][0]),
        "prior": type(prior).__module__.rpartition(".")[2],
        "options": portable(json.dumps(asdict(prior))),
        **(facts or {}),
    }
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    pool = Parallel(processes, return_as="generator", initializer=start_process, initargs=(prepare,))
    try:
        with (
            TemporaryDirectory(prefix=".unfinished-", dir=path.parent, ignore_cleanup_errors=True) as scratch,
            tqdm(total=len(requests), unit="table") as bar,
        ):
            unfinished = Path(scratch, path.name)
            with create(unfinished, [spec for _, spec in requests], batch_size, max_classes) as file:
                file.attrs.update(attributes)
                first = 0
                for tables in pool(delayed(draw_batch)(prior, batch) for batch in batches):
                    write_batch(file, first, tables)
                    first += len(tables)
                    bar.update(len(tables))
            os.replace(unfinished, path)
    except BrokenProcessPool:
        raise PriorError("a process that was drawing tables was killed, perhaps for lack of memory") from None
    except OSError as error:
        raise PriorError(f"{path} cannot be written ({first_line(error)})") from None


def draw_batch(prior: Prior, requests: Sequence[Request]) -> list[Drawn]:
    """Draw tables, and return X, y and the number of labeled rows of each."""
    tables = [prior.sample(spec, address) for address, spec in requests]
    return [(table.X.cpu().numpy(), table.y.cpu().numpy(), table.train_size) for table in tables]


def create(path: Path, specs: Sequence[TableSpec], batch_size: int, max_classes: int) -> Any:
    """Create a file for tables of these sizes, and return it open."""
    import h5py

    T = len(specs)
    N = max(spec.num_rows for spec in specs)
    M = max(spec.num_features for spec in specs)  # a table whose constant columns were dropped has fewer
    chunk = min(max(CHUNK_BYTES // (4 * N * M), 1), batch_size, T)
    file = h5py.File(path, "w")
    file.create_dataset("X", (T, N, M), "f4", chunks=(chunk, N, M), compression="lzf")
    file.create_dataset("y", (T, N), "f4", chunks=(chunk, N), compression="lzf")
    for name in ("num_datapoints", "num_features", *SPLITS):
        file.create_dataset(name, (T,), "i4")
    file["max_num_classes"] = np.array([max_classes], dtype="i4")
    file["original_batch_size"] = np.array([batch_size], dtype="i4")
    file.create_dataset("problem_type", data=KINDS[0 if max_classes else 1], dtype=h5py.string_dtype())
    return file


def write_batch(file: Any, first: int, tables: Sequence[Drawn]) -> None:
    """Write the tables of a batch, the first of which has this number; raises PriorError if their rows differ."""
    shapes = [(len(y), labeled) for _, y, labeled in tables]
    problem = mixed_rows(shapes, first)
    if problem is not None:
        raise PriorError(problem)
    N, labeled = shapes[0]
    M = max(X.shape[1] for X, _, _ in tables)
    batch = np.zeros((len(tables), N, M), np.float32)
    for place, (X, _, _) in zip(batch, tables, strict=True):
        place[:, : X.shape[1]] = X
    if np.isnan(batch).any():
        raise PriorError("a table has missing values, which nanoTabPFN and TFM-Playground cannot read")
    places = slice(first, first + len(tables))
    file["X"][places, :N, :M] = batch
    file["y"][places, :N] = np.stack([y for _, y, _ in tables])
    file["num_datapoints"][places] = N
    file["num_features"][places] = [X.shape[1] for X, _, _ in tables]
    for name in SPLITS:
        file[name][places] = labeled


def mixed_rows(shapes: Sequence[tuple[int, int]], first: int) -> str | None:
    """Return the problem with a batch of tables of these rows and labeled rows, if they differ."""
    others = [shape for shape in shapes if shape != shapes[0]]
    if not others:
        return None
    (N, n), (other_N, other_n) = shapes[0], others[0]
    return (
        f"tables {first}..{first + len(shapes) - 1} are one batch, for which the rows and the split of the first table "
        f"are taken ({N} rows, {n} labeled), but another one has {other_N} rows, {other_n} labeled"
    )


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
