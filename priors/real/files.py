"""Reads files of tables as columns, and keeps an index of what each file of a folder holds, or why it is left out.

Files that could be misread are refused, with the reason. The index is a file of JSON lines, one for each file of the
folder. A file is read again only if its size or its time of modification has changed. In a folder that is not writable,
each process reads all files.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from tqdm import tqdm

from priors.errors import message_line
from priors.nesting import read_json
from priors.real.csv_format import AUTO, USUAL_FORMAT, CsvFormat, advice_on_separator, separator_of, without_declaration
from priors.real.preprocessing import as_numbers, as_times, reads_as_numbers, resemblance
from priors.table import MIN_ROWS, PriorError

NAME = ".tabicl-index.jsonl"
VERSION = 3  # of the index; raised with every change of what is read or left out
OLDEST = 2  # the first one that read most files as the newest does, so that runs on them continue
UNREADABLE = -1  # instead of the time of modification of a file that could not be opened
USUAL_TARGETS = ("target", "class", "label", "y")
TASKS = "tasks.csv"  # in the folder itself: a table of tasks, see tasks.py
SUFFIXES = (".csv", ".parquet", ".arrow", ".feather")
MAX_BYTES = 256 * 2**20  # of a file: reading a CSV takes about eight times its size in memory
MAX_CELLS = 50_000_000  # 400 MB as float64; Parquet packs far more of them into MAX_BYTES
MAX_COLUMNS = 2_000

# Files of other formats that are called .csv, by their first bytes, and what to do with them.
OTHER_FORMATS = {
    b"\x1f\x8b": "a gzip archive: unpack it",
    b"\xfd7zXZ": "an xz archive: unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd archive: unpack it",
    b"PK\x03\x04": "an Excel workbook or a zip archive: save the sheet as CSV in UTF-8, or unpack the archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save the sheet as CSV in UTF-8",
    b"PAR1\x15": "a Parquet file: rename it to .parquet",
    b"ARROW1\0": "an Arrow file: rename it to .arrow",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
}
EXACT = 2**53  # smaller whole numbers are exact as float64
FEW_VALUES = 10  # numbers with at most so many different values are classes without being cut
DECIMAL_COMMA = r"\s*[-+]?\d*(,\d+)?\s*"
NESTED = (list, tuple, dict, set, np.ndarray)  # values of a cell, in columns of lists, structs and maps

File: TypeAlias = tuple[str, int, int]  # path, size, time of modification
Column: TypeAlias = np.ndarray | pd.Categorical  # numbers float64 (rows,), NaN where missing, or categories


@dataclass(frozen=True)
class ColumnFacts:
    """A column of a file."""

    name: str
    kind: str  # number, time or category
    distinct: int  # number of different values
    known: int  # rows with a value


@dataclass(frozen=True)
class Entry:
    """A file in the index."""

    path: str  # relative to the folder, with slashes
    size: int
    modified: int  # time of modification in ns
    hash: str = ""  # of the file's bytes
    content: str = ""  # hash of the values, see content_hash
    last: str = ""  # name of the last column, used or left out
    rows: int = 0
    columns: tuple[ColumnFacts, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # columns that are not used, and why
    reason: str | None = None  # why the file is left out; None if it is used
    form: CsvFormat = USUAL_FORMAT  # how it was read, if it is a CSV file
    version: int = OLDEST  # the first one of the index that read its columns so
    remarks: tuple[str, ...] = ()  # see Reading
    targets: tuple[str, ...] = ()  # see index_folder


def index_folder(
    folder: Path, form: CsvFormat = USUAL_FORMAT, targets: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, Entry]:
    """Return the entries of all files of a folder by path, in alphabetical order; reads only new and changed files.

    Parameters
    ----------
    folder : Path
        The folder.
    form : CsvFormat
        Of all CSV files.
    targets : mapping of str to tuple of str, optional
        The columns that are to be predicted in a file, by its path; by default the one that `guess_target` finds.

    Raises
    ------
    PriorError
        If a package that reads the files is missing.
    """
    return index_files(folder.resolve(), tuple(find_files(folder)), form, tuple((targets or {}).items()))


def index_file(path: Path, form: CsvFormat = USUAL_FORMAT, targets: tuple[str, ...] = ()) -> Entry:
    """Return the entry of a single file, in memory only; raises PriorError if it cannot be used."""
    if path.suffix.lower() not in SUFFIXES:
        raise PriorError(f"{path} must be one of {', '.join(SUFFIXES)} files")
    try:
        state = path.stat()
    except OSError as error:
        raise PriorError(f"{path} cannot be read: {error.strerror}") from None
    entry = read_entry_once(path.parent.resolve(), path.name, state.st_size, state.st_mtime_ns, form, targets)
    if entry.reason is not None:
        raise PriorError(f"{path} cannot be used: {entry.reason}")
    return entry


def find_files(folder: Path) -> list[File]:
    """The files of tables in a folder and its subfolders; hidden ones, and links to nothing, are left alone.

    Raises PriorError if one of the folders cannot be listed.
    """
    found: list[File] = []

    def refuse(error: OSError) -> None:
        raise PriorError(f"{error.filename} cannot be listed: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=refuse):
        # os.walk goes into the folders that are left.
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() in SUFFIXES and path != folder / TASKS and path.is_file():
                state = path.stat()
                found.append((path.relative_to(folder).as_posix(), state.st_size, state.st_mtime_ns))
    return sorted(found)


# A process checks a configuration, and builds its prior, several times.
@lru_cache(maxsize=2)
def index_files(
    folder: Path, files: tuple[File, ...], form: CsvFormat, targets: tuple[tuple[str, tuple[str, ...]], ...]
) -> dict[str, Entry]:
    """Return the entries of these files, from the index or from the file if it is new or has changed."""
    # Those in the index.
    indexed = read_entries(folder, form)
    targets_of = dict(targets)
    entries = {}
    changed = []
    for path, size, modified in files:
        entry = indexed.get(path)
        # What could not be opened has no time of modification in the index, and is tried again.
        state = (size, modified, targets_of.get(path, ()))
        if entry is not None and (entry.size, entry.modified, entry.targets) == state:
            entries[path] = entry
        else:
            changed.append((path, size, modified))

    # The others are read, and the index is written again if the folder can be written to.
    for path, size, modified in tqdm(changed, f"index of {folder}", unit="file", disable=None if changed else True):
        entries[path] = read_entry(folder, path, size, modified, form, targets_of.get(path, ()))
    entries = {path: entries[path] for path, _, _ in files}  # in their order
    if changed:
        lines = [index_line(entry) for entry in entries.values()]
        with contextlib.suppress(OSError), TemporaryDirectory(prefix=".tabicl-", dir=folder) as scratch:
            unfinished = Path(scratch, NAME)
            unfinished.write_text("".join(lines), encoding="utf-8")
            os.replace(unfinished, folder / NAME)
    return entries


def index_line(entry: Entry) -> str:
    values = asdict(entry)
    # It is part of the version of the index.
    del values["form"]
    return json.dumps({"index_version": index_version(entry.form), **values}) + "\n"


def index_version(form: CsvFormat) -> int | list:
    """Return the version of an index of files that were read in this form."""
    if form == USUAL_FORMAT:
        return VERSION
    return [VERSION, form.separator, form.decimal, list(form.missing)]


def read_entries(folder: Path, form: CsvFormat) -> dict[str, Entry]:
    """Read the index; it is empty if it is damaged, of another version, or of files that were read in another form."""
    entries = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever is in it
        for line in (folder / NAME).read_text(encoding="utf-8").splitlines():
            values = read_json(line)
            if values.pop("index_version") == index_version(form):
                values["columns"] = tuple(ColumnFacts(**facts) for facts in values["columns"])
                values["remarks"] = tuple(values["remarks"])
                values["targets"] = tuple(values["targets"])
                entries[values["path"]] = Entry(**values, form=form)
    return entries


def read_entry(
    folder: Path,
    path: str,
    size: int,
    modified: int,
    form: CsvFormat = USUAL_FORMAT,
    targets: tuple[str, ...] = (),
) -> Entry:
    """Describe a file, or why it is left out.

    Parameters
    ----------
    folder : Path
        The folder of the tables.
    path : str
        The file in it.
    size, modified : int
        Its size in bytes, and its time of modification in ns.
    form : CsvFormat
        How a CSV file is written.
    targets : tuple of str
        See `index_folder`.

    Raises
    ------
    PriorError
        If a package that reads it is missing.
    """
    try:
        if size > MAX_BYTES:
            raise LeftOut(f"{size / 2**20:,.0f} MiB, more than {MAX_BYTES >> 20}: store a sample of its rows")

        # A file that cannot be opened now is tried again the next time, and so has no time of modification.
        try:
            content = Path(folder, path).read_bytes()
        except OSError as error:
            return Entry(
                path, size, UNREADABLE, reason=f"it cannot be read ({error.strerror})", form=form, targets=targets
            )

        # The columns that are used.
        table = read_table(content, path, form, targets, check=True)
        columns = list(table.columns.values())
        if not columns:
            raise LeftOut("; ".join(f"column {name!r}: {reason}" for name, reason in table.left_out.items()))
        return Entry(
            path,
            size,
            modified,
            hash=blake2b(content, digest_size=16).hexdigest(),
            content=content_hash(columns),
            last=table.last,
            rows=len(columns[0]),
            columns=tuple(column_facts(name, table.kinds[name], column) for name, column in table.columns.items()),
            left_out=table.left_out,
            form=form,
            version=table.reading.version,
            remarks=tuple(table.reading.remarks),
            targets=targets,
        )
    except MissingLibrary as error:
        raise PriorError(f"{path}: {error}") from None
    except LeftOut as error:
        reason = str(error)
    except Exception as error:
        # Damaged files make the readers raise errors of any kind.
        message = message_line(error) or "no message"
        reason = f"it cannot be read ({type(error).__name__}: {message})"
    return Entry(path, size, modified, reason=reason, form=form, targets=targets)


read_entry_once = lru_cache(maxsize=2)(read_entry)  # see index_files


@dataclass
class Content:
    """The columns of a file that are used, and their kinds, by name; see Entry."""

    columns: dict[str, Column]
    kinds: dict[str, str]
    left_out: dict[str, str]
    last: str
    reading: Reading


def read_table(
    content: bytes,
    path: str,
    form: CsvFormat = USUAL_FORMAT,
    targets: Collection[str] = (),
    check: bool = False,
) -> Content:
    """Read the columns of a file that are used, and say why others are not; arguments and errors as of `read_frame`."""
    # The whole file, and whether it can be a table.
    suffix = Path(path).suffix.lower()
    reading = Reading()
    frame = read_frame(content, suffix, check, form, targets=targets or None, reading=reading)
    if frame.shape[1] < 2:
        raise LeftOut(
            f"{frame.shape[1]} columns; a CSV file separates them by commas, semicolons or tabs, or by what the option "
            "separator names"
        )
    if len(frame) < MIN_ROWS:
        raise LeftOut(f"{len(frame)} rows, fewer than {MIN_ROWS}")

    # Its columns: those that cannot be used have a reason.
    table = Content({}, {}, {}, str(frame.columns[-1]), reading)
    for name, values in frame.items():
        try:
            # A name that pandas gives to a column without one.
            if suffix == ".csv" and re.fullmatch(r"Unnamed: \d+", str(name)):
                raise LeftOut("no name: perhaps row numbers")
            column, kind = as_column(values)
            if kind == "category" and reads_as_numbers(values):
                reading.version = VERSION
            table.columns[str(name)], table.kinds[str(name)] = column, kind
        except LeftOut as error:
            table.left_out[str(name)] = str(error)
    return table


def column_facts(name: str, kind: str, column: Column) -> ColumnFacts:
    present = present_values(column)
    distinct = len(column.categories) if isinstance(column, pd.Categorical) else len(np.unique(present))
    return ColumnFacts(name, kind, distinct, known=len(present))


def present_values(column: Column) -> np.ndarray:
    """Return the values that are not missing; of categories their codes."""
    if isinstance(column, pd.Categorical):
        return column.codes[column.codes >= 0]
    return column[~np.isnan(column)]


def content_hash(columns: list[Column]) -> str:
    """Hash the values as 16 hexadecimal digits, regardless of the order of rows and columns, names, and file format."""
    rows = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        values = value_hashes(column)
        rows += mix_bits(values ^ mix_bits(values.sum()))
    return f"{mix_bits(mix_bits(rows).sum()):016x}"


def value_hashes(column: Column) -> np.ndarray:
    """Hash values, uint64 (rows,); equal values have equal hashes."""
    if isinstance(column, pd.Categorical):
        texts = [blake2b(str(value).encode(), digest_size=8).digest() for value in column.categories]
        # Missing values have the code -1, that of the last hash.
        return np.frombuffer(b"".join([*texts, bytes(8)]), "<u8")[column.codes]
    numbers = np.where(np.isnan(column), np.nan, column) + 0.0  # one NaN, one zero
    return mix_bits(numbers.view(np.uint64))


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply the mixing step of splitmix64: uint64 -> uint64, one to one."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass
class Reading:
    """How a file was read.

    Parameters
    ----------
    remarks : list of str
        What users should know of it.
    version : int
        The first one of the index that read its columns so.
    """

    remarks: list[str] = field(default_factory=list)
    version: int = OLDEST


class LeftOut(Exception):
    """A file or column that is left out, with the reason."""


class MissingLibrary(PriorError):
    """A file that cannot be read without another package, with the command that installs it."""


def guess_target(names: Sequence[str], last: str) -> str:
    """Return the first of these columns that has a usual name of a target, or else the last column of the file."""
    for usual in USUAL_TARGETS:
        for name in names:
            if name.strip().lower() == usual:
                return name
    return last


def read_file(
    path: Path,
    texts: Collection[str] = (),
    form: CsvFormat = USUAL_FORMAT,
    targets: Collection[str] | None = (),
    reading: Reading | None = None,
) -> pd.DataFrame:
    """Read the table in a file, with all of its columns.

    Parameters
    ----------
    path : Path
        The file.
    texts : collection of str
        Columns of a CSV file to read as text, even if all values look like numbers.
    form, targets, reading
        See `read_frame`.

    Raises
    ------
    PriorError
        If it cannot be read, is damaged or could be misread.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise PriorError(f"{path} must be one of {', '.join(SUFFIXES)} files")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PriorError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return read_frame(content, suffix, check=True, form=form, texts=texts, targets=targets, reading=reading)
    except (LeftOut, MissingLibrary) as error:
        raise PriorError(f"{path} cannot be used: {error}") from None
    except Exception as error:
        # Damaged files make the readers raise errors of any kind.
        raise PriorError(f"{path} cannot be read: {message_line(error) or type(error).__name__}") from None


