"""Interrupted and continued runs against undisturbed ones, bit for bit."""

import signal
from pathlib import Path

import pytest
import short_runs
from forked import exit_code, run_ranks, start
from interrupted import train, train_rank
from kills import arm
from runs import assert_same_end, assert_same_state, exact, last, metrics

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.status import read_status

STEPS = 8
SAVED = (2, 4)  # the checkpoints before step 5; a save beside training may not have reached the disk


def tables(folder: Path, name: str) -> set[tuple[int, str]]:
    """Step and digest of every table that a run trained on; replayed steps count once."""
    lines = (folder / f"{name}.tables").read_text().splitlines()
    return {(int(step), digest) for step, digest in map(str.split, lines)}


KILLED = [  # two stages of 6 steps, validated
    *short_runs.STAGES, "trainer.max_steps=12", "checkpoint.keep=2", "averages.ema=0.9", "validation.every=4",
    "validation.best=synthetic", "validation.rows=[40]", "validation.tables=4", "validation.features=[2,4]",
    "validation.real_rows=0",
]  # fmt: skip
KILLS = (
    "replace,config.yaml,0,before",
    "replace,step-*.ckpt,1,before",
    "replace,stage-*.ckpt,0,after",
    "append,validation.csv,0,middle",
)


def train_and_die(point: str, config: RunConfig) -> None:
    arm(point)
    training.train(config)


def test_a_run_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    """In the middle of files that it writes; with another number of workers each time."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert short_runs.run(whole, settings=KILLED) == "finished"
    for workers, point in enumerate(KILLS):
        config = compose([*KILLED, f"run_dir={torn}", f"stream.num_workers={workers % 3}"])
        assert exit_code(start(train_and_die, point, config)) == -signal.SIGKILL, point
    assert read_status(torn)["status"] == "killed"
    assert short_runs.run(torn, settings=KILLED) == "finished"
    assert_same_end(torn, whole)
    assert_same_state(last(torn)["callbacks"]["Averages"], last(whole)["callbacks"]["Averages"])
    for name in ("scaling.csv", "validation.csv"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes(), name
    names = [sorted(path.name for path in (run_dir / "checkpoints").iterdir()) for run_dir in (torn, whole)]
    assert names[0] == names[1] and {path.name for path in torn.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An undisturbed run of one process."""
    folder = tmp_path_factory.mktemp("resume")
    train(folder, [f"run_dir={folder}/whole"])
    return folder


def test_a_stop_inside_an_accumulation_changes_no_bit(folder):
    settings = [f"run_dir={folder}/stopped", "checkpoint.every=2"]
    assert train(folder, [*settings, f"signal={signal.SIGTERM:d}"]) == "preempted"
    assert read_status(folder / "stopped")["step"] == last(folder / "stopped")["global_step"] == 6  # the step is done
    assert train(folder, settings) == "finished"
    assert_same_end(folder / "stopped", folder / "whole")
    assert (folder / "stopped/scaling.csv").read_text() == (folder / "whole/scaling.csv").read_text()
    assert tables(folder, "stopped") == tables(folder, "whole")


def train_ranks(folder: Path, size: int, *overrides: str) -> None:
    codes = run_ranks(train_rank, folder, *overrides, folder=folder, size=size)
    assert codes == [0] * size, (folder / "stderr.0").read_text()


@pytest.mark.slow  # the default variant is in test_everything.py
def test_two_processes_are_killed_inside_an_accumulation_and_continue_with_other_workers_to_the_bit(folder):
    settings = [f"run_dir={folder}/two-torn", "checkpoint.every=2"]
    train_ranks(folder, 2, f"run_dir={folder}/two")
    killed = run_ranks(train_rank, folder, *settings, f"signal={signal.SIGKILL:d}", folder=folder)
    assert killed == [1, -signal.SIGKILL] and last(folder / "two-torn")["global_step"] in SAVED
    train_ranks(folder, 2, *settings, "stream.num_workers=3")
    assert_same_end(folder / "two-torn", folder / "two")
    expected = tables(folder, "whole")
    assert len(expected) == STEPS * 8
    assert tables(folder, "two") == tables(folder, "two-torn") == expected


def test_other_numbers_of_ranks_change_no_more_than_the_order_of_sums(folder):
    """Three ranks have unequal shares of a step of eight tables; a damaged checkpoint sends all further back."""
    settings = [f"run_dir={folder}/ranks", "checkpoint.every=2"]
    assert train(folder, [*settings, "trainer.max_steps=4"]) == "finished"
    saved(folder / "ranks/checkpoints")[-1].write_bytes(b"cut off")
    train_ranks(folder, 3, *settings, "stream.num_workers=0")
    stderr = (folder / "stderr.0").read_text()
    assert "step-00000004.ckpt is damaged" in stderr and "resumed at step 2" in stderr
    assert last(folder / "ranks")["run"]["ranks"] == 3
    assert tables(folder, "ranks") == tables(folder, "whole")
    assert [step for step, *_ in exact(folder / "ranks")] == [str(step + 1) for step in range(STEPS)]
    for row, expected in zip(metrics(folder / "ranks"), metrics(folder / "whole"), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
