"""What a restart by torchrun has cost, read from the files that the processes before it have left."""

import json
import time
from pathlib import Path

import pytest

from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.restart import find_restart


@pytest.fixture(autouse=True)
def torchrun(monkeypatch):
    for name, value in {"RUN_ID": "a", "RESTART_COUNT": "2", "MAX_RESTARTS": "5"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)


def leave(folder: Path, **values) -> None:
    """status.json, written 30 seconds ago."""
    written = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 30))
    status = {"status": "failed", "step": 40, "time": written, "host": "h", "elastic": "a", "cause": None}
    (folder / "status.json").write_text(json.dumps(status | values))


def test_the_line_names_the_cause_the_seconds_the_steps_and_the_ranks(tmp_path):
    leave(tmp_path, cause="rank 3 on h is gone")
    Records(tmp_path).append_rows("metrics.csv", {"step": 41}, {"step": 44})  # after the last heartbeat
    restart = find_restart(tmp_path, 32)
    assert restart.line(2) in [
        f"restart   rank 3 on h is gone; {seconds} s later the run continues on 2 ranks and repeats 12 steps "
        "(restart 2 of 5)"
        for seconds in (30, 31)
    ]
    facts = restart.facts(2)
    assert 30 <= facts.pop("seconds") < 32
    assert facts == {"cause": "rank 3 on h is gone", "repeated": 12, "ranks": 2}


@pytest.mark.parametrize(
    ("status", "cause"),
    [("running", "rank 0 on h is gone"), ("preempted", "the run was stopped"), ("failed", "the run failed")],
)
def test_without_a_known_cause_the_status_says_it(status, cause, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # a machine has come: torchrun does not count that
    leave(tmp_path, status=status)
    line = find_restart(tmp_path, 40).line(1)
    assert line.startswith(f"restart   {cause}; ") and line.endswith(" on 1 rank and repeats 0 steps")


def test_other_starts_are_no_restarts(tmp_path, monkeypatch):
    assert find_restart(tmp_path, 0) is None
    for values in ({"elastic": "b"}, {"status": "finished"}, {"elastic": None}, {"time": "2020-01-01T00:00:00+0000"}):
        leave(tmp_path, **values)
        assert find_restart(tmp_path, 40) is None
    leave(tmp_path)
    (tmp_path / "status.json").write_text('{"status": "failed", "step": 40}')  # of an older version
    assert find_restart(tmp_path, 40) is None
    leave(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert find_restart(tmp_path, 40) is None
