"""Files of tables as columns: CSV, Parquet and Arrow. What could be misread is refused, with the reason."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import TypeAlias

import numpy as np
import pandas as pd

from priors.real.features import as_numbers, reads_as_numbers

SUFFIXES = (".csv", ".parquet", ".arrow", ".feather")
MAX_BYTES = 256 * 2**20  # of a file: reading a CSV takes about eight times its size in memory
MAX_CELLS = 50_000_000  # 400 MB as float64; Parquet packs far more of them into MAX_BYTES
MAX_COLUMNS = 2_000
OTHER_NUMBERS = r"\s*[-+]?(\d{1,3}([,' ]\d{3})+(\.\d+)?|\d+,\d+|\d+(\.\d+)?\s*%)\s*"  # 1,013 or 2,5 or 3%
OTHER_DATES = r"\s*\d{1,4}[/.-]\d{1,2}[/.-]\d{1,4}\b.*"

Column: TypeAlias = np.ndarray | pd.Categorical  # numbers float64 (rows,), NaN where missing, or categories


class Unusable(Exception):
    """A file or column that is left out; the text says why."""


class MissingLibrary(Exception):
    """A kind of file that cannot be read without another package; the text says how to get it."""


def read_frame(content: bytes, suffix: str) -> pd.DataFrame:
    """The table in a file with this content, one row or column for each of the file; raises Unusable, MissingLibrary,
    and whatever the readers raise for a damaged file."""
    if suffix == ".csv":
        return pd.read_csv(io.StringIO(decode(content)), low_memory=False, index_col=None)
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingLibrary(
            f"{suffix} files need pyarrow: pip install pyarrow, or pip install -e '.[eval]' in the project's folder"
        ) from None
    frame = read_parquet(content) if suffix == ".parquet" else read_arrow(pa.BufferReader(content))
    if twice := [name for name, count in Counter(frame.columns).items() if count > 1]:
        raise Unusable(f"several columns are called {twice[0]!r}")
    return frame.set_axis(frame.columns.map(str), axis=1)


def read_parquet(content: bytes) -> pd.DataFrame:
    import pyarrow.parquet as pq

    size = pq.ParquetFile(io.BytesIO(content)).metadata
    check_size(size.num_rows, size.num_columns)
    return pd.read_parquet(io.BytesIO(content), engine="pyarrow").reset_index(drop=True)


def read_arrow(source) -> pd.DataFrame:
    """source: a pyarrow.BufferReader of an IPC file (also called Feather) or an IPC stream"""
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
    check_size(table.num_rows, table.num_columns)
    return table.to_pandas().reset_index(drop=True)


def check_size(rows: int, columns: int) -> None:
    if columns > MAX_COLUMNS:
        raise Unusable(f"{columns:,} columns, more than {MAX_COLUMNS:,}")
    if rows * columns > MAX_CELLS:
        raise Unusable(f"{rows:,} rows of {columns:,} columns, more than {MAX_CELLS:,} cells: store a sample of it")


def decode(content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unusable(f"it is not UTF-8 at byte {error.start}: save it as UTF-8") from None
    if "\0" in text:
        raise Unusable("it holds null characters, so it is not a CSV file in UTF-8")
    return text


def check_csv(content: bytes) -> tuple[int, int]:
    """Rows and columns of a CSV file; raises Unusable for lines of different lengths and for names that are not names.

    pandas fills short lines, takes the first column of long ones as row names, and renames columns of the same name.
    """
    lines = csv.reader(io.StringIO(decode(content), newline=""), strict=True)
    rows, names = 0, next(lines, [])
    if not names:
        raise Unusable("it is empty" if not content.strip() else "its first line is empty")
    check_size(1, len(names))
    if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
        raise Unusable(f"several columns are called {twice[0]!r}")
    if numbers := [name for name in names if re.fullmatch(r"\s*-?\d*\.\d+(e-?\d+)?\s*", name, re.IGNORECASE)]:
        raise Unusable(f"its first line does not name the columns: {numbers[0]!r} is a number")
    for line in lines:
        if line and len(line) != len(names):
            raise Unusable(f"line {lines.line_num} has {len(line)} values, but there are {len(names)} columns")
        rows += bool(line)
    check_size(rows, len(names))
    return rows, len(names)


def as_column(values: pd.Series) -> tuple[Column, str]:
    """A column as numbers or categories, and its kind: number, time (microseconds) or category; raises Unusable.

    The estimators read them in the same way, but for dates as text, which count as times here if they are in the ISO
    format.
    """
    if values.notna().sum() == 0:
        raise Unusable("no value")
    if isinstance(values.dtype, pd.CategoricalDtype):
        column, kind = values.cat.remove_unused_categories().array, "category"
        if not all(isinstance(value, str | int | float) for value in column.categories):
            raise Unusable(f"categories of the type {type(column.categories[0]).__name__}")
    else:
        column, kind = from_numbers(values) if reads_as_numbers(values) else from_text(values)
    known = column.codes[column.codes >= 0] if isinstance(column, pd.Categorical) else column[~np.isnan(column)]
    if (known == known[0]).all():
        raise Unusable("a single value")
    if kind == "number" and known[0] in (0, 1) and np.array_equal(column, known[0] + np.arange(len(column))):
        raise Unusable("row numbers")
    return column, kind


def from_numbers(values: pd.Series) -> tuple[np.ndarray, str]:
    numbers = as_numbers(values).astype(float)
    with np.errstate(over="ignore"):
        if np.isinf(numbers.astype(np.float32)).any():
            raise Unusable("infinite values, or too large for single precision")
    return numbers, "time" if values.dtype.kind in "mM" else "number"


def from_text(values: pd.Series) -> tuple[Column, str]:
    """Texts as categories in alphabetical order, or as times if all are dates."""
    kind = pd.api.types.infer_dtype(values, skipna=True)
    if kind in ("date", "datetime"):
        return from_numbers(pd.to_datetime(values, utc=True))
    if kind not in ("string", "boolean"):
        raise Unusable(f"values of the type {kind}")
    texts = values.astype(str).where(values.notna())
    distinct = pd.Series(texts.dropna().unique())
    are_numbers = pd.to_numeric(distinct, errors="coerce").notna()
    if are_numbers.mean() >= 0.5:
        raise Unusable(f"numbers beside the text {distinct[~are_numbers].iloc[0]!r}")
    otherwise = distinct.str.fullmatch(OTHER_NUMBERS)
    if otherwise.any() and (are_numbers | otherwise).mean() >= 0.5:
        raise Unusable(f"numbers with separators or percent signs, such as {distinct[otherwise].iloc[0]!r}")
    if pd.to_datetime(distinct, format="ISO8601", errors="coerce", utc=True).notna().all():
        return from_numbers(pd.to_datetime(texts, format="ISO8601", utc=True))
    if distinct.str.fullmatch(OTHER_DATES).all():
        raise Unusable(f"dates that are not in the ISO format, such as {distinct.iloc[0]!r}")
    return pd.Categorical(texts), "category"
