"""Shared by tests of whole runs: starting one, and reading and comparing its files."""

import csv
from pathlib import Path

import torch
from command_line import command

from tabicl_train.run_dir.checkpoint import saved

# the columns of metrics.csv that are not timings
EXACT = ("step", "stage", "loss", "guess_loss", "grad_norm", "lr", "skipped")


def run(run_dir: Path, *overrides: str, code: int = 0) -> str:
    """tabicl-train, which must end with this exit code; returns its stderr."""
    result = command("train", "experiment=smoke", f"run_dir={run_dir}", *overrides)
    assert result.returncode == code, result.stderr
    return result.stderr


def read(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def metrics(run_dir: Path) -> list[dict]:
    return read(run_dir / "metrics.csv")


def exact(run_dir: Path) -> list[tuple]:
    return [tuple(row[column] for column in EXACT) for row in metrics(run_dir)]


def last(run_dir: Path) -> dict:
    return torch.load(saved(run_dir / "checkpoints")[-1], weights_only=True)


def assert_same_state(a, b) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


def assert_same_end(run_dir: Path, other: Path) -> None:
    """Loss and gradient norm of every step, and the weights and optimizer state at the end, bit for bit."""
    assert exact(run_dir) == exact(other)
    for part in ("state_dict", "optimizer_states"):
        assert_same_state(last(run_dir)[part], last(other)[part])
