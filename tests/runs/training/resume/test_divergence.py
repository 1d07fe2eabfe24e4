"""Runs whose loss or weights are not finite: how they end, what they leave, and what can be done with it."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from command_line import command
from training_runs import SHORT_RUN, Poison, extra_callbacks, train_short_run

from tabicl_train.errors import ConfigError, Diverged
from tabicl_train.run.checkpoint import saved, step_of
from tabicl_train.run.status import read_status

ALL = set(range(16))


class Spoil:
    """One weight that is not finite, after a step."""

    def __init__(self, after: int) -> None:
        self.after = after

    def after_step(self, state, item) -> None:
        if state.step == self.after:
            with torch.no_grad():
                next(state.network.parameters()).view(-1)[0] = math.inf


def steps(run_dir: Path) -> list[int]:
    return [step_of(path) for path in saved(run_dir / "checkpoints")]


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory) -> tuple[Path, Diverged]:
    """A run of 16 steps, which saves every fourth, whose weights are not finite after step 8."""
    run_dir = tmp_path_factory.mktemp("spoiled") / "a run"
    with pytest.raises(Diverged) as caught:
        train_short_run(run_dir, callbacks=(Spoil(8),))
    return run_dir, caught.value


def test_weights_that_are_not_finite_are_not_saved_and_end_the_run(spoiled):
    run_dir, error = spoiled
    assert steps(run_dir) == [4]
    good = run_dir / "checkpoints/step-00000004.ckpt"
    assert str(error).startswith("after step 8, 1 of 25,430 weights")
    assert f"('init_weights={good}' run_dir=...)" in str(error)
    status = read_status(run_dir)
    assert status["status"] == "failed"
    assert status["saved"] == 4
    assert status["cause"] == f"Diverged: {error}"


def test_a_run_does_not_continue_from_weights_that_are_not_finite(spoiled, tmp_path):
    """An earlier version may have saved them."""
    run_dir = tmp_path / "run"
    shutil.copytree(spoiled[0], run_dir)
    content = torch.load(run_dir / "checkpoints/step-00000004.ckpt", weights_only=True)
    next(iter(content["state_dict"].values())).view(-1)[0] = math.nan
    torch.save(content | {"global_step": 8}, run_dir / "checkpoints/step-00000008.ckpt")
    with pytest.raises(
        ConfigError, match=r"step-00000008\.ckpt: 1 of .* begin a new run from .*step-00000004\.ckpt \("
    ):
        train_short_run(run_dir)
    with pytest.raises(ConfigError, match=r"init_weights: .*step-00000008\.ckpt: 1 of .* weights are not finite"):
        train_short_run(tmp_path / "other", f"init_weights={run_dir}/checkpoints/step-00000008.ckpt")
    good = f"init_weights={run_dir}/checkpoints/step-00000004.ckpt"
    assert train_short_run(tmp_path / "other", good, "trainer.max_steps=1") == "finished"


def test_the_advice_leads_to_weights_from_before_the_skipped_steps(tmp_path):
    with pytest.raises(Diverged, match=r"in 10 steps in a row, .* begin a new run from .*/step-00000004\.ckpt \("):
        train_short_run(tmp_path / "run", "trainer.log_every=1", callbacks=(Poison(set(range(5, 16))),))
    assert steps(tmp_path / "run") == [4, 8, 12]  # the last two have the weights of step 5


@pytest.mark.parametrize(
    ("poisoned", "cause"),
    [
        (ALL - {3, 7, 11, 14, 15}, "11 of 16 steps were skipped because their loss or gradient norm was not finite"),
        # A CPU second, for the same end of a run.
        pytest.param({15}, "the loss of the last step, 16, is not finite", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_skips_most_steps_or_ends_with_a_bad_loss_has_failed(poisoned, cause, tmp_path):
    arguments = (*SHORT_RUN, f"run_dir={tmp_path}/run")
    with extra_callbacks(Poison(poisoned)):
        first = command("train", *arguments)
    again = command("train", *arguments)  # there is nothing left to do
    for result in (first, again):
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith(f"error: {cause}; ")
        assert "finished" not in result.stderr
        status = read_status(tmp_path / "run")
        assert status["status"] == "failed" and status["step"] == 16
        assert status["cause"].startswith(f"Diverged: {cause}; ")


def test_a_run_that_skips_some_steps_says_how_many(tmp_path):
    with extra_callbacks(Poison({0, *range(8, 15)})):  # half of them
        result = command("train", *SHORT_RUN, f"run_dir={tmp_path}/run", "trainer.log_every=1")
    assert result.returncode == 0
    assert "\nfinished  16 steps, 8 of them skipped\n" in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("smoke step")]
    assert "step 1/16" in lines[0] and ", 1 step skipped" in lines[0]
    assert "step 16/16" in lines[-1] and ", 8 steps skipped" in lines[-1]