def read_texts(path: Path, column: str, form: CsvFormat) -> pd.Series:
    """Read a column of a CSV file that `read_file` has read: its values as they are written, NaN where missing."""
    return written(path.read_bytes(), form, [column])[column]


def read_frame(
    content: bytes,
    suffix: str,
    check: bool,
    form: CsvFormat,
    texts: Collection[str] = (),
    targets: Collection[str] | None = (),
    reading: Reading | None = None,
) -> pd.DataFrame:
    """Read the table in the content of a file.

    Parameters
    ----------
    content : bytes
        The content.
    suffix : str
        One of SUFFIXES.
    check : bool
        Whether the table is compared with the lines of a CSV file, which takes longer than reading.
    form : CsvFormat
        How a CSV file is written.
    texts : collection of str
        Columns of a CSV file to read as text.
    targets : collection of str, optional
        Columns that are to be predicted; None for the one that `guess_target` finds.
    reading : Reading, optional
        It is told how the file was read; the remarks of a CSV file only if it is checked.

    Raises
    ------
    LeftOut, MissingLibrary
        If the file could be misread, or a package is needed to read it.
    Exception
        Any error of the readers, for a damaged file.
    """
    reading = reading or Reading()
    if suffix == ".csv":
        shape = check_csv(content, form, reading) if check else None
        frame = read_csv(content, form, texts, targets, reading)
        if check:
            reading.remarks += words_for_missing(content, form, frame)
        if shape is not None and shape != frame.shape:
            raise LeftOut("its lines can be read in several ways")
    else:
        frame = read_binary(content, suffix, reading)
    if not isinstance(frame.index, pd.RangeIndex):
        raise LeftOut("its lines can be read in several ways")
    check_size(*frame.shape)
    return frame


