import json
import os
import resource

import pytest

from tabicl_train.run_dir.records import Records


@pytest.fixture
def limit():
    """Sets the most bytes of a file, which a write beyond finds like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path)


def test_a_full_disk_costs_rows_and_one_warning(records, limit, capsys):
    path = records.folder / "metrics.csv"
    records.append_rows("metrics.csv", {"step": 1, "loss": 0.5})
    whole = path.read_bytes()
    limit(len(whole) + 5)  # part of a row
    records.append_rows("metrics.csv", {"step": 2, "loss": 0.123456789})
    records.append_rows("metrics.csv", {"step": 3, "loss": 0.123456789})
    assert path.read_bytes() == whole
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning   metrics.csv cannot be written") and "File too large" in warning
    limit(1000)
    records.append_rows("metrics.csv", {"step": 4, "loss": 0.25})
    assert path.read_bytes() == whole + b"4,0.25\r\n"


def test_what_cannot_be_begun_is_not_there(records, limit):
    limit(5)
    records.append_line("incidents.jsonl", {"step": 0})
    assert not (records.folder / "incidents.jsonl").exists()
    limit(1000)
    records.append_line("incidents.jsonl", {"step": 0})
    assert records.lines("incidents.jsonl") == [{"step": 0}]


def test_what_cannot_be_replaced_stays_whole(records, limit, capsys):
    records.replace("status.json", json.dumps({"step": 1}))
    limit(5)
    records.replace("status.json", json.dumps({"step": 2}))
    assert records.json("status.json") == {"step": 1}
    assert os.listdir(records.folder) == ["status.json"]
    assert "status.json cannot be written" in capsys.readouterr().err


def test_rewinding_drops_later_and_torn_rows(records):
    for step in (1, 2, 3):
        records.append_rows("metrics.csv", {"step": step, "loss": 0.1 + step})
    path = records.folder / "metrics.csv"
    torn = path.read_bytes() + b"4,0."
    path.write_bytes(torn)
    assert [row["step"] for row in records.rows("metrics.csv")] == ["1", "2", "3"]
    records.rewind("metrics.csv", 2)
    assert path.read_bytes() == b"step,loss\r\n1,1.1\r\n2,2.1\r\n"
    path.write_bytes(torn)
    records.append_rows("metrics.csv", {"step": 4, "loss": 0.25})  # a torn line does not spoil the next one
    assert records.rows("metrics.csv")[-2:] == [{"step": "3", "loss": "3.1"}, {"step": "4", "loss": "0.25"}]


def test_rewinding_incidents_that_are_not_in_order(records):
    for step in (0, 7, 2, 5):
        records.append_line("incidents.jsonl", {"step": step})
    path = records.folder / "incidents.jsonl"
    path.write_text(path.read_text() + '{"step": 1')
    records.rewind("incidents.jsonl", 5)
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n'


@pytest.mark.parametrize("content", [b"", b"ste", b"step,loss\r\n", b"\x00\x00\x00", b"\xff\xfe\n\n"])
def test_empty_and_torn_files_are_begun_again(content, records):
    path = records.folder / "metrics.csv"
    path.write_bytes(content)
    assert records.rows("metrics.csv") == []
    records.rewind("metrics.csv", 5, ("step", "loss"))
    records.append_rows("metrics.csv", {"step": 6, "loss": 0.5})
    assert path.read_bytes() == b"step,loss\r\n6,0.5\r\n"


def test_rewinding_on_a_full_disk(records, limit, capsys):
    for step in (0, 7, 2):
        records.append_line("incidents.jsonl", {"step": step})
        records.append_rows("metrics.csv", {"step": step})
    limit(1)
    records.rewind("incidents.jsonl", 5)  # what follows the dropped line is the price
    records.rewind("metrics.csv", 1)
    assert records.lines("incidents.jsonl") == [{"step": 0}]
    assert [row["step"] for row in records.rows("metrics.csv")] == ["0"]
    assert sorted(os.listdir(records.folder)) == ["incidents.jsonl", "metrics.csv"]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "incidents.jsonl cannot be written" in warning  # cutting off the end of a file takes no space


def test_columns_that_an_older_version_lacked_become_empty(records):
    records.append_rows("batches.csv", {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    records.rewind("batches.csv", 1, ("step", "classes", "loss"))
    records.append_rows("batches.csv", {"step": 2, "classes": 3, "loss": 0.125})
    assert records.rows("batches.csv") == [
        {"step": "1", "classes": "", "loss": "0.5"},
        {"step": "2", "classes": "3", "loss": "0.125"},
    ]


def test_what_is_missing_or_damaged_reads_as_nothing(records):
    assert records.rows("metrics.csv") == records.lines("incidents.jsonl") == []
    assert records.json("status.json") is None
    records.rewind("metrics.csv", 3)
    (records.folder / "status.json").write_text('{"step": ')
    assert records.json("status.json") is None and os.listdir(records.folder) == ["status.json"]


def test_nothing_is_written_once_the_folder_belongs_to_another_process(tmp_path):
    def refuse():
        raise PermissionError("the folder belongs to another process")

    Records(tmp_path).append_rows("metrics.csv", {"step": 1})
    records = Records(tmp_path, refuse)
    for write in (
        lambda: records.append_rows("metrics.csv", {"step": 2}),
        lambda: records.append_line("incidents.jsonl", {"step": 2}),
        lambda: records.replace("status.json", "{}"),
        lambda: records.rewind("metrics.csv", 0),
    ):
        with pytest.raises(PermissionError):
            write()
    assert os.listdir(tmp_path) == ["metrics.csv"] and len(records.rows("metrics.csv")) == 1
