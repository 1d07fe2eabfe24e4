"""Where a run begins, who may train in its folder, and which changes it accepts."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import forked
import pytest
from command_line import command
from forked import exit_code
from runs import metrics

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.resume import Start, find_start
from tabicl_train.run_dir import checkpoint, status
from tabicl_train.run_dir.changes import refuse_changes
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.status import read_status

pytestmark = pytest.mark.slow

SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "checkpoint.every=2", "trainer.accelerator=cpu"]
TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")
STAGES = ["curriculum=mini_v2"]
for name, steps in (("stage1", 2), ("stage2", 2), ("stage3", 1)):
    STAGES += [f"curriculum.stages.{name}.{value}" for value in (f"steps={steps}", *TABLES)]


def config_of(run_dir: Path, *overrides: str) -> RunConfig:
    return compose([*SETTINGS, f"run_dir={run_dir}", *overrides])


def run(run_dir: Path, *overrides: str, callback: object = None) -> str:
    build = training.build_callbacks
    callbacks = lambda *a: [*([callback] if callback else []), *build(*a)]  # noqa: E731
    with mock.patch.object(training, "build_callbacks", callbacks):
        return training.train(config_of(run_dir, *overrides))


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> Path:
    """A run of 20 steps that has been stopped after 4."""
    run_dir = tmp_path_factory.mktemp("start") / "run"
    run(run_dir, "trainer.max_steps=4")
    return run_dir


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> Path:
    """A run of three stages, stopped at the end of the first one."""
    run_dir = tmp_path_factory.mktemp("stages") / "run"
    run(run_dir, *STAGES, "trainer.max_steps=2")
    return run_dir


def test_a_run_continues_from_its_newest_checkpoint_and_a_rank_with_another_seed_is_refused(four_steps):
    start, content = find_start(config_of(four_steps), None)
    assert start == Start(4, 0, four_steps / "checkpoints/step-00000004.ckpt") and content["global_step"] == 4
    assert start.problems(0, None) == []
    assert start.problems(7, "0a1b") == [
        "seed is 7, that of rank 0 0",
        "the real tables of the prior are others than on rank 0",
    ]


class ReadStatus:
    """Records the status in the middle of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.values = run_dir, []

    def on_train_batch_end(self, step: int, **_) -> None:
        values = read_status(self.run_dir)
        self.values.append((values["status"], values["step"] - step))


def test_the_status_tells_the_step_while_a_run_is_trained_and_that_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.0)
    watch = ReadStatus(tmp_path / "run")
    run(tmp_path / "run", "trainer.max_steps=3", callback=watch)
    assert watch.values == [("running", -1)] * 3  # before the status of the step is written
    values = read_status(tmp_path / "run")
    assert (values["status"], values["step"], values["saved"]) == ("finished", 3, 3)
    assert values["process"] == os.getpid() and values["host"] and values["time"] and values["launch"] is None
    (tmp_path / "run/status.json").write_text(json.dumps(values | {"status": "running"}))
    assert read_status(tmp_path / "run")["status"] == "killed"
    assert read_status(tmp_path) is None


def test_records_that_name_a_checkpoint_which_is_gone_are_an_error(four_steps, tmp_path):
    run_dir = shutil.copytree(four_steps, tmp_path / "run")
    for path in saved(run_dir / "checkpoints"):
        path.unlink()
    result = command("train", *SETTINGS, f"run_dir={run_dir}")
    assert result.returncode == 2
    assert result.stderr == (
        f"error: {run_dir} lacks the checkpoint of step 4, which status.json names; "
        "to start over, name another run_dir or remove this one\n"
    )


class Kill:
    def on_train_batch_start(self, step: int, **_) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_be_killed(run_dir: Path) -> None:
    run(run_dir, callback=Kill())


@pytest.mark.multi_process
def test_a_run_killed_before_its_first_checkpoint_begins_again_with_its_seed_only(tmp_path):
    run_dir = tmp_path / "run"
    assert exit_code(forked.start(train_and_be_killed, run_dir)) == -signal.SIGKILL
    assert saved(run_dir / "checkpoints") == [] and len(metrics(run_dir)) == 1
    with pytest.raises(ConfigError, match=r"holds a run with seed=0, not 1; to start over, name another run_dir"):
        run(run_dir, "seed=1", "trainer.max_steps=2")
    assert run(run_dir, "trainer.max_steps=2") == "finished"
    assert [row["step"] for row in metrics(run_dir)] == ["1", "2"]


