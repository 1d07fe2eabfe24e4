"""The index of a folder of files: what is read, and the reason for everything that is left out."""

import gzip
from dataclasses import replace
from datetime import date

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_files import build_frame, write_table_files

from priors import build_prior
from priors.real import files
from priors.real.csv_format import csv_format
from priors.real.files import ColumnFacts, content_hash, index_folder, read_entry, read_table, read_texts
from priors.real.tasks import find_tasks, fingerprint_of_tasks, guess

ROWS = "".join(f"{i},{i % 3}\n" for i in range(12))


def entry(folder, content: bytes, name: str = "a.csv"):
    """The entry of a file with this content."""
    (folder / name).write_bytes(content)
    return read_entry(folder, name, len(content), 0)


def parquet(**columns) -> bytes:
    """The content of a Parquet file."""
    return pd.DataFrame(columns).to_parquet()


def left_out(folder) -> dict[str, str]:
    return find_tasks(folder, index_folder(folder))[1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"a,b\n", "0 rows, fewer than 10"),
        (b"a;b\n1;2\n", "1 rows, fewer than 10"),
        (b"a\n1\n", "1 columns; a CSV file separates them by commas, semicolons or tabs"),
        (b"a|b\n1|2\n", "single column, 'a|b'; its columns seem to be separated by '|': set separator=bar"),
        (b"a b c\n1 2 3\n", "its columns seem to be separated by ' ': set separator=space"),
        (b"a, in m;b, in m, or so\n1;2\n3;4\n", "its columns seem to be separated by ';': set separator=semicolon"),
        (f"a,b\n{ROWS}1\n".encode(), "line 14 has 1 values, but there are 2 columns"),
        (f"a\n{ROWS}".encode(), "line 2 has 2 values, but there are 1 columns"),  # pandas: the first one names rows
        (f"a,a\n{ROWS}".encode(), "several columns are called 'a'"),
        (f"0.5,-1.2\n{ROWS}".encode(), "its first line does not name the columns: '0.5' is a number"),
        (f'a,b\n{ROWS}"1,2\n'.encode(), "cannot be read (Error: unexpected end of data)"),
        (f"a,b\n{ROWS}".encode("utf-16"), "it is not a CSV file but text in UTF-16: save it as UTF-8"),
        ("\ufeffa,b\n1,2\n3,K".encode() + b"\xf6ln\n", "line 3 is not in UTF-8, at the byte 0xf6 after '3,K': save it"),
        (gzip.compress(b"a,b\n", mtime=0), "it is not a CSV file but a gzip archive: unpack it"),
        (b"PK\x03\x04 and more", "it is not a CSV file but an Excel workbook or a zip archive: save the sheet as CSV"),
        (parquet(a=[1], b=[2]), "it is not a CSV file but a Parquet file: rename it to .parquet"),
        (f"a,b\n{ROWS}".encode("utf-16-le"), "it holds null characters"),
        ((",".join(f"c{i}" for i in range(10_000)) + "\n").encode(), "10,000 columns, more than 2,000"),
        (b"a,b\n" + b",\n" * 12, "column 'a': no value; column 'b': no value"),
    ],
)
def test_a_csv_file_that_could_be_misread_is_left_out_with_the_reason(content, reason, tmp_path):
    assert reason in entry(tmp_path, content).reason


def test_damaged_binary_files_are_left_out(tmp_path):
    for name, content in {"a.parquet": b"PAR1 and more", "a.arrow": b"ARROW1", "b.feather": bytes(100)}.items():
        assert "cannot be read (Arrow" in entry(tmp_path, content, name).reason


def test_files_that_are_too_large_are_left_out(tmp_path, monkeypatch):
    content = f"a,b\n{ROWS}".encode()
    monkeypatch.setattr(files, "MAX_CELLS", 23)
    assert "12 rows of 2 columns, more than 23 cells" in entry(tmp_path, content).reason
    for name, write in (("a.parquet", pd.DataFrame.to_parquet), ("a.feather", pd.DataFrame.to_feather)):
        write(pd.DataFrame({"a": range(12), "b": range(12)}), tmp_path / name)
        assert "more than 23 cells" in entry(tmp_path, (tmp_path / name).read_bytes(), name).reason
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    assert "more than 0: store a sample" in entry(tmp_path, content).reason


