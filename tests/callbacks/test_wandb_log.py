"""What a run logs to Weights and Biases: the same as its files, after any interruption."""

import json
import math
import os
import signal
import struct
from pathlib import Path
from unittest import mock

import forked
import pytest
from logged_runs import SETTINGS, VALIDATED, train, train_and_die
from runs import exact, metrics, read, run

from tabicl_train.callbacks import wandb_log
from tabicl_train.callbacks.run_log import validation_values
from tabicl_train.callbacks.validation import Validation
from tabicl_train.callbacks.wandb_log import WandbLog
from tabicl_train.callbacks.wandb_runs import wandb_files, why_offline
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.records import Records

pytest.importorskip("wandb")
BLOCK, FULL, FIRST = 32768, 1, 2
OFFLINE = ["wandb.mode=offline", *VALIDATED]
OTHERWISE = ["resume.allow_changes=true", "curriculum.stages.smoke.learning_rate=1e-2", "name=other"]


def records(path: Path):
    """The records of a .wandb file: a LevelDB log (blocks of 32 KB, records of crc, length, kind) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole = (b"" if kind in (FULL, FIRST) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, 4):
            yield Record.FromString(whole)


def histories(run_dir: Path) -> dict[str, list[dict]]:
    """The rows of each run of wandb, in the order in which they were begun."""
    rows_of = {}
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns):
        rows = rows_of.setdefault(path.stem.removeprefix("run-"), [])
        for record in records(path):
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows_of


def first_record(path: Path):
    """What wandb is told of a run when it begins."""
    return next(record.run for record in records(path) if record.HasField("run"))


def assert_equal_to_files(rows: list[dict], run_dir: Path) -> None:
    """All of metrics.csv but the timings, and all of validation.csv, in order and once."""
    training = [row for row in rows if "loss" in row]
    assert [row["_step"] for row in training] == [int(row["step"]) for row in metrics(run_dir)]
    for row, expected in zip(training, metrics(run_dir), strict=True):
        assert row["stage"] == expected["stage"] and row["skipped"] == int(expected["skipped"])
        assert [row[key] for key in ("loss", "grad_norm", "lr")] == [
            float(expected[key]) for key in ("loss", "grad_norm", "lr")
        ]
        assert row["multiplier/icl.0"] > 0
    scores = [row for row in rows if "validation/step" in row]
    by_step = {}
    for row in read(run_dir / "validation.csv") if (run_dir / "validation.csv").exists() else ():
        by_step.setdefault(int(row["step"]), []).append(row)
    assert [row["validation/step"] for row in scores] == list(by_step)
    for row, expected in zip(scores, by_step.values(), strict=True):
        for part in expected:
            name = part["data"] + (f"_{part['rows']}" if part["data"] == "synthetic" else "")
            assert row[f"validation/{name}/loss"] == float(part["loss"])
            assert row[f"validation/{name}/accuracy"] == float(part["accuracy"])


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()  # forgets the environment that it read first
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    yield
    wandb.teardown()


@pytest.mark.slow
def test_steps_done_again_are_logged_once_and_scores_too(tmp_path, no_account, capfd):
    run_dir = tmp_path / "run"
    settings = [*OFFLINE, "wandb.group=width and rate", "wandb.tags=[small,night]", "name=first"]
    train(run_dir, *settings, stop_at=3, number=signal.SIGTERM)
    assert len(metrics(run_dir)) == 4 and not (run_dir / "validation.csv").exists()  # which is left to the next start
    train(run_dir, *settings, stop_at=6)
    assert len(metrics(run_dir)) == 6  # two more than are saved
    train(run_dir, *settings, stop_at=10)
    train(run_dir, *settings)
    (rows,) = histories(run_dir).values()
    assert len(metrics(run_dir)) == 12
    assert_equal_to_files(rows, run_dir)
    for begun in map(first_record, (run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        assert (begun.display_name, begun.run_group) == ("first", "width and rate")
        assert list(begun.tags) == ["small", "night"]
    assert "to upload: wandb sync" in capfd.readouterr().err
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 4
    train(run_dir, *settings)  # finished already
    assert len(list((run_dir / "wandb").glob("offline-run-*"))) == 4
    last = [b for b in read(run_dir / "batches.csv") if b["step"] == "12"]
    by_classes = {key.split("/")[1]: value for key, value in rows[-1].items() if key.startswith("loss_by_classes/")}
    assert set(by_classes) == {b["classes"] for b in last} and any(key.startswith("loss_by_rows/") for key in rows[-1])
    for classes, loss in by_classes.items():
        same = [b for b in last if b["classes"] == classes]
        weighted = sum(float(b["loss"]) * int(b["tables"]) for b in same)
        assert loss == pytest.approx(weighted / sum(int(b["tables"]) for b in same))


@pytest.mark.slow
def test_steps_done_otherwise_begin_a_run_that_replaces_the_one_so_far(tmp_path, no_account, capfd):
    run_dir = tmp_path / "run"
    train(run_dir, *OFFLINE, stop_at=10)
    before = exact(run_dir)
    train(run_dir, *OFFLINE, *OTHERWISE)
    assert before[:8] == exact(run_dir)[:8] and before[9] != exact(run_dir)[9]
    (old, _), (new, rows) = histories(run_dir).items()
    assert_equal_to_files(rows, run_dir)
    assert f"run {old} holds other values at step 9: run {new} takes its place" in capfd.readouterr().err
    (path,) = (run_dir / "wandb").glob(f"offline-run-*/run-{new}.wandb")
    begun = first_record(path)
    assert begun.notes == f"takes the place of run {old}"
    assert {item.key: item.value_json for item in begun.config.update}["replaces"] == f'"{old}"'
    # Fewer rows, of the same steps and values.
    (run_dir / "checkpoints/step-00000012.ckpt").unlink()
    train(run_dir, *OFFLINE, *OTHERWISE, "trainer.log_every=2")
    *_, rows = histories(run_dir).values()
    assert len(histories(run_dir)) == 3
    assert_equal_to_files(rows, run_dir)


@pytest.mark.multi_process
def test_what_a_kill_has_lost_of_the_log_is_taken_from_the_files(tmp_path, no_account):
    run_dir = tmp_path / "run"
    train(run_dir, "wandb.mode=disabled", *VALIDATED, stop_at=6)
    killed = forked.start(train_and_die, *SETTINGS, *OFFLINE, f"run_dir={run_dir}")
    assert forked.exit_code(killed) == -signal.SIGKILL
    assert len(metrics(run_dir)) == 10
    lost = mock.patch.object(Validation, "validate", side_effect=RuntimeError("no last validation"))
    with lost, pytest.raises(RuntimeError, match="no last validation"):
        train(run_dir, *OFFLINE)
    train(run_dir, *OFFLINE)
    (rows,) = histories(run_dir).values()
    assert len(metrics(run_dir)) == 12
    assert_equal_to_files(rows, run_dir)


def test_the_files_of_two_starts_within_a_second_are_read_in_order(tmp_path):
    starts = ["offline-run-20260101_000000-ab", "offline-run-20260101_000000-ab-1", "run-20260101_000001-ab"]
    for name in starts:
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / "run-ab.wandb").touch()
    assert [path.parent.name for path in wandb_files(tmp_path, "ab")] == starts


def test_scores_have_names_and_means():
    rows = [
        {"step": 4, "data": "synthetic", "rows": 40, "loss": 1.0, "accuracy": 0.5},
        {"step": 4, "data": "synthetic", "rows": 60, "loss": 2.0, "accuracy": 0.4},
        {"step": 4, "data": "iris", "rows": 50, "loss": 0.5, "accuracy": 0.9, "roc_auc": 0.8},
    ]
    assert validation_values(rows) == {
        "validation/step": 4,
        "validation/synthetic_40/loss": 1.0,
        "validation/synthetic_40/accuracy": 0.5,
        "validation/synthetic_60/loss": 2.0,
        "validation/synthetic_60/accuracy": 0.4,
        "validation/iris/loss": 0.5,
        "validation/iris/accuracy": 0.9,
        "validation/iris/roc_auc": 0.8,
        "validation/mean/synthetic": 1.5,
        "validation/mean/real": 0.8,
    }


def continued(tmp_path: Path, monkeypatch, mode: str, server: int = 0) -> tuple[list[tuple], int]:
    """What is logged of a run of 5 steps, all of which wandb's files hold, and how many times wandb is started."""
    records = Records(tmp_path)
    values = {"stage": "smoke", "loss": 1.5, "grad_norm": math.nan, "lr": 0.1, "skipped": 0}
    for step in range(1, 6):
        records.append_rows("metrics.csv", {"step": step, **values})
    held = [{"_step": step, **values, "grad_norm": "NaN"} for step in range(1, 6)]
    logged, begun = [], []

    def start(*_):
        begun.append(1)
        run = mock.Mock(offline=mode == "offline", step=server)
        run.log = lambda values, step, commit: logged.append((step, values.get("validation/step")))
        return run

    monkeypatch.setattr(wandb_log, "start", start)
    monkeypatch.setattr(wandb_log, "wandb_files", lambda *_: [tmp_path])
    monkeypatch.setattr(wandb_log, "read_back", lambda _: iter(held))
    records.replace("wandb.json", '{"id": "a", "replaces": null}')
    WandbLog(compose([*SETTINGS, f"wandb.mode={mode}"]), records).complete()
    return logged, len(begun)