def read_csv(
    content: bytes, form: CsvFormat, texts: Collection[str], targets: Collection[str] | None, reading: Reading
) -> pd.DataFrame:
    """Read a CSV file as pandas does, but keep classes called NA and large whole numbers as they are written.

    Parameters
    ----------
    content : bytes
        The content of the file.
    form : CsvFormat
        How it is written.
    texts : collection of str
        Columns to read as text.
    targets : collection of str or None
        Columns that are to be predicted; None for the one that `guess_target` finds.
    reading : Reading
        Its version is raised if the file was read in another way than by older versions.
    """
    # All columns, as pandas understands them.
    missing_words = [word for word in form.missing if word != AUTO]
    frame = parse(
        content,
        form,
        decimal=form.decimal,
        dtype=dict.fromkeys(texts, str),
        keep_default_na=AUTO in form.missing,
        na_values=["", *missing_words],
    )

    # Targets: among numbers, a word such as NA means a missing value, otherwise it may be a class. If there are such
    # words, the classes are read again as they are written.
    if targets is None:
        targets = [guess_target(list(frame), frame.columns[-1])]
    for name in targets:
        if name not in frame:
            continue
        missing = frame[name].isna()
        if not missing.any():
            continue
        # A column without any value counts as numeric for pandas.
        holds_numbers = pd.api.types.is_numeric_dtype(frame[name]) and not missing.all()
        if holds_numbers:
            continue
        classes = written(content, form, [name])[name]
        if classes[missing].notna().any():
            frame[name] = classes
            reading.version = VERSION

    # Large whole numbers, which a missing value has made floats or texts.
    for name in inexact_columns(frame):
        with contextlib.suppress(ValueError, OverflowError):  # such as 1e30
            cells = written(content, form, [name])[name]
            frame[name] = whole_numbers(cells.where(frame[name].notna()))
    return frame


