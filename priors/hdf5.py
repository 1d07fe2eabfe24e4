"""hdf5: stored tables, those of `tabicl-prior dump` and those of nanoTabPFN and TFM-Playground.

A file holds T tables. `tabicl-prior dump` stores those of a run in a folder of files, where tables of all sizes lie one
after the other without padding:

X                        float32 (cells,): each table is (rows, features)
y                        float32 (rows,): classes 0, 1, ..., or numbers
num_datapoints           int32 (T,): rows of each table
num_features             int32 (T,): features of each table
train_test_split_index   int32 (T,): labeled rows of each table, which come first
single_eval_pos          the same under the name that nanoTabPFN reads; one of both is enough
problem_type             text: classification or regression
max_num_classes          (1,): no label is this or more; 0 for regression
missing                  float32 (T,): share of the cells that are missing, or were and are filled
crc32                    uint32 (T,): checksum of each table, see `table_checksum`
specs                    uint32 (T,): checksum of what was asked for, by which `dump` knows another curriculum

Others read one file whose tables are padded with zeros to the most rows N and the most features M of them:

X, y                     float32 (T, N, M) and (T, N)
num_datapoints           without it, all tables have N rows
num_features             without it, all tables have M features
original_batch_size      (1,): consecutive tables, from the first on, that have the same rows and labeled rows

Files may come from anyone, so only plain datasets of the file itself are read: links, virtual datasets and external
storage name other files.

In files with the attribute `format`, which `dump` writes, tables are finished as those of other priors, and a table
that does not match its checksum is refused. Tables of other programs have neither; they are clamped and standardized
here, as networks expect it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from priors.errors import message_line
from priors.finish import Rejected, clamp_and_standardize, standardize_target, use_again
from priors.nesting import read_json
from priors.options import option
from priors.prior import Prior
from priors.random import STREAM_VERSION, Seed, as_seed, rng_at
from priors.realism import fill_with_means
from priors.table import MIN_ROWS, Largest, PriorError, Table, TableSpec

__all__ = ["HDF5"]

FORMAT = "tabicl-train tables 2"
PAGE = "priors/README.md says what such a file holds"
NUMBERS = "biuf"  # kinds of NumPy types: truth values, whole numbers, floats
TEXTS = "SO"
KINDS = ("classification", "regression")
SPLITS = ("train_test_split_index", "single_eval_pos")
FIRST_TABLE = "first_table"  # attribute of a file in a folder: the number of its first table in the run
REAL_TABLES = "real_tables"  # attribute of draws from real tables: a hash of these
# Of an open file: TFM-Playground compresses whole batches, each of which would be read again for each of its tables.
CACHE_BYTES = 2**26
OPEN_FILES = 4  # of a process
HASHED = 64  # tables of other programs, at equal distances, whose values enter the hash of a file
MOST_COMPRESSED = 2**10  # times smaller; gzip reaches 1032 with zeros alone
BLOCK = 2**24  # labels that are read at a time


@dataclass(frozen=True)
class StoredSpec(TableSpec):
    """What is asked of a prior whose tables are stored: one of them, with its own sizes.

    Attributes
    ----------
    table : int
        The number of the table among the stored ones.
    is_first_pass : bool
        Whether it is used as it is stored.
    """

    table: int = 0
    is_first_pass: bool = True


@dataclass(frozen=True)
class Contents:
    """What a file says about its tables.

    Attributes
    ----------
    path : str
        The file.
    sizes : array
        Int64 (T, 3): rows, labeled rows and features of each table.
    starts : array or None
        Int64 (T, 2): where the cells and the labels of each table begin; None if tables are padded.
    kind : str or None
        classification or regression; None if the file does not say it.
    most_classes : int
        No label is this or more.
    attributes : mapping or None
        What `dump` has written; None for a file of another program, whose tables are not finished.
    missing : array or None
        Share of missing cells of each table, if the file is one of `dump`.
    crc32 : array or None
        Checksum of each table, if the file is one of `dump`.
    fingerprint : str
        A hash of the sizes, and of the checksums of all tables or the values of some.
    """

    path: str
    sizes: np.ndarray
    starts: np.ndarray | None
    kind: str | None
    most_classes: int
    attributes: Mapping[str, str] | None
    missing: np.ndarray | None
    crc32: np.ndarray | None
    fingerprint: str

    @property
    def first_table(self) -> int:
        """The number of the first table in the run that it was dumped for; 0 in a file that is not of a folder."""
        return int((self.attributes or {}).get(FIRST_TABLE, 0))


@dataclass
class HDF5(Prior):
    """Stored tables, one after the other, with the rows, labeled rows and features that they have there.

    They are those of a folder that `tabicl-prior dump` has written, or of one file of nanoTabPFN, TFM-Playground or
    `tabicl-prior dump format=file`. Table i of a step is the next one after those of the earlier steps, whatever the
    seed is.
    """

    file: str = ""
    """The file, or the folder that `tabicl-prior dump output=FOLDER` wrote its files to."""
    passes: int = option(1, at_least=1, resume="told")  # the tables so far stay the same
    """How often stored tables may be used: in a folder those from the first table of each stage on, otherwise those of
    the file; then the run must end (trainer.max_steps). Each pass has other permutations of columns, rows (so that
    other rows are labeled) and classes."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        if not self.file:
            return ["file is not set; it is an HDF5 file of tables, or the folder of tabicl-prior dump"]
        if not Path(self.file).exists():
            return [f"file is {self.file!r}; there is no such file or folder"]
        try:
            attributes = self.files[0].attributes
        except PriorError as error:
            return [str(error)]
        why_not = None if attributes is None else fixed_order(attributes)
        if self.passes > 1 and why_not is not None:
            return [f"passes is {self.passes}; it must be 1, since {why_not}"]
        return []

    @property
    def is_folder(self) -> bool:
        """Whether tables have the numbers that they had in the run that they were dumped for."""
        return Path(self.file).is_dir()

    @cached_property
    def files(self) -> list[Contents]:
        """What the files say about their tables, in their order; raises PriorError if they cannot be used."""
        return read_folder(Path(self.file)) if self.is_folder else [read_contents(self.file)]

    @cached_property
    def ends(self) -> list[int]:
        """How many tables the first, the first two, ... files hold."""
        return np.cumsum([len(contents.sizes) for contents in self.files]).tolist()

    @property
    def classes(self) -> bool:  # type: ignore[override]
        """Whether the tables may have classes."""
        return self.files[0].kind != "regression"

    @property
    def numeric_targets(self) -> bool:  # type: ignore[override]
        """Whether the tables may have numeric targets."""
        return self.files[0].kind != "classification"

    @cached_property
    def stored_sizes(self) -> np.ndarray:  # type: ignore[override]
        """Rows, labeled rows and features of each table, int64 (T, 3)."""
        return np.concatenate([contents.sizes for contents in self.files])

    @property
    def stored_classes(self) -> int:  # type: ignore[override]
        """No label is this or more; 0 for numeric targets."""
        return max(contents.most_classes for contents in self.files)

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the largest sizes of the stored tables; see Prior.largest."""
        most_rows, _, most_features = self.stored_sizes.max(0).tolist()
        return Largest(most_rows, most_features, None if numeric else self.stored_classes or None)

    def fingerprint(self) -> str:
        """Return a hash of the file, or of the dump of a folder, which may get more tables for a longer run."""
        first = self.files[0]
        if not self.is_folder or first.crc32 is None:
            return first.fingerprint
        return hashlib.sha256(f"{common_attributes(first)} {first.crc32[0]}".encode()).hexdigest()[:16]

    def pass_of(self, first: int) -> tuple[int, int, int]:
        """Return the tables that a stage passes.

        Parameters
        ----------
        first : int
            The number of the first table of the stage in the run.

        Returns
        -------
        base : int
            The number in the run from which passes are counted: that of the stage, or 0 in a file without steps.
        start, stop : int
            The tables of a pass among the stored ones; none if the two are equal.
        """
        if not self.is_folder:
            return 0, 0, self.ends[-1]
        start = stop = 0
        number = first
        for contents, end in zip(self.files, self.ends, strict=True):
            tables = len(contents.sizes)
            if contents.first_table <= number < contents.first_table + tables:
                if number == first:
                    start = end - tables + first - contents.first_table
                stop = end
                number = contents.first_table + tables
        return first, start, stop

    def stored_tables(self, first: int, count: int) -> int:
        """Count the tables of a stage that there are in all passes; see Prior.stored_tables."""
        base, start, stop = self.pass_of(first)
        return min(max(base + self.passes * (stop - start) - first, 0), count)

    def sizes_of_stage(self, first: int, count: int) -> np.ndarray:
        """Return the sizes of the tables of a stage; see Prior.sizes_of_stage."""
        base, start, stop = self.pass_of(first)
        # Passes over a single file do not begin with the stage, so the stage may use any of its tables.
        if base < first:
            return self.stored_sizes
        return self.stored_sizes[start : min(stop, start + count)]

    def stored_spec(self, number: int, first: int, wanted: TableSpec) -> TableSpec:
        """Return the sizes of the table with this number in a run; see Prior.stored_spec."""
        # Which stored tables the stage passes, and whether they suffice.
        if first not in self.passes_by_stage:
            self.passes_by_stage[first] = self.pass_of(first)
        base, start, stop = self.passes_by_stage[first]
        if number - base >= self.passes * (stop - start):
            stored = f"{stop - start:,} tables from number {base:,} on"
            raise PriorError(f"{self.file} has {stored}, to be used {self.passes} times; number {number:,} is missing")

        # Missing values were kept or filled when the tables were dumped.
        attributes = self.files[0].attributes
        if attributes is not None and attributes["keeps_missing"] != str(wanted.keeps_missing):
            needs = "keeps missing values" if wanted.keeps_missing else "needs missing values filled"
            raise PriorError(f"{self.file} was dumped for another network, and this one {needs}: dump again")

        times, within = divmod(number - base, stop - start)
        table = start + within
        rows, labeled, features = self.stored_sizes[table].tolist()
        return StoredSpec(
            rows,
            labeled,
            features,
            wanted.max_classes,
            keeps_missing=wanted.keeps_missing,
            table=table,
            is_first_pass=times == 0,
        )

    @cached_property
    def passes_by_stage(self) -> dict[int, tuple[int, int, int]]:
        """What `pass_of` has returned, by the number of the first table of a stage."""
        return {}

    def pass_lines(self, stages: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return in which steps passes of the stored tables begin; see Prior.pass_lines."""
        lines = []
        step = 0
        first = 0  # table of the stage
        for name, (steps, tables_of_step) in stages.items():
            base, start, stop = self.pass_of(first)
            end = first + steps * tables_of_step
            begins = []
            for times in range(1, self.passes):
                number = base + times * (stop - start)
                if first < number < end:
                    begins.append(f"pass {times + 1} begins with step {step + (number - first) // tables_of_step:,}")
            if len(begins) > 3:
                begins[1:-1] = ["..."]
            if begins:
                lines.append(f"stage {name}: {stop - start:,} tables are stored; {', '.join(begins)}")
            step += steps
            first = end
        return lines

    @cached_property
    def open_files(self) -> dict[tuple[int, str], tuple[Any, Any, Any]]:
        """Open files with their X and y, by the process: after a fork a child must not use those of its parent."""
        return {}

    def opened(self, path: str) -> tuple[Any, Any, Any]:
        """Return a file, open for reading, with its X and y."""
        import h5py

        key = os.getpid(), path
        if key not in self.open_files:
            if len(self.open_files) == OPEN_FILES:
                oldest, _, _ = self.open_files.pop(next(iter(self.open_files)))
                oldest.close()
            # Without a lock, which some shared file systems refuse; nothing is written here.
            file = h5py.File(path, "r", rdcc_nbytes=CACHE_BYTES, locking=False)
            self.open_files[key] = file, needed(file, "X", path), needed(file, "y", path)
        return self.open_files[key]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without open files."""
        return {name: value for name, value in vars(self).items() if name != "open_files"}

    def read(self, table: int) -> tuple[np.ndarray, np.ndarray, Contents, int]:
        """Read X and y of a stored table, and return its file and its number there as well."""
        place = bisect_right(self.ends, table)
        contents = self.files[place]
        number = table - self.ends[place] + len(contents.sizes)
        N, _, M = contents.sizes[number].tolist()
        with reading(contents.path):
            _, X, y = self.opened(contents.path)
            if contents.starts is None:
                return X[number, :N, :M], y[number, :N], contents, number
            cell, row = contents.starts[number].tolist()
            return X[cell : cell + N * M].reshape(N, M), y[row : row + N], contents, number

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Read the table that `stored_spec` has named; see Prior.sample."""
        if not isinstance(spec, StoredSpec):
            raise PriorError("stored tables have sizes of their own; ask for one by stored_spec(number, first, spec)")

        # The values, which match their checksum if the file has one.
        X, y, contents, number = self.read(spec.table)
        X = X.astype(np.float32, copy=False)
        name = f"table {number} of {contents.path}"
        if contents.crc32 is not None and contents.missing is not None:
            missing = contents.missing[number]
            if table_checksum(X, y, spec.train_size, missing) != contents.crc32[number]:
                raise PriorError(f"{name} is damaged (it does not match its checksum): delete the file, and dump again")

        # Labels or numbers; tables of other programs are standardized here.
        if spec.max_classes == 0:
            target = numbers(y, name)
            num_classes = 0
        else:
            target = class_numbers(y, contents.most_classes, name)
            num_classes = int(y.max()) + 1
        if contents.attributes is not None:
            columns = torch.from_numpy(X)
        else:
            is_missing = ~np.isfinite(X)
            missing = is_missing.mean()
            columns, target = standardized(X, is_missing, target, spec, name)
        table = Table(
            X=columns,
            y=target,
            train_size=spec.train_size,
            num_classes=num_classes,
            plan=name,
            missing=float(missing),
        )
        if spec.is_first_pass:
            return table
        return use_again(table, rng_at(as_seed(seed), "pass"))


