"""Interrupted and continued runs against undisturbed ones, bit for bit."""

import json
import signal
from pathlib import Path

import pytest
from forked import exit_code, run_ranks, start
from interrupted import train, train_rank
from runs import assert_same_end, exact, last, metrics

pytestmark = pytest.mark.multi_process

STEPS = 8
SAVED = (2, 4)  # the checkpoints before step 5; a save beside training may not have reached the disk


def tables(folder: Path, name: str) -> set[tuple[int, str]]:
    """Step and digest of every table that a run trained on; replayed steps count once."""
    lines = (folder / f"{name}.tables").read_text().splitlines()
    return {(int(step), digest) for step, digest in map(str.split, lines)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, Path]:
    """Undisturbed runs of one process, by precision."""
    for precision in ("fp32", "bf16"):
        train(folder, [f"run_dir={folder}/{precision}", f"trainer.precision={precision}"])
    return {precision: folder / precision for precision in ("fp32", "bf16")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stop_inside_an_accumulation_changes_no_bit(number, precision, whole, folder):
    run_dir = folder / f"{number.name}-{precision}"
    settings = [f"run_dir={run_dir}", f"trainer.precision={precision}", "checkpoint.every=2"]
    stopped = [*settings, f"signal={number:d}"]
    if number == signal.SIGKILL:
        assert exit_code(start(train_rank, folder, *stopped)) == -number
    else:
        assert train(folder, stopped) == "preempted"
    status = json.loads((run_dir / "status.json").read_text())
    if number == signal.SIGKILL:
        assert status["status"] == "running" and last(run_dir)["global_step"] in SAVED
    else:  # the step that it was in is finished, then saved
        assert status["status"] == "preempted" and status["step"] == last(run_dir)["global_step"] == 6
    assert train(folder, settings) == "finished"
    assert_same_end(run_dir, whole[precision])
    assert (run_dir / "scaling.csv").read_text() == (whole[precision] / "scaling.csv").read_text()
    assert tables(folder, run_dir.name) == tables(folder, precision)


def train_ranks(folder: Path, size: int, *overrides: str) -> None:
    assert run_ranks(train_rank, folder, *overrides, folder=folder, size=size) == [0] * size, (
        folder / "stderr.0"
    ).read_text()


@pytest.fixture(scope="module")
def two_ranks(folder) -> Path:
    """Runs of two processes: undisturbed; stopped or killed, and continued by other processes."""
    bf16 = [f"run_dir={folder}/bf16-torn", "trainer.precision=bf16"]
    fp32 = [f"run_dir={folder}/fp32-torn", "checkpoint.every=2"]
    train_ranks(folder, 2, f"run_dir={folder}/fp32-two")
    train_ranks(folder, 2, f"run_dir={folder}/bf16-two", "trainer.precision=bf16")
    train_ranks(folder, 2, *bf16, "trainer.max_steps=3")
    assert last(folder / "bf16-torn")["global_step"] == 3
    train_ranks(folder, 2, *bf16, "stream.num_workers=0")
    killed = run_ranks(train_rank, folder, *fp32, f"signal={signal.SIGKILL:d}", folder=folder)
    assert killed == [1, -signal.SIGKILL] and last(folder / "fp32-torn")["global_step"] in SAVED
    train_ranks(folder, 2, *fp32, "stream.num_workers=3")
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_processes_continue_with_other_workers_to_the_bit(precision, two_ranks):
    assert_same_end(two_ranks / f"{precision}-torn", two_ranks / f"{precision}-two")


@pytest.mark.parametrize("name", ["fp32-two", "bf16-torn", "fp32-torn"])
def test_two_processes_train_on_the_tables_of_one(name, whole, two_ranks):
    expected = tables(two_ranks, "fp32")
    assert len(expected) == STEPS * 8
    assert tables(two_ranks, name) == expected


def test_other_numbers_of_ranks_change_no_more_than_the_order_of_sums(whole, folder):
    """Three ranks have unequal shares of a step of eight tables."""
    settings = [f"run_dir={folder}/ranks", "stream.num_workers=0"]
    for size, steps in ((1, 2), (2, 4), (3, 6), (1, 8)):
        train_ranks(folder, size, *settings, f"trainer.max_steps={steps}")
    assert tables(folder, "ranks") == tables(folder, "fp32")
    assert [step for step, *_ in exact(folder / "ranks")] == [str(step + 1) for step in range(STEPS)]
    for row, expected in zip(metrics(folder / "ranks"), metrics(whole["fp32"]), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
