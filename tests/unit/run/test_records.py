import contextlib
import json
import os
import re
import resource

import pytest
from command_line import command

from tabicl_train.errors import ConfigError
from tabicl_train.run.records import Records


@contextlib.contextmanager
def limit(size: int):
    """Limit the size of files: a write beyond it fails as on a full disk. It ends before pytest writes its output."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"# caf\xe9\nseed: 0\n", "is not UTF-8 text: line 1 has the byte 0xe9; save it as UTF-8"),
        (b"", "is empty"),
        (b"# only this\n", "is empty"),
        (b"a: [1\nb: }", "is not valid YAML: expected ',' or ']', but got ':' in line 2"),
        (b"a: &a [1]\nb: *a", "is not valid YAML: an alias (*name), which no run writes, in line 2"),
        (b"a: &a {b: 1}\n<<: *a", "is not valid YAML: an alias (*name), which no run writes, in line 2"),
        (b"a: &a [*a]", "is not valid YAML: an alias (*name), which no run writes, in line 1"),
        (b"[" * 700, "cannot be read: it is nested too deeply"),
        (b"- seed\n", "is not the configuration of a run"),
        (b"a: " + b"[" * 700 + b"]" * 700, "cannot be read: it is nested too deeply"),
        (b"a: " + b"{b: " * 150 + b"0" + b"}" * 150, "cannot be read: it is nested too deeply"),
        (b"a: !!int ''", "cannot be read: IndexError: string index out of range"),
    ],
)
def test_a_damaged_configuration_is_one_line_in_every_command_that_reads_it(content, words, records, monkeypatch):
    path = records.folder / "config.yaml"
    assert records.config() is None
    path.write_bytes(content)
    (records.folder / "metrics.csv").touch()
    line = f"error: {path} {words}"
    report = command("report", f"run_dir={records.folder}")
    assert (report.returncode, report.stderr) == (2, f"{line}\n")
    train = command("train", "experiment=smoke", "stream.num_workers=0", f"run_dir={records.folder}")
    assert train.returncode == 2
    assert train.stderr.startswith(f"{line}; to start over, choose another run_dir")
    assert train.stderr.count("\n") == 1 and path.read_bytes() == content
    replay = command("replay", f"run_dir={records.folder}", "step=0")
    assert (replay.returncode, replay.stderr) == (2, f"{line}\n")


def test_on_a_full_disk_files_keep_their_whole_lines(records):
    path = records.folder / "metrics.csv"
    records.append_rows("metrics.csv", {"step": 1, "loss": 0.5})
    records.replace("status.json", json.dumps({"step": 1}))
    whole = path.read_bytes()
    for write in (
        lambda: records.append_rows("metrics.csv", {"step": 2, "loss": 0.123456789}),
        lambda: records.replace("status.json", json.dumps({"step": 2, "cause": "unknown"})),
    ):
        expected = pytest.raises(OSError, match=r"File too large: '.*/(metrics\.csv|status\.json)'$")
        with expected, limit(len(whole) + 5):  # part of a row
            write()
    records.append_rows("metrics.csv", {"step": 4, "loss": 0.25})
    assert path.read_bytes() == whole + b"4,0.25\r\n"
    assert records.json("status.json") == {"step": 1}
    assert sorted(os.listdir(records.folder)) == ["metrics.csv", "status.json"]


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


@pytest.mark.parametrize("content", [b"", b"ste", b"step,loss\r\n", b"\x00\x00\x00"])
def test_empty_and_torn_files_are_begun_again(content, records):
    path = records.folder / "metrics.csv"
    path.write_bytes(content)
    assert records.rows("metrics.csv") == []
    records.rewind("metrics.csv", 5)
    records.append_rows("metrics.csv", {"step": 6, "loss": 0.5})
    assert path.read_bytes() == b"step,loss\r\n6,0.5\r\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("provenance.jsonl", '{"step": 0, "time": "now", "versions": [], "command": [1]}', "versions is [], command"),
        ("provenance.jsonl", '{"step": true, "time": "now", "versions": {}, "command": []}', "step is True"),
        ("incidents.jsonl", '{"step": "3", "reason": "none"}', "step is '3'"),
        ("incidents.jsonl", '{"step": 3, "reason": {"a": 1}}', "reason is {'a': 1}"),
    ],
)
def test_values_of_wrong_kinds_are_an_error_that_names_the_line(records, name, content, words):
    (records.folder / name).write_text(f"not JSON\n{'[' * 10**5}\n{content}\n")
    with pytest.raises(ConfigError, match=rf"{name}: line 3 was not written by a run: {re.escape(words)}"):
        records.lines(name)
    records.rewind(name, 3)  # a rewound run keeps what it does not know


def test_what_is_missing_or_damaged_reads_as_nothing(records):
    assert records.rows("metrics.csv") == records.lines("incidents.jsonl") == []
    assert records.json("status.json") is None
    records.rewind("metrics.csv", 3)
    (records.folder / "status.json").write_text('{"step": ')
    assert records.json("status.json") is None
    assert os.listdir(records.folder) == ["status.json"]
