import json
import resource

import pytest

from tabicl_train.files import append_text, replace_text
from tabicl_train.metrics import append


@pytest.fixture
def limit():
    """Sets the most bytes of a file, which a write beyond finds like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_rows_and_one_warning(tmp_path, limit, capsys):
    path = tmp_path / "metrics.csv"
    append(path, {"step": 1, "loss": 0.5})
    whole = path.read_bytes()
    limit(len(whole) + 5)  # part of a row
    append(path, {"step": 2, "loss": 0.123456789})
    append(path, {"step": 3, "loss": 0.123456789})
    assert path.read_bytes() == whole
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning   metrics.csv cannot be written") and "File too large" in told
    limit(1000)
    append(path, {"step": 4, "loss": 0.25})
    assert path.read_bytes() == whole + b"4,0.25\r\n"


def test_what_cannot_be_begun_is_not_there(tmp_path, limit, capsys):
    path = tmp_path / "incidents.jsonl"
    limit(5)
    append_text(path, "0123456789")
    assert not path.exists()
    limit(1000)
    append_text(path, "0123456789")
    assert path.read_text() == "0123456789"


def test_what_cannot_be_replaced_stays_whole(tmp_path, limit, capsys):
    path = tmp_path / "status.json"
    replace_text(path, json.dumps({"step": 1}))
    limit(5)
    replace_text(path, json.dumps({"step": 2}))
    assert json.loads(path.read_text()) == {"step": 1} and [f.name for f in tmp_path.iterdir()] == ["status.json"]
    assert "status.json cannot be written" in capsys.readouterr().err