def inexact_columns(frame: pd.DataFrame) -> list[str]:
    """Return the names of columns that may hold large whole numbers which pandas has changed.

    A missing value turns them into floats, or into texts if they need all 64 bits.
    """
    names: list[str] = []
    if not frame.columns.is_unique:  # which is refused later
        return names
    for name, dtype in frame.dtypes.items():
        values = frame[name]
        # Smaller whole numbers are exact as floats.
        are_floats = dtype.kind == "f" and (values.abs() >= EXACT).any() and values.isna().any()
        # Among such texts pandas keeps missing values as "". In other texts of a CSV file they are NaN.
        are_texts = pd.api.types.is_string_dtype(dtype) and (values == "").any()
        if are_floats or are_texts:
            names.append(name)
    return names


def whole_numbers(values: Iterable[Any]) -> pd.api.extensions.ExtensionArray:
    """Return whole numbers, or their texts, in a type of 64 bits; raises ValueError and OverflowError for others."""
    numbers = [None if pd.isna(value) else int(value) for value in values]
    is_signed = all(number is None or number < 2**63 for number in numbers)
    return pd.array(numbers, dtype="Int64" if is_signed else "UInt64")


def written(content: bytes, form: CsvFormat, names: Collection[str]) -> pd.DataFrame:
    """Read columns as text; only empty cells are missing, and words that the user has named."""
    own_words = [word for word in form.missing if word != AUTO]
    return parse(content, form, usecols=list(names), dtype=str, keep_default_na=False, na_values=["", *own_words])


