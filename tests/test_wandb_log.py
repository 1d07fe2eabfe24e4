import json
import os
import struct
from pathlib import Path

import pytest
from runs import metrics, read, run

from tabicl_train.wandb_log import why_offline

pytest.importorskip("wandb")
BLOCK, FULL, FIRST = 32768, 1, 2


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


def history(run_dir: Path) -> list[dict]:
    rows = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in records(path):
            if record.HasField("history"):
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def test_a_resumed_run_is_one_run_offline_without_steps_twice(tmp_path, no_account):
    run_dir = tmp_path / "run"
    run(run_dir, "wandb.mode=offline", "trainer.max_steps=9", "checkpoint.every=6")
    (run_dir / "checkpoints" / "step-00000009.ckpt").unlink()  # as after a kill: steps 7 to 9 are done again
    result = run(run_dir, "wandb.mode=offline", "trainer.max_steps=14", "checkpoint.every=6")
    assert "resumed at step 6" in result.stderr and "to upload: wandb sync" in result.stderr
    lives = [path.name for path in (run_dir / "wandb").glob("offline-run-*")]
    assert len(lives) == 2 and len({name.rsplit("-", 1)[1] for name in lives}) == 1
    rows = history(run_dir)
    assert [row["_step"] for row in rows] == list(range(1, 15))
    for row, told in zip(rows, metrics(run_dir), strict=True):
        assert row["loss"] == float(told["loss"]) and row["stage"] == told["stage"]
        assert row["multiplier/icl.0"] > 0
    last = [b for b in read(run_dir / "batches.csv") if b["step"] == "14"]
    by_classes = {key.split("/")[1]: value for key, value in rows[-1].items() if key.startswith("loss_by_classes/")}
    assert set(by_classes) == {b["classes"] for b in last} and any(key.startswith("loss_by_rows/") for key in rows[-1])
    for classes, loss in by_classes.items():
        mine = [b for b in last if b["classes"] == classes]
        weighted = sum(float(b["loss"]) * int(b["tables"]) for b in mine)
        assert loss == pytest.approx(weighted / sum(int(b["tables"]) for b in mine))


def test_online_without_an_account_is_offline(no_account):
    assert "no account is logged in" in why_offline(1.0)


def test_online_without_a_network_is_offline(tmp_path, no_account, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run_dir = tmp_path / "run"
    result = run(run_dir, "wandb.mode=online", "wandb.timeout=1", "trainer.max_steps=3")
    assert "http://127.0.0.1:9 cannot be reached" in result.stderr
    assert [row["_step"] for row in history(run_dir)] == [1, 2, 3]