DECIMAL_COMMAS = (
    "numbers with separators, currency or percent signs, such as '2,5'; write 1234.5; if the comma is their decimal "
    "mark, set decimal=comma"
)
COLUMNS = {  # values, and their kind or the reason why they are left out
    "number": (np.arange(20) % 19, "number"),
    "from 0": (np.arange(20), "row numbers"),
    "from 1": (np.arange(1.0, 21), "row numbers"),
    "from 2": (np.arange(2, 22), "number"),
    "backwards": (np.arange(20)[::-1], "number"),
    "thousands": ([f"{1000 + 7 * i:,}" for i in range(20)], "numbers with separators"),
    "some thousands": (["12", "1,013", "2,500", "-1,200,300.5"] * 5, "numbers with separators"),
    "percent": (["3%", "2.5 %", None, "10%"] * 5, "numbers with separators, currency or percent signs, such as '3%'"),
    "decimal comma": (["2,5", "-0,1", "10", "3,75"] * 5, "numbers with separators"),
    "decimal commas": (["2,5", "-0,1", "1000,25", "3,75"] * 5, DECIMAL_COMMAS),
    "euros": (["1.234,50", "2 345 \u20ac", "12"] + 17 * ["7,5"], "numbers with separators"),
    "dollars": (["$1,013", "-$12", "$2.50", None] * 5, "numbers with separators, currency or percent signs, such"),
    "codes": (["1-2", "3-4", "A1,5", "7%x"] * 5, "category"),
    "gaps": ([None, 1.5, 2.5, None] * 5, "number"),
    "truth": ([True, False] * 10, "number"),
    "truth and gaps": ([True, False, None, None] * 5, "number"),
    "text": (["a", "b", None, "c"] * 5, "category"),
    "iso date": ([f"2024-01-{day:02d}" for day in range(1, 21)], "time"),
    "iso time": ([f"2024-01-{day:02d}T10:00:00+02:00" for day in range(1, 21)], "time"),
    "other date": ([f"{day}.1.2024" for day in range(1, 21)], "dates that are not in the ISO format, such as '1.1."),
    "late date": (["9999-12-31", "2024-01-01"] * 10, "dates such as '9999-12-31': its year is not in 1000 to 2999"),
    "mixed dates": (["2024-01-01", "unknown"] * 10, "dates such as '2024-01-01' mixed with the text 'unknown'"),
    "large": ([2**60, 2**60 + 1] * 10, "category"),  # float64 has one number for both
    "large, missing": (pd.array([2**60, None, 5, 2**60 + 1] * 5, dtype="Int64"), "category"),
    "many large": (list(range(2**60, 2**60 + 20)), "whole numbers so large that float64 makes them equal: store"),
    "mixed": (["1", "2", "3", "?"] * 5, "numbers mixed with the text '?'"),
    "infinite": ([1.0, np.inf] * 10, "infinite values"),
    "too large": ([1.0, 1e300] * 10, "infinite values, or too large"),
    "empty": ([None] * 20, "no value"),
    "constant": ([3] * 20, "a single value"),
    "constant text": (["x", None] * 10, "a single value"),
}
TYPES = {  # which only Parquet and Arrow have
    "time": (pd.date_range("2024", periods=20), "time"),
    "zone": (pd.date_range("2024", periods=20, tz="Europe/Berlin"), "time"),
    "day": ([date(2024, 1, d) for d in range(1, 21)], "time"),
    "ordered": (pd.Categorical(["low", "high"] * 10, ["low", "high"]), "category"),
    "list": ([[1], [2]] * 10, "values of the type list"),
    "struct": ([{"a": 1}, {"a": 2}] * 10, "values of the type dict"),
    "bytes": ([b"a", b"b"] * 10, "values of the type bytes"),
}


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow", "a.feather"])
def test_kinds_of_columns(name, tmp_path):
    columns = COLUMNS if name == "a.csv" else COLUMNS | TYPES
    frame = pd.DataFrame({column: values for column, (values, _) in columns.items()})
    if name == "a.csv":
        frame.to_csv(tmp_path / name, index=False)
    elif name == "a.parquet":
        frame.to_parquet(tmp_path / name)
    elif name == "a.feather":
        frame.to_feather(tmp_path / name)
    else:
        table = pa.Table.from_pandas(frame)
        with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
            stream.write_table(table)
    found = entry(tmp_path, (tmp_path / name).read_bytes(), name)
    kinds = {facts.name: facts.kind for facts in found.columns} | found.left_out
    assert found.reason is None and kinds.keys() == columns.keys()
    for column, (_, kind) in columns.items():
        assert kinds[column].startswith(kind), column
    assert ColumnFacts("gaps", "number", 2, 10) in found.columns
    assert ColumnFacts("text", "category", 3, 15) in found.columns


