"""Where a run begins, who may train in its folder, and which changes it accepts."""

import json
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
from runs import metrics

from tabicl_train import train as training
from tabicl_train.config.compose import compose
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.resume import Start, find_start
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import refuse_changes
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.lock import LostLock, RunLock
from tabicl_train.run_dir.status import read_status

pytestmark = pytest.mark.slow

SETTINGS = ["experiment=smoke", "prior=dummy", "stream.num_workers=0", "checkpoint.every=2", "trainer.accelerator=cpu"]
TABLES = ("rows=[30,50]", "features=[2,4]", "tables=4", "group_size=2", "warmup=0")
STAGES = ["curriculum=mini_v2"]
for name, steps in (("stage1", 2), ("stage2", 2), ("stage3", 1)):
    STAGES += [f"curriculum.stages.{name}.{value}" for value in (f"steps={steps}", *TABLES)]


def config_of(run_dir: Path, *overrides: str) -> RunConfig:
    return compose([*SETTINGS, f"run_dir={run_dir}", *overrides])


def run(run_dir: Path, *overrides: str, callback: L.Callback | None = None) -> str:
    chosen = training.run_callbacks
    with mock.patch.object(training, "run_callbacks", lambda *a: [*([callback] if callback else []), *chosen(*a)]):
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
    config = config_of(four_steps)
    start, content = find_start(config)
    assert start.steps == 4 and content["global_step"] == 4
    assert start.checkpoint == four_steps / "checkpoints/step-00000004.ckpt"
    assert start.problem(config) is None
    assert Start(4, 7, start.checkpoint).problem(config) == "seed is 0, that of rank 0 7"


def test_a_second_start_is_refused_and_changes_nothing(four_steps):
    before = {f: f.stat().st_mtime_ns for f in four_steps.rglob("*") if f.is_file()}
    lock = RunLock(four_steps)
    lock.acquire()
    with pytest.raises(ConfigError, match="is in use: process"):
        run(four_steps)
    lock.release()
    assert before == {f: f.stat().st_mtime_ns for f in four_steps.rglob("*") if f.is_file()}


class TakenOver(L.Callback):
    """Another process takes the run's folder during a step."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.run_dir, self.step = run_dir, step

    def on_train_batch_start(self, trainer, module, item, _) -> None:
        if item.step == self.step:
            other = self.run_dir / "other"
            other.write_text(json.dumps({"process": 7, "host": "other"}))
            other.replace(self.run_dir / "lock")


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_process_that_has_lost_the_folder_stops_before_it_writes(log_every, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(LostLock, match="taken over by process 7 on other"):
        run(run_dir, f"trainer.log_every={log_every}", "checkpoint.every=3", callback=TakenOver(run_dir, 4))
    assert [f.stem for f in saved(run_dir / "checkpoints")] == ["step-00000003"]
    if log_every == 1:
        assert [row["step"] for row in metrics(run_dir)] == ["1", "2", "3", "4"]
    assert json.loads((run_dir / "status.json").read_text())["status"] == "running"
    assert json.loads((run_dir / "lock").read_text())["process"] == 7


class ReadStatus(L.Callback):
    """Records the status in the middle of a run with a very short heartbeat."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.values = run_dir, []

    def on_train_batch_end(self, trainer, *_) -> None:
        while (values := read_status(self.run_dir))["step"] < trainer.global_step:
            pass
        self.values.append(values["status"])


def test_the_status_tells_the_step_while_a_run_is_trained_and_that_it_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tabicl_train.run_dir.lock.BEAT", 0.001)
    watch = ReadStatus(tmp_path / "run")
    run(tmp_path / "run", "trainer.max_steps=3", callback=watch)
    assert watch.values == ["running"] * 3
    values = read_status(tmp_path / "run")
    assert values["status"] == "finished" and values["step"] == 3 and values.keys() >= {"time", "host", "process"}
    assert not (tmp_path / "run/lock").exists()
    (tmp_path / "run/status.json").write_text(json.dumps(values | {"status": "running"}))
    assert read_status(tmp_path / "run")["status"] == "killed"
    assert read_status(tmp_path) is None


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