def test_a_server_that_has_less_than_the_files_gets_the_rest(tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    assert continued(tmp_path / "none", monkeypatch, "offline") == ([], 0)
    assert continued(tmp_path, monkeypatch, "online", server=4) == ([(4, None), (5, None)], 1)


def test_scores_whose_step_is_logged_come_with_the_next_row_or_a_new_run(tmp_path, monkeypatch):
    row = {"data": "synthetic", "rows": 40, "loss": 1.0, "accuracy": 0.5, "roc_auc": None}
    for name, steps in (("one", [3]), ("two", [2, 3])):
        (tmp_path / name).mkdir()
        for step in steps:
            Records(tmp_path / name).append_rows("validation.csv", {"step": step, **row})
    assert continued(tmp_path / "one", monkeypatch, "offline") == ([(6, 3)], 1)
    assert continued(tmp_path / "two", monkeypatch, "offline") == ([(1, None), (2, 2), (3, 3), (4, None), (5, None)], 1)


@pytest.mark.slow
def test_a_log_that_fails_ends_no_run(tmp_path, no_account, capfd, monkeypatch):
    monkeypatch.setattr("wandb.Run.log", mock.Mock(side_effect=OSError("no service")))
    train(tmp_path / "run", "wandb.mode=offline", "trainer.max_steps=2")
    assert len(metrics(tmp_path / "run")) == 2
    assert capfd.readouterr().err.count("wandb     nothing more is logged: no service") == 1


@pytest.mark.multi_process
def test_online_without_an_account_is_offline(no_account):
    assert "no account is logged in" in why_offline(1.0)


@pytest.mark.slow
def test_online_without_a_network_is_offline(tmp_path, no_account, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run_dir = tmp_path / "run"
    settings = ("prior=dummy", "stream.num_workers=0", "trainer.max_steps=3")
    stderr = run(run_dir, "wandb.mode=online", "wandb.timeout=1", *settings)
    assert "http://127.0.0.1:9 cannot be reached" in stderr
    (rows,) = histories(run_dir).values()
    assert [row["_step"] for row in rows] == [1, 2, 3]


def test_names_that_wandb_would_refuse_later_are_reported_at_once():
    wrong = ["wandb.project=a/b", f"wandb.tags=[ok,{'x' * 65}]"]
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", *wrong])
    project, tag = caught.value.problems
    assert project == r"wandb.project is 'a/b'; it must have at most 128 characters, and none of / \ # ? % :"
    assert tag.startswith("wandb.tags has 'xxx") and tag.endswith("; a tag must have 1 to 64 characters")
    import wandb

    with pytest.raises(wandb.UsageError, match="cannot contain"):
        wandb.Settings(project="a/b")
    with pytest.raises(ValueError, match="between 1 and 64"):
        wandb.Settings(run_tags=("x" * 65,))