def table_checksum(X: np.ndarray, y: np.ndarray, train_size: int, missing: float) -> int:
    """Return the CRC-32 of a table: of its sizes, its share of missing cells, and its values as float32."""
    code = zlib.crc32(np.array([*X.shape, train_size, missing], "<f8").data)
    code = zlib.crc32(np.ascontiguousarray(X, "<f4").data, code)
    return zlib.crc32(np.ascontiguousarray(y, "<f4").data, code)


def fixed_order(attributes: Mapping[str, str]) -> str | None:
    """Return why columns and rows of stored tables must keep their order; None if they may be permuted."""
    # The import is not at the top, since that module imports this one to find the priors.
    from priors import prior_class

    if REAL_TABLES in attributes:
        return "labeled and query rows of real tables may have to stay apart"
    components = json.loads(attributes["options"]).get("components", ())
    for name in (attributes.get("name", attributes["prior"]), *components):
        try:
            if prior_class(name).raw:
                return f"columns and rows of prior {name} have an order"
        except PriorError:
            # The plug-in of the prior was not named.
            return f"it is not known whether columns and rows of prior {name} have an order; name its plug-in"
    return None


def read_folder(folder: Path) -> list[Contents]:
    """Read what the files of a folder say about their tables, which must be those of one dump.

    Raises
    ------
    PriorError
        If there are none, or if a file cannot be used, is of another dump or stream version, or holds tables of
        another one.
    """
    paths = sorted(folder.glob("steps-*.h5"))
    if not paths:
        old = " (tabicl-prior dump of version 0.2.0 wrote others: dump again)" if any(folder.iterdir()) else ""
        raise PriorError(f"folder {folder} has no files steps-*.h5 of tabicl-prior dump{old}")
    files = sorted((read_contents(str(path)) for path in paths), key=lambda contents: contents.first_table)
    for contents, previous in zip(files, [files[0], *files], strict=False):
        check_dump(contents, common_attributes(previous))
        if contents is not previous and contents.first_table < previous.first_table + len(previous.sizes):
            raise PriorError(f"{contents.path} and {previous.path} hold the same tables of a run; delete one of them")
    return files