def test_values_are_those_of_the_file(tmp_path):
    frame = build_frame(0, 50)
    table = read_table(frame.to_csv(index=False).encode(), "a.csv")
    columns = table.columns
    assert table.left_out == {} and table.last == "label"
    assert np.array_equal(columns["gaps"], frame["gaps"], equal_nan=True)
    assert np.array_equal(columns["flag"], frame["flag"].astype(float))
    assert list(columns["group"]) == list(frame["group"])
    assert list(columns["group"].categories) == ["blue", "green", "red"]
    assert np.array_equal(np.diff(columns["day"]), np.full(49, 86_400e6))  # microseconds


@pytest.mark.parametrize("mark", [";", "\t"])
def test_other_separators_are_recognized_by_the_first_line(mark, tmp_path):
    frame = build_frame(0, 50).rename(columns={"x": "x, in mm"})
    frame["gaps"] = [f"a{mark},b"] * 25 + ["c"] * 25
    found = entry(tmp_path, frame.to_csv(index=False, sep=mark).encode())
    assert found.content == entry(tmp_path, frame.to_csv(index=False).encode()).content
    assert len(found.columns) == 8
    (tmp_path / "tasks.csv").write_text(f"item{mark}target\na.csv{mark}group\n")
    assert [task.target for task in find_tasks(tmp_path, index_folder(tmp_path))[0]] == ["group"]


@pytest.mark.parametrize(
    ("start", "mark", "end"),
    [("sep=;\n", ";", "\n"), ('\ufeff"SEP=|"\r\n', "|", "\r\n"), ("", "\t", "\r"), ("sep=,\r", ",", "\r")],
)
def test_a_line_for_excel_and_other_ends_of_lines_change_nothing(start, mark, end, tmp_path):
    frame = build_frame(0, 50).assign(group=[f"a\nb{mark}"] * 25 + ["c"] * 25)
    usual = frame.to_csv(index=False)
    text = start + frame.to_csv(index=False, sep=mark, lineterminator=end)
    found = entry(tmp_path, text.encode())
    assert found.content == entry(tmp_path, usual.encode()).content and len(found.columns) == 8
    (tmp_path / "a.csv").write_bytes(text.encode())
    (tmp_path / "tasks.csv").write_bytes(f"{start}item{mark}target{end}a.csv{mark}group{end}".encode())
    assert [task.target for task in find_tasks(tmp_path, index_folder(tmp_path))[0]] == ["group"]
    assert read_texts(tmp_path / "a.csv", "group", csv_format("auto", "point")).tolist() == frame["group"].tolist()
    where = len(frame) + 26 + bool(start)  # 25 of the rows have two lines
    reason = f"line {where + 1} has 1 values, but there are 8 columns"
    assert reason in entry(tmp_path, f"{text}1{end}".encode()).reason


def test_blank_lines_between_rows_of_several_columns_are_named(tmp_path):
    content = f'sep=,\n"a\n\n1",b\n\n\n{ROWS}\n{ROWS}\n\n'.encode()
    (tmp_path / "a.csv").write_bytes(content)
    for _ in range(2):  # from the file and from the index
        files.index_files.cache_clear()
        found = index_folder(tmp_path)["a.csv"]
        assert found.remarks == ("its blank lines are not rows: 3, the first one is line 5",) and found.rows == 24
    (line,) = [line for line in build_prior("tables", folder=str(tmp_path)).describe() if "how files are read" in line]
    assert line == f"how files are read: a.csv: {found.remarks[0]}"


def test_files_in_another_form_have_the_values_of_the_usual_one(tmp_path):
    """And the index tells forms apart."""
    frame = build_frame(0, 50)
    usual = entry(tmp_path, frame.to_csv(index=False).encode())
    frame.to_csv(tmp_path / "a.csv", index=False, sep="|", decimal=",")
    form = csv_format("bar", "comma")
    for _ in range(2):  # from the file and from the index
        files.index_files.cache_clear()
        assert index_folder(tmp_path, form)["a.csv"].content == usual.content
        assert "set separator=bar" in index_folder(tmp_path)["a.csv"].reason


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_levels_of_an_index_that_have_a_name_are_columns(name, tmp_path):
    def found(frame):
        table = pa.Table.from_pandas(frame)
        if name == "a.parquet":
            pa.parquet.write_table(table, tmp_path / name)
        elif name == "a.feather":
            pa.feather.write_feather(table, tmp_path / name)
        else:
            with pa.ipc.new_stream(tmp_path / name, table.schema) as stream:
                stream.write_table(table)
        return entry(tmp_path, (tmp_path / name).read_bytes(), name)

    frame = build_frame(0, 50)
    plain = found(frame)
    for names in (["price"], ["group", "day"], list(frame.columns[:-1])):
        indexed = found(frame.set_index(names))
        assert (indexed.content, indexed.last) == (plain.content, plain.last)
        same_hash = guess(replace(indexed, hash=plain.hash))
        assert fingerprint_of_tasks([same_hash]) != fingerprint_of_tasks([guess(plain)])  # a run ends
    assert found(frame.set_index("price", drop=False)).columns == plain.columns
    nameless = found(frame.set_index(["group", "day"]).rename_axis([None, "day"]))
    assert {facts.name for facts in plain.columns} - {facts.name for facts in nameless.columns} == {"group"}
    assert found(frame.rename_axis("number")).left_out == {"number": "row numbers"}
    assert found(frame.set_index("x").rename_axis("price")).reason == "several columns are called 'price'"