class RemoveFolder:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_batch_end(self, step: int, **_) -> None:
        if step == 3:
            shutil.rmtree(self.run_dir)


def test_a_folder_that_is_removed_ends_the_run_with_one_line(tmp_path):
    build = training.build_callbacks
    callbacks = lambda *a: [*build(*a), RemoveFolder(tmp_path / "run")]  # noqa: E731
    with mock.patch.object(training, "build_callbacks", callbacks):
        result = command("train", *SETTINGS, f"run_dir={tmp_path}/run")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ") and f"{tmp_path}/run" in result.stderr.splitlines()[-1]
    assert result.stderr.count("error: ") == 1


def test_a_finished_run_tells_changes_and_refuses_them_as_others_do(four_steps, capsys):
    for change in ("seed=1", "model.embed_dim=32"):
        with pytest.raises(ConfigError, match=rf"{change.split('=')[0]} was \d+, is {change.split('=')[1]}"):
            run(four_steps, "trainer.max_steps=4", change)
    assert run(four_steps, "trainer.max_steps=4", "checkpoint.keep=2") == "finished"
    stderr = capsys.readouterr().err
    assert "changed   checkpoint.keep was 3, is 2" in stderr and "finished already, 4 steps are done" in stderr


def test_a_kill_before_the_status_was_written_is_made_up_for(four_steps):
    status = four_steps / "status.json"
    status.write_text(status.read_text().replace("finished", "running"))
    (four_steps / ".status.json.1.tmp").write_text("left by a kill")
    (four_steps / ".hub.1.tmp").mkdir()  # of an export
    (four_steps / ".hub.1.tmp" / "README.md").write_text("left by a kill")
    assert run(four_steps, "trainer.max_steps=4") == "finished"
    assert read_status(four_steps)["status"] == "finished" and not list(four_steps.glob(".*"))


def test_at_a_boundary_the_coming_stage_may_change_and_others_may_follow(staged, tmp_path):
    content = checkpoint.read(saved(staged / "checkpoints")[-1])
    free = config_of(staged, *STAGES, "curriculum.stages.stage2.learning_rate=1e-5", "curriculum.stages.stage2.steps=9")
    refuse_changes(free, content, 2)
    with pytest.raises(ConfigError, match=r"stage2\.learning_rate was 0\.0\d+, is 1e-05"):
        refuse_changes(free, content, 3)
    with pytest.raises(ConfigError, match=r"stage1\.steps was 2, is 3"):
        refuse_changes(config_of(staged, *STAGES, "curriculum.stages.stage1.steps=3"), content, 2)
    longer = config_of(staged, *STAGES)
    longer.curriculum.stages["stage4"] = longer.curriculum.stages["stage3"]
    refuse_changes(longer, content, 5)  # all steps are done
    longer.curriculum.stages = dict(reversed(longer.curriculum.stages.items()))
    with pytest.raises(ConfigError, match="the stages that have started are stage1; the run now has stage4"):
        refuse_changes(longer, content, 2)


def test_a_stage_after_the_last_one_is_trained(staged):
    config = config_of(staged, *STAGES)
    config.curriculum.stages = {"stage1": config.curriculum.stages["stage1"]}
    assert training.train(config) == "finished"  # the whole curriculum is done
    assert run(staged, *STAGES) == "finished"
    assert [row["stage"] for row in metrics(staged)] == ["stage1"] * 2 + ["stage2"] * 2 + ["stage3"]


def test_resuming_does_not_need_the_file_that_a_run_started_from(four_steps, tmp_path, capsys):
    from tabicl_train.prediction.export import export

    export(str(four_steps), str(tmp_path / "start.ckpt"))
    settings = (f"init_weights={tmp_path}/start.ckpt",)
    run(tmp_path / "run", *settings, "trainer.max_steps=1")
    (tmp_path / "start.ckpt").unlink()
    assert run(tmp_path / "run", *settings, "trainer.max_steps=2") == "finished"
    with pytest.raises(ConfigError, match="init_weights"):
        run(tmp_path / "other", *settings, "trainer.max_steps=2")
    (tmp_path / "third.ckpt").write_bytes(b"")
    run(tmp_path / "run", f"init_weights={tmp_path}/third.ckpt", "trainer.max_steps=3")
    assert "third.ckpt has no effect: the run continues from its own checkpoint" in capsys.readouterr().err