def check_dump(contents: Contents, expected: Mapping[str, str]) -> None:
    """Raise PriorError for a file that does not belong to a dump with these attributes, in this stream version."""
    found = contents.attributes or {}
    if found.get("stream_version") != str(STREAM_VERSION):
        raise PriorError(
            f"{contents.path} holds tables of stream version {found.get('stream_version')}, but the priors are at "
            f"stream version {STREAM_VERSION} and draw others: dump the tables again into another folder"
        )
    for key in {**expected, **common_attributes(contents)}:
        if found.get(key) != expected.get(key):
            raise PriorError(
                f"{contents.path} belongs to another dump: its {key} is {found.get(key)}, not {expected.get(key)}"
            )


def common_attributes(contents: Contents) -> dict[str, str]:
    """Return the attributes that all files of a folder have."""
    return {key: value for key, value in sorted((contents.attributes or {}).items()) if key != FIRST_TABLE}


def standardized(
    X: np.ndarray, missing: np.ndarray, y: torch.Tensor, spec: TableSpec, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamp and standardize a table of another program, as `finish` does; nothing is permuted."""
    # A column that no labeled row has is worth nothing.
    has_values = ~missing[: spec.train_size].all(0)
    X = X[:, has_values]
    missing = missing[:, has_values]
    if missing.any():
        fill_with_means(X, missing, spec.train_size)
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
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        # h5py raises any of them.
        raise PriorError(f"{path} cannot be read as an HDF5 file ({message_line(error)})") from None


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
        Kinds of NumPy types that its values may have.
    count : int, optional
        How many values it must have; a file of a few bytes can say that it has 2^40.

    Raises
    ------
    PriorError
        For anything else. Links, virtual datasets and external storage can name any file of this machine, and none of
        them is followed.
    """
    import h5py

    # The link itself is looked at, since `file[name]` would follow it.
    links = file.id.links
    if not links.exists(name.encode()):
        return None
    # The first thing that is wrong with it, if anything is.
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


def needed(file: Any, name: str, path: str, count: int | None = None) -> Any:
    """Return what `plain_dataset` does; raises PriorError if nothing has the name."""
    found = plain_dataset(file, name, path, count=count)
    if found is None:
        raise PriorError(f"{path} has no {name}; {PAGE}")
    return found


def contents_of(file: Any, path: str) -> Contents:
    """Read what an open file says about its tables, and check it.

    Raises
    ------
    PriorError
        With the first problem. Whatever is read later lies inside the datasets, and fits in memory.
    """
    # The cells and labels: one after the other in a file of `dump`, otherwise padded.
    X = needed(file, "X", path)
    y = needed(file, "y", path)
    attributes = dump_attributes(file, path)
    is_flat = X.ndim == 1 and attributes is not None
    T = math.prod(needed(file, "num_datapoints", path).shape) if is_flat else len(X)
    if not is_flat and (X.ndim != 3 or y.shape != X.shape[:2] or T == 0):
        raise PriorError(
            f"X of {path} has the shape {X.shape}, and y {y.shape}; they must be (tables, rows, features) and "
            "(tables, rows)"
        )
    if is_flat and not (y.ndim == 1 and 0 < T <= len(y)):
        raise PriorError(f"X of {path} has the shape {X.shape}, and y {y.shape}, of {T} tables")

    # A file of a few bytes may claim any size, which would be allocated.
    for name, dataset in {"X": X, "y": y}.items() if is_flat else [("X", X)]:
        stored = dataset.id.get_storage_size()
        if math.prod(dataset.shape) * dataset.dtype.itemsize > MOST_COMPRESSED * stored:
            raise PriorError(f"{name} of {path} has the shape {dataset.shape}, but only {stored:,} bytes are stored")

    most_rows, most_features = (len(y), len(X)) if is_flat else X.shape[1:]
    sizes = sizes_of_tables(file, path, T, most_rows, most_features)
    starts = starts_of_tables(sizes, X, y, path) if is_flat else None

    # Their targets, and what is known of tables of ours.
    most_classes = stored_classes(file, path)
    kind = problem_type(file, path, most_classes)
    if kind == "regression":
        most_classes = 0
    elif most_classes is None:
        most_classes = classes_of_labels(y, path)
    missing = crc32 = None
    if attributes is not None:
        missing = needed(file, "missing", path, count=T)[()]
        crc32 = needed(file, "crc32", path, count=T)[()]
    return Contents(
        path=path,
        sizes=sizes,
        starts=starts,
        kind=kind,
        most_classes=most_classes,
        attributes=attributes,
        missing=missing,
        crc32=crc32,
        fingerprint=fingerprint_of_file(file, sizes, crc32),
    )


def sizes_of_tables(file: Any, path: str, T: int, most_rows: int, most_features: int) -> np.ndarray:
    """Return the rows, labeled rows and features of T tables, int64 (T, 3).

    Parameters
    ----------
    file : h5py.File
        The open file.
    path : str
        What messages call it.
    T : int
        How many tables it has.
    most_rows, most_features : int
        Limits of their sizes; a table without a size in the file has these.

    Raises
    ------
    PriorError
        If the labeled rows are not known, or a table is impossible.
    """
    # Labeled rows, under one name or two, which must then agree.
    splits = {name: values for name in SPLITS if (values := read_whole_numbers(file, name, path, T)) is not None}
    if not splits:
        raise PriorError(f"{path} has no {' or '.join(SPLITS)}; {PAGE}")
    labeled = splits[min(splits)]
    # The same one, if there are not both.
    other = splits[max(splits)]
    if (labeled != other).any():
        number = int(np.argmax(labeled != other))
        raise PriorError(
            f"{min(splits)} and {max(splits)} of {path} contradict each other: {labeled[number]} and {other[number]} "
            f"labeled rows of table {number}"
        )

    rows = read_whole_numbers(file, "num_datapoints", path, T)
    features = read_whole_numbers(file, "num_features", path, T)
    rows = np.full(T, most_rows) if rows is None else rows
    features = np.full(T, most_features) if features is None else features
    sizes = np.stack([rows, labeled, features], axis=1)

    is_possible = (rows >= MIN_ROWS) & (rows <= most_rows)
    is_possible &= (labeled >= 1) & (labeled < rows)
    is_possible &= (features >= 1) & (features <= most_features)
    if not is_possible.all():
        number = int(np.argmin(is_possible))
        N, n, M = sizes[number]
        raise PriorError(
            f"table {number} of {path} has {N} rows, {n} of them labeled, and {M} features; there must be "
            f"{MIN_ROWS}..{most_rows} rows, some of them labeled and some not, and 1..{most_features} features"
        )
    return sizes


def starts_of_tables(sizes: np.ndarray, X: Any, y: Any, path: str) -> np.ndarray:
    """Return where the cells and the labels of each table begin, int64 (T, 2); raises PriorError for other sums."""
    rows, _, features = sizes.T
    stops = np.cumsum(np.stack([rows * features, rows], axis=1), axis=0)
    if stops[-1].tolist() != [len(X), len(y)]:
        raise PriorError(f"{path} has {len(X)} cells and {len(y)} labels; its tables have {stops[-1].tolist()}")
    return np.concatenate([np.zeros((1, 2), np.int64), stops[:-1]])


def dump_attributes(file: Any, path: str) -> dict[str, str] | None:
    """Return the attributes that `dump` has written; None for a file of another program. Raises PriorError."""
    found = file.attrs.get("format")
    if found is None:
        return None
    if found != FORMAT:
        raise PriorError(
            f"{path} has the format {found}, not {FORMAT}: dump the tables again, or delete its attribute format, and "
            "they are standardized here as those of other programs"
        )
    attributes = {name: str(value) for name, value in file.attrs.items()}
    try:
        is_complete = isinstance(read_json(attributes["options"]), dict) and "prior" in attributes
        is_complete &= "keeps_missing" in attributes and int(attributes.get(FIRST_TABLE, 0)) >= 0
    except (KeyError, ValueError):
        is_complete = False
    if not is_complete:
        raise PriorError(f"{path} has the attribute format of tabicl-prior dump, but not its others; delete it")
    return attributes


def read_whole_numbers(file: Any, name: str, path: str, count: int) -> np.ndarray | None:
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
    found = read_whole_numbers(file, "max_num_classes", path, 1)
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


def fingerprint_of_file(file: Any, sizes: np.ndarray, crc32: np.ndarray | None) -> str:
    """Hash the sizes and checksums of all tables, or the values of some: those of all would take seconds a gigabyte."""
    digest = hashlib.sha256(np.ascontiguousarray(sizes, dtype="<i8").data)
    if crc32 is not None:
        digest.update(np.ascontiguousarray(crc32, dtype="<u4").data)
        return digest.hexdigest()[:16]
    for number in np.unique(np.linspace(0, len(sizes) - 1, HASHED).astype(int)):
        N, _, M = sizes[number]
        digest.update(np.ascontiguousarray(file["X"][number, :N, :M], dtype="<f4").data)
        digest.update(np.ascontiguousarray(file["y"][number, :N], dtype="<f4").data)
    return digest.hexdigest()[:16]