def parse(content: bytes, form: CsvFormat, **options: Any) -> pd.DataFrame:
    """Parse a CSV file by pandas.

    Parameters
    ----------
    content : bytes
        The content of the file.
    form : CsvFormat
        How it is written; only its separator is used here.
    **options
        Further arguments of `pandas.read_csv`.

    Raises
    ------
    LeftOut
        If it is not a CSV file in UTF-8.
    """
    # A first line such as `sep=;` is no part of the table.
    text, form = without_declaration(decode_text(content), form)
    separator = separator_of(text, form)
    header = next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), [])
    return pd.read_csv(
        io.StringIO(text),
        sep=separator,
        # In a single column, a blank line is a row without a value.
        skip_blank_lines=len(header) != 1,
        low_memory=False,
        index_col=None,
        **options,
    )


def words_for_missing(content: bytes, form: CsvFormat, frame: pd.DataFrame) -> list[str]:
    """Return a remark on the words that were read as missing values, or [] if there are only empty cells."""
    lacking = frame.columns[frame.isna().any()]
    if len(lacking) == 0:
        return []
    texts = written(content, replace(form, missing=()), lacking)
    words: dict[str, None] = {}  # in the order of the columns
    columns = []
    for name in lacking:
        taken = texts[name][frame[name].isna()].dropna().unique()
        if len(taken) > 0:
            words.update(dict.fromkeys(taken))
            columns.append(repr(name))
    if not columns:
        return []
    where = ", ".join(columns[:5])
    if len(columns) > 5:
        where += f" and {len(columns) - 5} more"
    return [f"{', '.join(map(repr, words))} in {where} counts as missing; missing_words=[...] says which words do"]


