"""Interrupted and continued runs against undisturbed ones, bit for bit."""

import json
import signal
from pathlib import Path

import pytest
from forked import exit_code, ranks, start
from interrupted import train, train_all
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
        assert exit_code(start(train_all, folder, stopped)) == -number
    else:
        assert train(folder, stopped) == "preempted"
    status = json.loads((run_dir / "status.json").read_text())
    if number == signal.SIGKILL:
        assert status["status"] == "running" and last(run_dir)["global_step"] in SAVED
    else:  # the step that it was in is finished, then saved
        assert status["status"] == "preempted" and status["step"] == last(run_dir)["global_step"] == 6
    assert train(folder, settings) == "finished"
    assert_same_end(run_dir, whole[precision])
    for name in ("batches.csv", "scaling.csv"):
        assert (run_dir / name).read_text() == (whole[precision] / name).read_text()
    assert tables(folder, run_dir.name) == tables(folder, precision)


@pytest.fixture(scope="module")
def two_ranks(whole, folder) -> Path:
    """Runs of two processes: undisturbed; interrupted, and continued by other processes; begun or ended by one."""
    bf16 = ["trainer.devices=2", f"run_dir={folder}/bf16-torn", "trainer.precision=bf16"]
    fp32 = ["trainer.devices=2", f"run_dir={folder}/fp32-torn", "checkpoint.every=2"]
    begun = [
        ["trainer.devices=2", f"run_dir={folder}/fp32-two"],
        ["trainer.devices=2", f"run_dir={folder}/bf16-two", "trainer.precision=bf16"],
        ["trainer.devices=2", f"run_dir={folder}/two-then-one", "trainer.max_steps=4"],
        [*bf16, "trainer.max_steps=3"],
        [*fp32, f"signal={signal.SIGKILL:d}"],
    ]
    with ranks(train_all, folder, *begun, folder=folder) as processes:
        assert [exit_code(p) for p in processes] == [1, -signal.SIGKILL]
    error = (folder / "stderr.0").read_text().splitlines()[-1]
    assert error.startswith("error: rank 1 on ") and error.endswith(" is gone; rank 0 ends with it")
    assert last(folder / "bf16-torn")["global_step"] == 3 and last(folder / "fp32-torn")["global_step"] in SAVED
    train(folder, [f"run_dir={folder}/one-then-two", "trainer.max_steps=4"])
    continued = [
        [*bf16, "stream.num_workers=0"],
        [*fp32, "stream.num_workers=3"],
        ["trainer.devices=2", f"run_dir={folder}/one-then-two"],
    ]
    with ranks(train_all, folder, *continued, folder=folder) as processes:
        assert [exit_code(p) for p in processes] == [0, 0], (folder / "stderr.0").read_text()
    train(folder, [f"run_dir={folder}/two-then-one"])
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_processes_continue_with_other_workers_to_the_bit(precision, two_ranks):
    assert_same_end(two_ranks / f"{precision}-torn", two_ranks / f"{precision}-two")


@pytest.mark.parametrize("name", ["fp32-two", "bf16-torn", "fp32-torn", "one-then-two", "two-then-one"])
def test_no_table_depends_on_the_number_of_ranks(name, whole, two_ranks):
    expected = tables(two_ranks, "fp32")
    assert len(expected) == STEPS * 8
    assert tables(two_ranks, name) == expected
    assert [step for step, *_ in exact(two_ranks / name)] == [str(step + 1) for step in range(STEPS)]


@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_a_change_of_ranks_changes_no_more_than_the_order_of_sums(name, whole, two_ranks):
    for row, expected in zip(metrics(two_ranks / name), metrics(whole["fp32"]), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=2e-3)
