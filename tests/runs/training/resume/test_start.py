"""Where a run begins, what its status says, and how it ends when its folder cannot be used."""

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import forked
import pytest
from command_line import command
from forked import wait_for_exit_code
from training_runs import SHORT_RUN, THREE_STAGES, read_metrics, train_short_run

from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.run import status
from tabicl_train.run.checkpoint import saved
from tabicl_train.run.status import read_status
from tabicl_train.training import loop
from tabicl_train.training.run_folder import differences_from_first
from tabicl_train.weights.export import export


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> Path:
    """A run of 16 steps that has been stopped after 4."""
    run_dir = tmp_path_factory.mktemp("start") / "run"
    train_short_run(run_dir, "trainer.max_steps=4")
    return run_dir


def test_a_rank_with_another_seed_or_other_real_tables_is_refused():
    ranks = SimpleNamespace(from_first=lambda _: (0, None, []))
    assert differences_from_first(0, None, ranks) == []
    assert differences_from_first(7, "0a1b", ranks) == [
        "seed is 7, but 0 on rank 0",
        "the tables in the prior's files differ from those on rank 0",
    ]


def test_a_command_for_fewer_steps_than_are_done_changes_nothing(four_steps, tmp_path):
    run_dir = shutil.copytree(four_steps, tmp_path / "run")
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"status": "preempted"}))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    result = command("train", *SHORT_RUN, f"run_dir={run_dir}", "trainer.max_steps=3")
    said = f"{run_dir}: nothing to do, 4 steps are done, and this command asks for 3; the run and its status stay as"
    assert result.returncode == 0
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}


def fail(*_) -> None:
    raise RuntimeError("out of something")


@pytest.mark.parametrize("exists", [False, True])
def test_a_refused_or_failed_start_leaves_no_folder_that_was_not_there(exists, four_steps, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    if exists:
        run_dir.mkdir()
    other = [f"init_weights={four_steps}", "model.embed_dim=32"]
    assert command("train", *SHORT_RUN, f"run_dir={run_dir}", *other).returncode == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "lock"][: 2 * exists]
    with mock.patch.object(loop, "build_module", fail), pytest.raises(RuntimeError, match="something"):
        train_short_run(run_dir)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "lock"][: 2 * exists]


class ReadStatus:
    """Records the status in the middle of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.values = run_dir, []

    def after_step(self, state, item) -> None:
        values = read_status(self.run_dir)
        self.values.append((values["status"], values["step"] - state.step))


def test_the_status_tells_the_step_while_a_run_is_trained_and_that_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.0)
    watch = ReadStatus(tmp_path / "run")
    train_short_run(tmp_path / "run", "trainer.max_steps=3", callbacks=(watch,))
    assert watch.values == [("running", -1)] * 3  # before the status of the step is written
    values = read_status(tmp_path / "run")
    assert (values["status"], values["step"], values["saved"]) == ("finished", 3, 3)
    assert values["process"] == os.getpid()
    assert values["host"]
    assert values["time"]
    assert values["launch"] is None
    (tmp_path / "run/status.json").write_text(json.dumps(values | {"status": "running"}))
    assert read_status(tmp_path / "run")["status"] == "killed"
    assert read_status(tmp_path) is None


def test_records_that_name_a_checkpoint_which_is_gone_are_an_error(four_steps, tmp_path):
    run_dir = shutil.copytree(four_steps, tmp_path / "run")
    for path in saved(run_dir / "checkpoints"):
        path.unlink()
    with pytest.raises(ConfigError) as error:
        train_short_run(run_dir)
    assert str(error.value) == (
        f"{run_dir} lacks the checkpoint of step 4 that status.json records; "
        "to start over, choose another run_dir or remove this one"
    )


class Kill:
    def before_step(self, state, item) -> None:
        if state.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run_dir: Path) -> None:
    train_short_run(run_dir, callbacks=(Kill(),))


def test_a_run_killed_before_its_first_checkpoint_begins_again_with_its_seed_only(tmp_path):
    run_dir = tmp_path / "run"
    assert wait_for_exit_code(forked.start_process(train_and_be_killed, run_dir)) == -signal.SIGKILL
    assert saved(run_dir / "checkpoints") == []
    assert len(read_metrics(run_dir)) == 1
    with pytest.raises(ConfigError, match=r"holds a run with seed=0, not 1; to start over, choose another run_dir"):
        train_short_run(run_dir, "seed=1", "trainer.max_steps=2")
    assert train_short_run(run_dir, "trainer.max_steps=2") == "finished"
    assert [row["step"] for row in read_metrics(run_dir)] == ["1", "2"]


def test_a_finished_run_refuses_changes_as_others_do_and_its_status_is_made_up_for(four_steps, capsys):
    """A kill may have come before the status was written."""
    with pytest.raises(ConfigError, match=r"model\.embed_dim was \d+, is 32"):
        train_short_run(four_steps, "trainer.max_steps=4", "model.embed_dim=32")
    status = four_steps / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    (four_steps / ".status.json.1.tmp").write_text("left by a kill")
    (four_steps / ".hub.1.tmp").mkdir()  # of an export
    (four_steps / ".hub.1.tmp" / "README.md").write_text("left by a kill")
    assert train_short_run(four_steps, "trainer.max_steps=4") == "finished"
    assert "finished already, 4 steps are done" in capsys.readouterr().err
    assert read_status(four_steps)["status"] == "finished"
    assert not list(four_steps.glob(".*"))


def test_a_stage_after_the_last_one_is_trained(tmp_path):
    config = compose([*THREE_STAGES, f"run_dir={tmp_path}/run"])
    stages = config.curriculum.stages
    config.curriculum.stages = {"stage1": stages["stage1"]}
    assert loop.train(config) == "finished"  # the whole curriculum is done
    assert train_short_run(tmp_path / "run", "trainer.max_steps=7", settings=THREE_STAGES) == "finished"
    assert [row["stage"] for row in read_metrics(tmp_path / "run")] == ["stage1"] * 6 + ["stage2"]


def test_resuming_does_not_need_the_file_that_a_run_started_from(four_steps, tmp_path):
    export(str(four_steps), str(tmp_path / "start.ckpt"))
    settings = (f"init_weights={tmp_path}/start.ckpt",)
    train_short_run(tmp_path / "run", *settings, "trainer.max_steps=1")
    (tmp_path / "start.ckpt").unlink()
    assert train_short_run(tmp_path / "run", *settings, "trainer.max_steps=2") == "finished"
    with pytest.raises(ConfigError, match="init_weights"):
        train_short_run(tmp_path / "other", *settings, "trainer.max_steps=2")
