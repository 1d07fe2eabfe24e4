"""The index as a file, and what tasks.csv and guesses make of it."""

import errno
import os
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from table_files import build_frame, write_table_files

from priors import PriorError
from priors.real import files
from priors.real.files import NAME, index_folder
from priors.real.tasks import find_tasks


@pytest.fixture
def folder(tmp_path):
    return write_table_files(tmp_path / "tables")


@pytest.fixture
def read(monkeypatch):
    """The paths of files, as they are read."""
    paths = []
    read_entry = files.read_entry

    def watched(folder, path, *state):
        paths.append(path)
        return read_entry(folder, path, *state)

    monkeypatch.setattr(files, "read_entry", watched)
    return paths


def again(folder):
    """The index as another process would see it."""
    files.index_files.cache_clear()
    return index_folder(folder)


def test_files_are_read_once_and_again_when_they_change(folder, read):
    (folder / ".hidden").mkdir()
    write_table_files(folder / ".hidden")
    (folder / "notes.txt").write_text("no table")
    entries = index_folder(folder)
    assert read == list(entries) == [f"table{number}.csv" for number in range(4)]
    assert again(folder) == entries and len(read) == 4
    build_frame(9, 100).to_csv(folder / "table2.csv", index=False)
    build_frame(8, 100).to_csv(folder / "new.CSV", index=False)
    (folder / "table0.csv").unlink()
    changed = again(folder)
    assert read[4:] == ["new.CSV", "table2.csv"]
    assert list(changed) == ["new.CSV", *list(entries)[1:]]
    assert changed["table2.csv"].rows == 100
    assert changed["table1.csv"] == entries["table1.csv"]


def test_what_cannot_be_read_is_named_and_tried_again(folder, monkeypatch):
    (folder / "nothing.csv").symlink_to("nowhere.csv")
    os.mkfifo(folder / "pipe.csv")  # reading it would never end
    read_bytes = Path.read_bytes

    def refuse(path):
        if path.name == "table0.csv":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert {path: entry.reason for path, entry in index_folder(folder).items() if entry.reason} == {
        "table0.csv": "it cannot be read (Permission denied)"
    }
    monkeypatch.undo()
    assert again(folder)["table0.csv"].rows == 150


def test_a_subfolder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    write_table_files(folder / "more", 1)
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "more":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PriorError, match=r"tables/more cannot be listed: Permission denied$"):
        index_folder(folder)


def test_the_index_of_a_folder_that_cannot_be_written_is_in_memory(folder, read, monkeypatch):
    monkeypatch.setattr(files.os, "replace", mock.Mock(side_effect=PermissionError))
    assert len(index_folder(folder)) == len(index_folder(folder)) == len(read) == 4
    assert not (folder / NAME).exists()


def test_a_missing_package_is_no_reason_to_leave_files_out(folder, monkeypatch):
    build_frame(0, 20).to_parquet(folder / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PriorError, match=r"a.parquet: .parquet files need pyarrow: pip install pyarrow, or .*\[eval\]"):
        index_folder(folder)


def found(folder, tasks: str | None = None):
    """Targets of the files by path, and why files are left out."""
    if tasks is not None:
        (folder / "tasks.csv").write_text(tasks)
    tasks, left_out = find_tasks(folder, index_folder(folder))
    return {task.entry.path: task.target for task in tasks}, left_out


@pytest.mark.parametrize(
    ("names", "target"),
    [
        (["x", "y", "z"], "y"),
        (["Class", "label", "z"], "Class"),
        ([" TARGET", "class", "z"], " TARGET"),
        (["a", "b", "c"], "c"),
        (["yes", "classes", "c"], "c"),
    ],
)
def test_targets_are_guessed_by_name_or_place(names, target, tmp_path):
    frame = build_frame(0, 40)[["x", "size", "price"]]
    frame.set_axis(names, axis=1).to_csv(tmp_path / "a.csv", index=False)
    assert found(tmp_path) == ({"a.csv": target}, {})


def test_the_last_column_is_no_target_if_it_cannot_be_used(tmp_path):
    frame = build_frame(0, 40)[["x", "size"]]
    for name, last in {
        "one": 3,
        "empty": None,
        "text": [f"text {i}" for i in range(40)],
        "day": pd.date_range("2024", periods=40),
    }.items():
        frame.assign(last=last).to_csv(tmp_path / f"{name}.csv", index=False)
    frame.assign(last=frame["x"].where(frame.index < 9)).to_csv(tmp_path / "few.csv", index=False)
    assert found(tmp_path) == (
        {},
        {
            "day.csv": "its target 'last' has times",
            "empty.csv": "its target 'last' has no value",
            "few.csv": "its target 'last' has a value in 9 rows, fewer than 10",
            "one.csv": "its target 'last' has a single value",
            "text.csv": "its target 'last' has 40 different texts in 40 rows",
        },
    )


def test_tasks_csv_names_targets(folder):
    targets, left_out = found(
        folder,
        "task,item,target,drop,categorical\n"
        "one,table0.csv,price,label; day,size\n"
        "two,table1.csv,nothing,,\n"
        "three,table2.csv,price,x price,\n",
    )
    assert targets == {"table0.csv": "price", "table3.csv": "label"}
    assert left_out == {
        "table1.csv": "tasks.csv names the columns nothing, which it does not have",
        "table2.csv": "tasks.csv drops its target price",
    }
    tasks, _ = find_tasks(folder, index_folder(folder))
    (task,) = (task for task in tasks if not task.is_guessed)
    assert [facts.name for facts in task.columns] == ["x", "gaps", "group", "flag", "size", "price"]
    assert task.targets(100, numeric=True) == ["x", "gaps", "price"]
    assert task.targets(140, numeric=True) == ["x", "price"]  # a fifth of "gaps" is missing
    assert task.targets(140, numeric=False) == ["x", "group", "flag", "size", "price"]
    assert task.most_rows(numeric=True) == 150
    assert task.targets(151, numeric=True) == []


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("item,goal\n", "lacks the columns target"),
        ("item,target\nnone.csv,a\ntable0.csv,x\n", "lists files that are not there, or of no known kind: none.csv"),
        ("item,target\ntable0.csv,x\ntable0.csv,x\n", "lists twice: table0.csv with the target x"),
        ('item,target\n"', "cannot be read|lists files"),
        ("", "lacks the columns item, target"),
        ("item,target,family\ntable0.csv,x,a\ntable0.csv,price,b\n", "gives several families to table0.csv$"),
        ("item,target\ntable0.csv\ntable1.csv,x\n", "names no target of table0.csv$"),
    ],
)
def test_a_faulty_tasks_csv_is_an_error(tasks, message, folder):
    with pytest.raises(PriorError, match=message):
        found(folder, tasks)


def test_a_listed_file_is_preferred_to_its_copies(folder):
    (folder / "a.csv").write_bytes((folder / "table0.csv").read_bytes())
    targets, left_out = found(folder, "item,target\ntable0.csv,x\ntable0.csv,price\n")
    assert targets["table0.csv"] == "x"
    assert left_out == {"a.csv": "it has the rows and columns of table0.csv"}