def test_columns_that_look_like_identifiers_are_named(tmp_path):
    names = ["ID", "customer_id", "passengerId", "paid", "id2"]
    frame = build_frame(0, 50).assign(**{name: np.random.default_rng(0).permutation(50) for name in names})
    frame["name"] = [f"name {number}" for number in range(50)]
    frame.assign(id=1 + np.arange(50) // 2).to_csv(tmp_path / "a.csv", index=False)
    line = (
        "4 columns look like identifiers; {} leaves them out: 'ID' of a.csv, 'customer_id' of a.csv, 'passengerId' of "
        "a.csv, 'name' of a.csv"
    )
    fractions = {"validation_fraction": 0.0, "test_fraction": 0.0}
    expected = line.format("the column drop of tasks.csv")
    assert build_prior("tables", folder=str(tmp_path), **fractions).describe()[-1].startswith(expected)
    one = {"file": str(tmp_path / "a.csv"), "target": "label"}
    assert build_prior("one_table", **one).describe()[-1].startswith(line.format("prior.drop"))
    assert not any("identifiers" in line for line in build_prior("one_table", **one, drop=[*names, "name"]).describe())


def test_row_numbers_that_pandas_writes_are_left_out(tmp_path):
    found = entry(tmp_path, build_frame(0, 50).to_csv().encode())
    assert found.left_out == {"Unnamed: 0": "no name: perhaps row numbers"}
    assert len(found.columns) == 8


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=300),
        st.text(st.sampled_from('ab1."\n\r,; \t0é-'), max_size=300).map(str.encode),
        st.lists(st.lists(st.text(max_size=5), min_size=2, max_size=2), min_size=11, max_size=20).map(
            lambda rows: pd.DataFrame(rows[1:]).to_csv(index=False).encode(errors="replace")
        ),
    ),
    name=st.sampled_from(["a.csv", "a.parquet", "a.arrow"]),
)
def test_any_bytes_are_a_table_or_have_a_reason(content, name, tmp_path):
    found = entry(tmp_path, content, name)
    assert bool(found.reason) != bool(found.columns)
    if found.columns:
        columns = read_table(content, name).columns
        assert [facts.name for facts in found.columns] == list(columns)
        assert all(len(column) == found.rows for column in columns.values())


def test_copies_have_one_hash_and_are_used_once(tmp_path):
    folder = write_table_files(tmp_path / "tables", 2)
    frame = pd.read_csv(folder / "table0.csv")
    frame.to_parquet(folder / "copy.parquet")
    shuffled = frame.sample(frac=1, random_state=0).iloc[:, ::-1].rename(columns={"x": "renamed"})
    (folder / "sub").mkdir()
    shuffled.to_csv(folder / "sub/shuffled.csv", index=False)
    frame.replace({"group": {"red": "pink"}}).to_csv(folder / "other.csv", index=False)
    hashes = {path: found.content for path, found in index_folder(folder).items()}
    assert len(set(hashes.values())) == 3
    assert hashes["copy.parquet"] == hashes["sub/shuffled.csv"] == hashes["table0.csv"] != hashes["other.csv"]
    assert left_out(folder) == {
        "sub/shuffled.csv": "it has the rows and columns of copy.parquet",
        "table0.csv": "it has the rows and columns of copy.parquet",
    }
    x, y = np.array([0.0, np.nan, 1.0]), np.array([5.0, 6.0, 7.0])
    assert content_hash([x, y]) == content_hash([y[::-1], x[::-1] * -1 * -1]) != content_hash([x, y[::-1]])