def require_reader(suffix: str) -> None:
    """Raise MissingLibrary if files with this suffix need a package that is not installed."""
    if suffix == ".csv" or suffix not in SUFFIXES:
        return
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise MissingLibrary(
            f"{suffix} files need pyarrow: pip install pyarrow, or pip install -e '.[eval]' in the project's folder"
        ) from None


def read_binary(content: bytes, suffix: str, reading: Reading) -> pd.DataFrame:
    require_reader(suffix)
    import pyarrow as pa

    frame = read_parquet(content) if suffix == ".parquet" else read_arrow(pa.BufferReader(content))
    # Levels of an index that have a name are columns; others number the rows.
    index = frame.index
    frame = frame.reset_index(drop=True)
    levels = []
    for number, name in enumerate(index.names):
        level = index.get_level_values(number).to_series(index=frame.index, name=name)
        # set_index(name, drop=False) leaves such a copy.
        is_copy = name in frame and level.equals(frame[name])
        if name is not None and not is_copy:
            levels.append(level)
    if levels:
        reading.version = VERSION
        frame = pd.concat([*levels, frame], axis=1)
    frame.columns = frame.columns.map(str)
    refuse_equal_names(frame.columns)
    return frame


def refuse_equal_names(names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise LeftOut(f"several columns are called {name!r}")


def read_parquet(content: bytes) -> pd.DataFrame:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(content))
    check_size(file.metadata.num_rows, file.metadata.num_columns)
    frame = pd.read_parquet(io.BytesIO(content), engine="pyarrow")
    return exact(frame, file.schema_arrow, lambda name: file.read([name])[name])


def read_arrow(source) -> pd.DataFrame:
    """Read a pyarrow.BufferReader of an IPC file (also called Feather) or an IPC stream."""
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
    check_size(table.num_rows, table.num_columns)
    for column in table.schema:
        # The only type that pandas has no equivalent of.
        if pa.types.is_union(column.type):
            raise LeftOut(f"the column {column.name!r} has the type {column.type}: save the table without it")
    return exact(table.to_pandas(), table.schema, table.column)


