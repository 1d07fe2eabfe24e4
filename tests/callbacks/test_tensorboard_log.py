"""What a run writes for TensorBoard: the same as its files, after any interruption."""

import importlib.util
import signal
from pathlib import Path
from unittest import mock

import forked
import pytest
from logged_runs import SETTINGS, VALIDATED, train, train_and_die
from runs import metrics, read

from tabicl_train.callbacks.held_out.selection import read_scores
from tabicl_train.callbacks.tensorboard_log import TensorBoardLog
from tabicl_train.config.compose import compose
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.records import Records

pytest.importorskip("tensorboard")
LOGGED = ["tensorboard=true", *VALIDATED]


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of each curve, in the order of the event files, nothing left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def close_to(value: float):
    return pytest.approx(value, rel=1e-6, nan_ok=True)  # event files hold single precision


def assert_equal_to_files(run_dir: Path) -> None:
    """Each row of metrics.csv and validation.csv once, in order, and nothing else."""
    found = curves(run_dir)
    for column in ("loss", "grad_norm", "lr", "skipped", "tables_per_s"):
        assert found[column] == [(int(row["step"]), close_to(float(row[column]))) for row in metrics(run_dir)]
    scaled = [row for row in read(run_dir / "scaling.csv") if row["layer"] == "icl.0"]
    points = [(int(row["step"]), close_to(float(row["at_largest"]))) for row in scaled]
    assert found["multiplier/icl.0"] == points and len(points) == len(metrics(run_dir))
    assert any(tag.startswith("loss_by_rows/") for tag in found)
    assert any(tag.startswith("loss_by_classes/") for tag in found)
    assert not {"step", "stage", "validation/step"} & found.keys()
    validation = read(run_dir / "validation.csv")
    for rows in ("40", "60"):
        for score in ("loss", "accuracy"):
            of_rows = [row for row in validation if row["rows"] == rows]
            points = [(int(row["step"]), close_to(float(row[score]))) for row in of_rows]
            assert found[f"validation/synthetic_{rows}/{score}"] == points
    means = {step: means["synthetic"] for step, means in read_scores(validation).items()}
    assert found["validation/mean/synthetic"] == [(int(step), close_to(mean)) for step, mean in means.items()]
    assert len([path for path in (run_dir / "tensorboard").iterdir() if path.stat().st_size]) == 1


@pytest.mark.slow
def test_curves_are_those_of_the_files_after_a_stop_and_an_error(tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, *LOGGED, stop_at=3, number=signal.SIGTERM)
    assert [step for step, _ in curves(run_dir)["loss"]] == [1, 2, 3, 4]
    train(run_dir, *LOGGED, stop_at=6)
    assert [step for step, _ in curves(run_dir)["loss"]] == [1, 2, 3, 4, 5, 6]
    # The fifth and sixth step are done again, with another learning rate.
    train(run_dir, *LOGGED, "resume.allow_changes=true", "curriculum.stages.smoke.learning_rate=1e-2")
    assert len(metrics(run_dir)) == 12
    assert_equal_to_files(run_dir)


@pytest.mark.multi_process
def test_what_a_kill_has_cut_off_is_written_by_the_next_start(tmp_path):
    run_dir = tmp_path / "run"
    killed = forked.start(train_and_die, *SETTINGS, *LOGGED, f"run_dir={run_dir}")
    assert forked.exit_code(killed) == -signal.SIGKILL
    assert len(metrics(run_dir)) == 10 > len(curves(run_dir)["loss"])
    train(run_dir, *LOGGED)
    assert len(metrics(run_dir)) == 12
    assert_equal_to_files(run_dir)


@pytest.mark.slow
def test_a_finished_run_gets_its_curves_when_asked(tmp_path):
    run_dir = tmp_path / "run"
    train(run_dir, *VALIDATED)
    assert not (run_dir / "tensorboard").exists()
    for _ in range(2):
        train(run_dir, *LOGGED)
        assert_equal_to_files(run_dir)


def log_of(folder: Path) -> TensorBoardLog:
    """The log of a run with a row for its first step."""
    records = Records(folder)
    records.append_rows("metrics.csv", {"step": 1, "stage": "smoke", "loss": 1.5})
    return TensorBoardLog(compose(["experiment=smoke", "tensorboard=true"]), records)


def test_a_running_tensorboard_forgets_what_another_start_has_written(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = log_of(tmp_path)
    first.records.append_rows("metrics.csv", {"step": 2, "stage": "smoke", "loss": 2.5})
    first.complete()
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [point.step for point in reader.Scalars("loss")] == [1, 2]
    for second in range(1, 4):  # the files of starts within a second are in no order
        monkeypatch.setattr("time.time", lambda second=second: 4e9 + second)
        (tmp_path / "metrics.csv").unlink()
        log_of(tmp_path).complete()
        reader.Reload()
        assert [point.step for point in reader.Scalars("loss")] == [1]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # that of the start before is empty


def test_a_log_that_cannot_be_written_gives_one_line_and_no_error(tmp_path, capsys):
    log = log_of(tmp_path)
    (tmp_path / "tensorboard").write_text("a file where the folder would be")
    for _ in range(3):
        log.log_new_rows(is_finished=False)
    log.complete()
    assert capsys.readouterr().err.count("tensorboard nothing more is logged: ") == 1


def test_a_disk_that_fills_up_gives_one_line_and_no_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("threading.excepthook", mock.Mock())
    log = log_of(tmp_path)
    log.log_new_rows(is_finished=False)
    full = mock.patch("tensorboard.summary.writer.record_writer.RecordWriter.write", side_effect=OSError(28, "full"))
    with full:
        for step in range(2, 40):
            log.records.append_rows("metrics.csv", {"step": step, "stage": "smoke", "loss": 1.5})
            log.log_new_rows(is_finished=False)
        log.complete()
    assert capsys.readouterr().err.count("tensorboard nothing more is logged: ") == 1


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=smoke", "tensorboard=true"])
    (problem,) = caught.value.problems
    assert problem.startswith("tensorboard is true, but it is not installed: pip install tensorboard, or ")
    assert problem.endswith("'.[tensorboard]' in the project's folder")
