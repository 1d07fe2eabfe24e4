"""Runs of two processes in which one of them meets trouble."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import train
from runs import exact, last, metrics

SCRIPT = Path(__file__).with_name("faults.py")


def script(*runs: str, ranks: int = 2) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run([*launch, SCRIPT, *runs], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs of two processes: undisturbed, out of memory on each rank, not finite on the second rank."""
    folder = tmp_path_factory.mktemp("faults")
    two = "trainer.devices=2 trainer.accelerator=cpu"
    result = script(
        f"{two} run_dir={folder}/whole",
        f"{two} run_dir={folder}/oom-0 oom=0,2,2",
        f"{two} run_dir={folder}/oom-1 oom=1,4,2",
        f"{two} run_dir={folder}/nan nan=1,3",
    )
    assert result.returncode == 0, result.stderr
    (folder / "told").write_text(result.stderr)
    return folder


def weights_agree(run_dir: Path) -> bool:
    return (run_dir / "weights.0").read_text() == (run_dir / "weights.1").read_text()


@pytest.mark.parametrize(("name", "rank", "step"), [("oom-0", 0, 2), ("oom-1", 1, 4)])
def test_a_batch_that_does_not_fit_is_halved_and_nothing_else_changes(name, rank, step, folder):
    assert weights_agree(folder / name)
    assert exact(folder / name)[:step] == exact(folder / "whole")[:step]
    for row, expected in zip(metrics(folder / name), metrics(folder / "whole"), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
        assert float(row["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-4)
    (found, *_) = [line for line in (folder / "told").read_text().splitlines() if f"on rank {rank}; halved" in line]
    assert f"did not fit at step {step}" in found
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
    train([f"run_dir={tmp_path}/run", "oom=0,0,2", "curriculum.stages.smoke.rows=[50,50]",
           "curriculum.stages.smoke.features=[4,4]", "trainer.max_steps=4"])  # fmt: skip
    found = [line for line in capfd.readouterr().err.splitlines() if "did not fit" in line]
    assert len(found) <= 4  # of 4 tables, then 2; narrower ones where a column was constant
    with pytest.raises(torch.OutOfMemoryError, match=r"a table of \d+ rows and \d+ features \(step 0\) does not fit"):
        train([f"run_dir={tmp_path}/none", "oom=0,0,1"])
