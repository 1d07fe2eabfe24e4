"""Interrupted and continued runs against undisturbed ones, bit for bit."""

import signal
from pathlib import Path

import pytest
from faults import train_with_faults
from forked import run_ranks, start_process, wait_for_exit_code
from kills import arm
from training_runs import (
    THREE_STAGES,
    assert_same_end,
    assert_same_state,
    last_checkpoint,
    read_exact_metrics,
    read_metrics,
    train_short_run,
)

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.run.checkpoint import saved
from tabicl_train.run.status import read_status
from tabicl_train.training import loop

STEPS = 8
PACKS = "curriculum.stages.smoke.pack_tokens=500"  # several packs in a step


def tables(run_dir: Path) -> set[str]:
    """Step and digest of every table that a run trained on; replayed steps count once."""
    return set(Path(f"{run_dir}.tables").read_text().splitlines())


KILLED = [  # two stages of 6 steps, validated
    *THREE_STAGES, "trainer.max_steps=12", "checkpoint.keep=2", "averages.ema=0.9", "validation.every=4",
    "validation.best=synthetic", "validation.rows=[40]", "validation.tables=4", "validation.features=[2,4]",
    "validation.suites=[]",
]  # fmt: skip
KILLS = (
    "replace,config.yaml,0,before",
    "replace,step-*.ckpt,1,before",
    "replace,stage-*.ckpt,0,after",
    "append,validation.csv,0,middle",
)


def train_and_die(point: str, config: RunConfig) -> None:
    arm(point)
    loop.train(config)


def test_a_run_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    """In the middle of files that it writes; with another number of workers each time."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert train_short_run(whole, settings=KILLED) == "finished"
    for workers, point in enumerate(KILLS):
        config = compose([*KILLED, f"run_dir={torn}", f"stream.num_workers={workers % 3}"])
        assert wait_for_exit_code(start_process(train_and_die, point, config)) == -signal.SIGKILL, point
    assert read_status(torn)["status"] == "killed"
    assert train_short_run(torn, settings=KILLED) == "finished"
    assert_same_end(torn, whole)
    assert_same_state(last_checkpoint(torn)["callbacks"]["Averages"], last_checkpoint(whole)["callbacks"]["Averages"])
    for name in ("scaling.csv", "validation.csv"):
        assert (torn / name).read_bytes() == (whole / name).read_bytes(), name
    names = [sorted(path.name for path in (run_dir / "checkpoints").iterdir()) for run_dir in (torn, whole)]
    assert names[0] == names[1]
    assert {path.name for path in torn.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An undisturbed run of one process."""
    folder = tmp_path_factory.mktemp("resume")
    train_with_faults(PACKS, f"run_dir={folder}/whole")
    return folder


def test_a_stop_signal_changes_no_bit(folder):
    settings = [PACKS, f"run_dir={folder}/stopped"]
    assert train_with_faults(*settings, f"signal=0,5,{signal.SIGTERM:d}") == "preempted"
    assert (
        read_status(folder / "stopped")["step"] == last_checkpoint(folder / "stopped")["global_step"] == 6
    )  # the step is done
    assert train_with_faults(*settings) == "finished"
    assert_same_end(folder / "stopped", folder / "whole")
    assert (folder / "stopped/scaling.csv").read_text() == (folder / "whole/scaling.csv").read_text()
    assert tables(folder / "stopped") == tables(folder / "whole")


def test_other_numbers_of_ranks_change_no_more_than_the_order_of_sums(folder):
    """Three ranks have unequal shares of a step of eight tables; a damaged checkpoint sends all further back."""
    run_dir, whole = folder / "ranks", folder / "whole"
    settings = [PACKS, f"run_dir={run_dir}"]
    assert train_with_faults(*settings, "trainer.max_steps=4") == "finished"
    saved(run_dir / "checkpoints")[-1].write_bytes(b"cut off")
    codes = run_ranks(train_with_faults, *settings, "stream.num_workers=0", folder=folder, size=3)
    stderr = (folder / "stderr.0").read_text()
    assert codes == [0, 0, 0], stderr
    assert "step-00000004.ckpt is not a checkpoint" in stderr
    assert "resumed at step 2" in stderr
    assert last_checkpoint(run_dir)["run"]["ranks"] == 3
    assert tables(run_dir) == tables(whole) and len(tables(whole)) == STEPS * 8
    assert [step for step, *_ in read_exact_metrics(run_dir)] == [str(step + 1) for step in range(STEPS)]
    for row, expected in zip(read_metrics(run_dir), read_metrics(whole), strict=True):
        assert float(row["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
        assert float(row["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-3)
