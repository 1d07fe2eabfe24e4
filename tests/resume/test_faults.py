"""Runs of two processes, one of which runs out of memory, meets a non-finite value, or is stopped."""

import json
import signal
from pathlib import Path

import pytest
import torch
from faults import train
from forked import run_ranks
from runs import assert_same_end, exact, last, metrics, read

pytestmark = pytest.mark.multi_process

# Rank, step (-1: at the start, -2: in a save) and signal; how many steps are done when the run has ended.
STOPS = {
    f"1,-1,{signal.SIGTERM:d}": 0,
    f"0,-2,{signal.SIGUSR1:d}": 2,
    f"1,3,{signal.SIGINT:d}": 4,
    f"0,-1,{signal.SIGTERM:d}": 4,
    f"1,-2,{signal.SIGTERM:d}": 6,
    f"0,6,{signal.SIGUSR1:d}": 7,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of two processes: undisturbed, validated, out of memory or non-finite on one rank, stopped."""
    folder = tmp_path_factory.mktemp("faults")
    two = "trainer.devices=2 trainer.accelerator=cpu"
    validated = (
        "validation.every=3 validation.rows=[40,60] validation.tables=4 validation.features=[2,4] "
        "validation.real_rows=50"
    )
    runs = [
        f"{two} run_dir={folder}/whole",
        f"{two} run_dir={folder}/validated {validated}",
        f"{two} run_dir={folder}/oom-0 oom=0,2,2",
        f"{two} run_dir={folder}/oom-1 oom=1,4,2",
        f"{two} run_dir={folder}/nan nan=1,3",
        *(f"{two} run_dir={folder}/torn {validated} signal={fault}" for fault in STOPS),
        f"{two} run_dir={folder}/torn {validated}",
        f"{two} run_dir={folder}/clock trainer.max_hours=1e-6",
    ]
    for settings in runs:
        assert run_ranks(train, *settings.split(), folder=folder) == [0, 0], (folder / "stderr.0").read_text()
    return folder


def weights_agree(run_dir: Path) -> bool:
    return (run_dir / "weights.0").read_text() == (run_dir / "weights.1").read_text()


@pytest.mark.parametrize(("name", "rank", "step"), [("oom-0", 0, 2), ("oom-1", 1, 4)])
def test_a_pack_that_does_not_fit_is_halved_and_nothing_else_changes(name, rank, step, folder):
    assert weights_agree(folder / name)
    assert exact(folder / name)[:step] == exact(folder / "whole")[:step]
    for row, expected in zip(metrics(folder / name), metrics(folder / "whole"), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
        assert float(row["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-4)
    lines = [line for path in folder.glob("stderr.*") for line in path.read_text().splitlines()]
    (first, *_) = [line for line in lines if f"on rank {rank}; packs of this size are halved" in line]
    assert f"did not fit at step {step}" in first
    a, b = (last(folder / other)["state_dict"] for other in (name, "whole"))
    assert max((v - b[k]).abs().max().item() for k, v in a.items()) < 1e-4
    assert any(not torch.equal(v, b[k]) for k, v in a.items())  # the order of sums did change


def test_an_infinite_value_on_one_rank_stops_the_step_on_both(folder):
    assert weights_agree(folder / "nan")
    rows = metrics(folder / "nan")
    assert [int(row["skipped"]) for row in rows] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert exact(folder / "nan")[:3] == exact(folder / "whole")[:3]
    (incident,) = [json.loads(line) for line in (folder / "nan/incidents.jsonl").read_text().splitlines()]
    assert incident["step"] == 3 and len(rows) == 8


def test_sizes_that_did_not_fit_are_remembered(tmp_path, capfd):
    train(f"run_dir={tmp_path}/run", "oom=0,0,2", "curriculum.stages.smoke.rows=[50,50]",
          "curriculum.stages.smoke.features=[4,4]", "trainer.max_steps=4")  # fmt: skip
    halved = [line for line in capfd.readouterr().err.splitlines() if "did not fit" in line]
    assert len(halved) <= 4  # of 8 tables, then 4 and 2; once more where a column was constant
    with pytest.raises(torch.OutOfMemoryError, match=r"a table of \d+ rows and \d+ features \(step 0\) does not fit"):
        train(f"run_dir={tmp_path}/none", "oom=0,0,1")


def test_a_stop_signal_to_one_rank_in_any_phase_saves_and_loses_no_bit(folder):
    statuses = [json.loads(line) for line in (folder / "torn/statuses").read_text().splitlines()]
    assert [s["status"] for s in statuses] == ["preempted"] * len(STOPS) + ["finished"]
    assert [s["step"] for s in statuses] == [*STOPS.values(), 8]
    assert weights_agree(folder / "torn")
    assert_same_end(folder / "torn", folder / "whole")


def test_validation_changes_nothing_and_loses_nothing(folder):
    assert weights_agree(folder / "validated")
    assert_same_end(folder / "validated", folder / "whole")
    rows = read(folder / "validated/validation.csv")
    assert [int(row["step"]) for row in rows[::6]] == [3, 6, 8] and len(rows) == 18
    assert (folder / "torn/validation.csv").read_text() == (folder / "validated/validation.csv").read_text()


def test_the_time_limit_does_the_same(folder):
    status = json.loads((folder / "clock/status.json").read_text())
    assert (status["status"], status["step"]) == ("preempted", 0)
    assert (folder / "clock/checkpoints/step-00000000.ckpt").exists()
