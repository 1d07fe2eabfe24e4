"""Runs of two processes, one of which runs out of memory, meets a non-finite value, or is stopped."""

import json
from pathlib import Path

import pytest
import torch
from faults import train_with_faults
from forked import run_ranks
from training_runs import read_exact_metrics, read_metrics

VALIDATED = (
    "validation.every=3", "validation.rows=[40,60]", "validation.tables=4", "validation.features=[2,4]",
)  # fmt: skip


def train_two(folder: Path, name: str, *settings: str) -> None:
    words = ("trainer.devices=2", "trainer.accelerator=cpu", f"run_dir={folder}/{name}", *settings)
    assert run_ranks(train_with_faults, *words, folder=folder) == [0, 0], (folder / "stderr.0").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs: undisturbed and validated; out of memory on one rank, then non-finite on the other."""
    folder = tmp_path_factory.mktemp("faults")
    train_two(folder, "whole", *VALIDATED)
    train_two(folder, "faulty", "oom=1,4,2", "nan=0,6")
    return folder


def weights_agree(run_dir: Path) -> bool:
    return (run_dir / "weights.0").read_text() == (run_dir / "weights.1").read_text()


def test_a_pack_that_does_not_fit_is_halved_and_nothing_else_changes(folder):
    """And validation, which the other run does, changes nothing either."""
    faulty, whole = folder / "faulty", folder / "whole"
    assert read_exact_metrics(faulty)[:4] == read_exact_metrics(whole)[:4]
    for row, expected in zip(read_metrics(faulty)[:6], read_metrics(whole)[:6], strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
        assert float(row["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-4)

    printed = "".join(path.read_text() for path in folder.glob("stderr.*"))
    lines = [line for line in printed.splitlines() if "on rank 1; packs of this size are halved" in line]
    assert "did not fit at step 4" in lines[0]

    weights = torch.load(faulty / "checkpoints/step-00000006.ckpt")["state_dict"]
    undisturbed = torch.load(whole / "checkpoints/step-00000006.ckpt")["state_dict"]
    differences = [(weight - undisturbed[name]).abs().max().item() for name, weight in weights.items()]
    assert 0 < max(differences) < 1e-4  # the order of sums did change


def test_an_infinite_value_on_one_rank_stops_the_step_on_both(folder):
    assert weights_agree(folder / "faulty")
    assert [int(row["skipped"]) for row in read_metrics(folder / "faulty")] == [0, 0, 0, 0, 0, 0, 1, 1]
    (incident,) = [json.loads(line) for line in (folder / "faulty/incidents.jsonl").read_text().splitlines()]
    assert incident["step"] == 6


def test_sizes_that_did_not_fit_are_remembered(tmp_path, capfd):
    train_with_faults(f"run_dir={tmp_path}/run", "oom=0,0,2", "curriculum.stages.smoke.rows=[50,50]",
          "curriculum.stages.smoke.features=[4,4]", "trainer.max_steps=4")  # fmt: skip
    halved = [line for line in capfd.readouterr().err.splitlines() if "did not fit" in line]
    assert len(halved) <= 4  # of 8 tables, then 4 and 2; once more where a column was constant
    with pytest.raises(torch.OutOfMemoryError, match=r"a table of \d+ rows and \d+ features \(step 0\) does not fit"):
        train_with_faults(f"run_dir={tmp_path}/none", "oom=0,0,1")
