"""What a run logs to Weights and Biases and TensorBoard: it goes on after a resume, and can end no run."""

import json
import shlex
from pathlib import Path
from unittest import mock

import pytest
from training_runs import read_rows

from tabicl_train.config.compose import compose
from tabicl_train.config.schema import WandbConfig
from tabicl_train.run.records import Records
from tabicl_train.training.callbacks.tensorboard_logger import TensorBoardLogger
from tabicl_train.training.callbacks.wandb_logger import WandbLogger
from tabicl_train.training.loop import train

CONFIG = {"name": "mine", "seed": 3}


def records_with(*loggers) -> Records:
    records = Records(Path("nowhere"))
    records.loggers = list(loggers)
    return records


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """wandb without an account, with its own files in the test's directory."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # forgets the environment that it read first
    for name in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield wandb
    wandb.teardown()


@pytest.mark.slow  # starts the service of wandb
def test_a_resumed_run_continues_its_wandb_run_offline(tmp_path, no_account, capsys):
    folder = tmp_path / "my run"
    folder.mkdir()
    options = WandbConfig(mode="offline", group="width and rate")
    commands = []
    for step in (4, 6):
        records = records_with(WandbLogger(options, folder, CONFIG))
        records.log_metrics({"loss": 1.5, "stage": "smoke"}, step)
        records.log_metrics({"validation/iris/loss": float("nan")}, step)
        run = records.loggers[0].run
        (run_id,) = json.loads((folder / "wandb.json").read_text()).values()
        assert (run.id, run.name, run.group) == (run_id, "mine", "width and rate")
        assert run.config["seed"] == 3
        records.close_loggers()
        (line,) = capsys.readouterr().err.splitlines()
        commands.append(shlex.split(line.removeprefix("wandb     to upload: ")))
    first, second = (Path(name) for name in commands[1][2:])
    assert commands == [["wandb", "sync", str(first)], ["wandb", "sync", str(first), str(second)]]
    assert {first, second} == set((folder / "wandb").glob("offline-run-*"))
    no_account.teardown()  # as at the end of a process: only then are wandb's files complete
    for path in (first, second):
        content = (path / f"run-{run_id}.wandb").read_bytes()
        assert b"validation/iris/loss" in content
    assert first.stat().st_ctime_ns < second.stat().st_ctime_ns


def fake_run(monkeypatch, wandb, *outcomes) -> mock.Mock:
    """What wandb.init returns or raises, one after the other; login finds an account."""
    init = mock.Mock(side_effect=outcomes)
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    return init


def test_our_step_is_the_axis_of_all_values(tmp_path, monkeypatch):
    run = mock.Mock(offline=False)
    init = fake_run(monkeypatch, pytest.importorskip("wandb"), run)
    logger = WandbLogger(WandbConfig(mode="online", name="rate-0.1_seed-0"), tmp_path, CONFIG)
    logger.close()  # nothing was logged
    assert not init.called
    logger.log_metrics({"loss": 1.5}, 7)
    logger.log_metrics({"loss": 1.4}, 8)
    logger.close(1)
    assert init.call_args.kwargs["resume"] == "allow"
    assert init.call_args.kwargs["name"] == "rate-0.1_seed-0"
    assert run.method_calls == [
        mock.call.define_metric("step"),
        mock.call.define_metric("*", step_metric="step"),
        mock.call.log({"step": 7, "loss": 1.5}),
        mock.call.log({"step": 8, "loss": 1.4}),
        mock.call.finish(1),
    ]


@pytest.mark.parametrize("has_account", [False, True], ids=["no account", "no network"])
def test_online_is_offline_without_an_account_or_a_network(has_account, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    run = mock.Mock(offline=True)
    error = wandb.errors.CommError("connection refused")
    init = fake_run(monkeypatch, wandb, *([error] if has_account else []), run)
    monkeypatch.setattr(wandb, "login", lambda **_: has_account)
    WandbLogger(WandbConfig(mode="online"), tmp_path, CONFIG).log_metrics({"loss": 1.5}, 1)
    assert init.call_args.kwargs["mode"] == "offline" and run.log.called
    reason = "connection refused" if has_account else "no account is logged in (wandb login)"
    assert capsys.readouterr().err == f"wandb     logged offline: {reason}\n"


def test_a_logger_that_fails_is_dropped_with_one_line(tmp_path, monkeypatch, capsys):
    init = fake_run(monkeypatch, pytest.importorskip("wandb"), OSError("no service\nat all"))
    other = mock.Mock()
    records = records_with(WandbLogger(WandbConfig(mode="offline"), tmp_path, CONFIG), other)
    for step in (1, 2):
        records.log_metrics({"loss": 1.5}, step)
    records.close_loggers()
    assert capsys.readouterr().err == "warning   wandb has failed and logs nothing more: no service\n"
    assert init.call_count == 1
    assert other.method_calls == [
        mock.call.log_metrics({"loss": 1.5}, 1),
        mock.call.log_metrics({"loss": 1.5}, 2),
        mock.call.close(0),
    ]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each curve as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    for resumed, last, value in ((0, 6, 1.0), (4, 8, 2.0)):
        records = records_with(TensorBoardLogger(tmp_path, resumed))
        for step in range(resumed + 1, last + 1):
            records.log_metrics({"loss": value, "stage": "smoke"}, step)
            if step == 4:
                records.log_metrics({"validation/iris/loss": value}, step)
        records.close_loggers()
    points = [(step, 1.0 if step <= 4 else 2.0) for step in range(1, 9)]
    assert curves(tmp_path) == {"loss": points, "validation/iris/loss": [(4, 1.0)]}
    for value in (1.0, 2.0):  # a run that begins again validates the weights that it starts from again
        logger = TensorBoardLogger(tmp_path / "again", 0)
        logger.log_metrics({"validation/mean/own": value}, 0)
        logger.close()
    assert curves(tmp_path / "again") == {"validation/mean/own": [(0, 2.0)]}


def test_a_run_logs_what_its_files_hold(tmp_path):
    pytest.importorskip("tensorboard")
    train(compose([
        "experiment=smoke", "prior=dummy", "stream.num_workers=0", "curriculum.stages.smoke.steps=4",
        "trainer.accelerator=cpu", "validation.every=2", "validation.rows=[40]", "validation.tables=2",
        "validation.features=[2,4]", "validation.suites=[]", "validation.best=synthetic", "tensorboard=true",
        f"run_dir={tmp_path}",
    ]))  # fmt: skip
    found = curves(tmp_path)
    layer = [row for row in read_rows(tmp_path / "scaling.csv") if row["layer"] == "icl.0"]
    for name, rows, column in (
        ("loss", read_rows(tmp_path / "metrics.csv"), "loss"),
        ("lr", read_rows(tmp_path / "metrics.csv"), "lr"),
        ("multiplier/icl.0", layer, "at_largest"),
        ("validation/synthetic_40/accuracy", read_rows(tmp_path / "validation.csv"), "accuracy"),
        ("validation/mean/synthetic", read_rows(tmp_path / "validation.csv"), "loss"),
    ):
        points = [(int(row["step"]), pytest.approx(float(row[column]), rel=1e-6)) for row in rows]
        assert found[name] == points and points  # event files hold single precision
