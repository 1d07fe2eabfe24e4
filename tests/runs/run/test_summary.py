"""tabicl-runs, on run directories with known content."""

import json
import time

import pytest
import yaml
from command_line import command

from tabicl_train.run.records import Records
from tabicl_train.run.status import RunLock


def write_run(folder, status: str, step: int, seconds: float, **files) -> None:
    folder.mkdir(parents=True)
    changed = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - seconds))
    (folder / "status.json").write_text(json.dumps({"status": status, "step": step, "time": changed}))
    for name, rows in files.items():
        Records(folder).append_rows(f"{name}.csv", *rows)


def test_runs_are_listed_newest_first_with_what_became_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = [{"step": step, "loss": 2 / step} for step in range(1, 21)]
    scores = [{"step": 9, "data": data, "loss": loss, "roc_auc": auc} for data, loss, auc in (
        ("synthetic", 0.5, None), ("iris", 0.3, 0.9), ("wine", 0.3, 0.8),
    )]  # fmt: skip
    write_run(tmp_path / "runs/old", "finished", 20, 3 * 86400 + 9, metrics=losses, validation=scores)
    (tmp_path / "runs/old/config.yaml").write_text(
        yaml.safe_dump({"curriculum": {"stages": {"a": {"steps": 2000}}}, "trainer": {"max_steps": None}})
    )
    write_run(tmp_path / "runs/sweep/trial", "preempted", 7, 7500, validation=scores[:1])
    write_run(tmp_path / "runs/gone", "running", 3, 185)
    write_run(tmp_path / "runs/now", "running", 0, 62)
    write_run(tmp_path / "runs/wrong", "failed", 1500, 100 * 60)
    lock = RunLock(tmp_path / "runs/now")
    lock.acquire()
    try:
        result = command("runs")
    finally:
        lock.release()
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["run", "status", "step", "loss", "score", "age"]
    assert [line.split() for line in lines] == [
        ["runs/now", "running", "0", "-", "-", "1", "min"],
        ["runs/gone", "killed", "3", "-", "-", "3", "min"],
        ["runs/wrong", "failed", "1,500", "-", "-", "2", "h"],
        ["runs/sweep/trial", "preempted", "7", "-", "validation", "loss", "0.500", "2", "h"],
        ["runs/old", "finished", "20/2,000", "0.103", "ROC", "AUC", "0.850", "3", "d"],
    ]
    assert command("runs", "runs/old").stdout.split()[6:] == lines[-1].split()


CONFIGS = {
    "latin": b"# caf\xe9\ncurriculum: {}\n",
    "empty": b"",
    "broken": b"a: [1\nb: }",
    "list": b"[1, 2]\n",
    "other": b"curriculum: {stages: [1]}\n",
    "date": b"a: 2024-13-01\n",
    "itself": b"curriculum: &a {stages: *a}\ntrainer: {max_steps: 3}\n",
    "tag": b"a: !!bool x\n",
}
STATUSES = {
    "array": b"[1, 2]",
    "text": b"{not json",
    "types": b'{"status": 3, "step": "x", "time": 5}',
    "nulls": b'{"status": null, "step": null, "time": null}',
    "object": b"{}",
    "bytes": b'{"status": "\xe9"',
    "nested": b'{"status": "finished", "step": 7, "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "levels": b'{"status": "finished", "step": 7, "x": ' + b'{"x": ' * 200 + b"0" + b"}" * 201,
    "bool": b'{"status": "finished", "step": true}',
    "digits": b'{"status": "finished", "step": ' + b"9" * 5000 + b"}",
}


def test_runs_with_damaged_files_are_marked_and_the_others_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in CONFIGS.items():
        write_run(tmp_path / "runs" / name, "finished", 7, 62)
        (tmp_path / "runs" / name / "config.yaml").write_bytes(content)
    for name, content in STATUSES.items():
        write_run(tmp_path / "runs" / name, "finished", 7, 62)
        (tmp_path / "runs" / name / "status.json").write_bytes(content)
    write_run(tmp_path / "runs/rows", "finished", 7, 62, validation=[{"step": 1, "loss": 2.0}])
    write_run(tmp_path / "runs/good", "finished", 7, 62)
    result = command("runs")
    shown = {line.split()[0]: line.split()[1:3] for line in result.stdout.splitlines()[1:]}
    assert result.returncode == 0
    assert shown == {
        "runs/good": ["finished", "7"],
        "runs/rows": ["damaged", "-"],
        **{f"runs/{name}": ["finished", "7/?"] for name in CONFIGS},
        **{f"runs/{name}": ["damaged", "-"] for name in STATUSES},
    }
    warnings = result.stderr.splitlines()
    assert len(warnings) == len(shown) - 1
    assert all(line.startswith("warning   runs/") for line in warnings)


@pytest.mark.parametrize(("folder", "words"), [("none", "none: there is no run"), ("run_dir=x", "give one folder")])
def test_a_folder_without_runs(folder, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("runs", folder)
    assert result.returncode == 2 and words in result.stderr