def exact(frame: pd.DataFrame, schema: Any, column: Callable[[str], Any]) -> pd.DataFrame:
    """Restore large whole numbers that pandas has made floats for a missing one; column: of pyarrow, by name."""
    import pyarrow as pa

    for name in inexact_columns(frame):
        if name in schema.names and pa.types.is_integer(schema.field(name).type):
            frame[name] = whole_numbers(column(name).to_pylist())
    return frame


def check_size(rows: int, columns: int) -> None:
    if columns > MAX_COLUMNS:
        raise LeftOut(f"{columns:,} columns, more than {MAX_COLUMNS:,}")
    if rows * columns > MAX_CELLS:
        raise LeftOut(f"{rows:,} rows of {columns:,} columns, more than {MAX_CELLS:,} cells: store a sample of it")


def decode_text(content: bytes) -> str:
    """Return the text of a CSV file; raises LeftOut for other files, and for text that is not in UTF-8."""
    for start, kind in OTHER_FORMATS.items():
        if content.startswith(start):
            raise LeftOut(f"it is not a CSV file but {kind}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        readable = error.object[: error.start].decode()
        lines = re.split(r"\r\n|\r|\n", readable)
        line = len(lines)
        before = lines[-1][-20:]
        raise LeftOut(
            f"line {line} is not in UTF-8, at the byte 0x{error.object[error.start]:02x} after {before!r}: save it as "
            "UTF-8, or convert it, for example by iconv -f WINDOWS-1252 -t UTF-8"
        ) from None
    if "\0" in text:
        raise LeftOut("it holds null characters, so it is not a CSV file in UTF-8")
    return text


def check_csv(content: bytes, form: CsvFormat, reading: Reading) -> tuple[int, int]:
    """Check the lines of a CSV file, which pandas reads without complaint.

    pandas fills short lines, takes the first column of long ones as row names, and renames columns of the same name. It
    skips blank lines.

    Parameters
    ----------
    content, form
        As in `read_csv`.
    reading : Reading
        It is told of blank lines.

    Returns
    -------
    rows, columns : int
        The sizes of the table.

    Raises
    ------
    LeftOut
        For lines of different lengths, and invalid names of columns.
    """
    # The names of the columns.
    content_text = decode_text(content)
    text, form = without_declaration(content_text, form)
    separator = separator_of(text, form)
    declarations = int(len(text) < len(content_text))  # lines before the names
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    names = next(lines, [])
    if not names:
        raise LeftOut("it is empty" if not text.strip() else "its first line is empty")
    check_size(1, len(names))
    if len(names) == 1:
        advice = advice_on_separator(text, separator)
        if advice:
            raise LeftOut(f"it has a single column, {names[0]!r}{advice}")
    refuse_equal_names(name for name in names if name)
    for name in names:
        if re.fullmatch(r"\s*-?\d*\.\d+(e-?\d+)?\s*", name, re.IGNORECASE):
            raise LeftOut(f"its first line does not name the columns: {name!r} is a number")

    # The rows.
    rows = 0
    blanks: list[int] = []  # the numbers of blank lines
    last = 0  # line that is not blank
    for line in lines:
        if not line:
            blanks.append(lines.line_num + declarations)
            rows += len(names) == 1
            continue
        last = lines.line_num + declarations
        if len(line) != len(names):
            advice = advice_on_separator(text, separator)
            raise LeftOut(f"line {last} has {len(line)} values, but there are {len(names)} columns{advice}")
        rows += 1
    if len(names) > 1:  # below the last row they do no harm
        blanks = [number for number in blanks if number < last]
    if blanks:
        meaning = "are not rows" if len(names) > 1 else "count as rows with a missing value"
        reading.remarks.append(f"its blank lines {meaning}: {len(blanks)}, the first one is line {blanks[0]}")
    check_size(rows, len(names))
    return rows, len(names)


def nested_type(values: pd.Series) -> str | None:
    """Return the type of the values of a column of lists, structs or maps, list or dict; None for other columns."""
    if values.dtype != object:
        return None
    for value in values:
        if isinstance(value, NESTED):
            return "dict" if isinstance(value, dict) else "list"
    return None


def as_column(values: pd.Series) -> tuple[Column, str]:
    """Return a column as numbers or categories.

    Estimators read columns in the same way, except that texts which look like numbers or dates raise LeftOut here,
    where estimators warn and read them as categories.

    Parameters
    ----------
    values : Series
        The column.

    Returns
    -------
    column : Column
        Its values.
    kind : str
        number, time (in microseconds) or category.

    Raises
    ------
    LeftOut
        If it holds nothing to learn from, or could be misread.
    """
    # Its values.
    if values.notna().sum() == 0:
        raise LeftOut("no value")
    if isinstance(values.dtype, pd.CategoricalDtype):
        column = values.cat.remove_unused_categories().array
        kind = "category"
        if not all(isinstance(value, str | int | float) for value in column.categories):
            raise LeftOut(f"categories of the type {type(column.categories[0]).__name__}")
    elif reads_as_numbers(values):
        column, kind = from_numbers(values)
        classes = few_large_numbers(values, column)
        if classes is not None:
            column, kind = classes, "category"
    else:
        column, kind = column_of_text(values)

    # A column of a single value, or of row numbers.
    present = present_values(column)
    first = present[0]
    if (present == first).all():
        is_exact = kind != "number" or abs(first) < EXACT or values.nunique() == 1
        raise LeftOut(
            "a single value"
            if is_exact
            else "whole numbers so large that float64 makes them equal: store classes as text"
        )
    if kind == "number" and first in (0, 1) and np.array_equal(column, first + np.arange(len(column))):
        raise LeftOut("row numbers")
    return column, kind


def few_large_numbers(values: pd.Series, numbers: np.ndarray) -> pd.Categorical | None:
    """Return a few whole numbers that are not all different as float64 as categories; None for other columns."""
    present = present_values(numbers)
    as_floats = np.unique(present)
    if np.abs(present).max() < EXACT or len(as_floats) > FEW_VALUES or values.dtype.kind not in "iuO":
        return None
    try:
        exact = values.dropna().astype(object).map(lambda value: int(value) if isinstance(value, str) else value)
    except ValueError:  # such as 1e30
        return None
    distinct = sorted(exact.unique())
    if not len(as_floats) < len(distinct) <= FEW_VALUES:
        return None
    return pd.Categorical(exact.map(str).reindex(values.index), categories=[str(value) for value in distinct])


def from_numbers(values: pd.Series) -> tuple[np.ndarray, str]:
    numbers = as_numbers(values).astype(float)
    with np.errstate(over="ignore"):
        if np.isinf(numbers.astype(np.float32)).any():
            raise LeftOut("infinite values, or too large for single precision")
    return numbers, "time" if values.dtype.kind in "mM" else "number"


def advice_on_decimal(texts: pd.Series) -> str:
    """Return what to set if texts seem to be numbers with a decimal comma, to be added to a message; "" otherwise."""
    distinct = pd.Series(texts.dropna().unique()).astype(str)
    have_commas = distinct.str.contains(",").any() and distinct.str.fullmatch(DECIMAL_COMMA).all()
    return "; if the comma is their decimal mark, set decimal=comma" if have_commas else ""


def column_of_text(values: pd.Series) -> tuple[Column, str]:
    """Return texts as categories in alphabetical order, or as times if all are dates."""
    kind = nested_type(values) or pd.api.types.infer_dtype(values, skipna=True)
    if kind not in ("string", "boolean", "date", "datetime"):
        raise LeftOut(f"values of the type {kind}")
    texts = values.astype(str).where(values.notna())
    times = as_times(texts)
    if times.count() == texts.count():
        return from_numbers(times)
    looks_like = resemblance(texts)
    if looks_like is not None:
        raise LeftOut(looks_like + advice_on_decimal(texts))
    return pd.Categorical(texts), "category"
