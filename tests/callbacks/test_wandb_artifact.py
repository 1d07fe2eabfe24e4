"""tabicl-export artifact=true: the export is logged to the run of wandb, offline too."""

import json
from unittest import mock

import pytest
import yaml
from command_line import command
from made_run import make_run

from tabicl_train.callbacks.wandb_artifact import wandb_run_of
from tabicl_train.prediction.export import load_checkpoint

wandb = pytest.importorskip("wandb")


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run that was logged offline; wandb keeps its own files in the test's folder."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb_home"))
    folder = tmp_path / "run"
    make_run(folder)
    (folder / "wandb.json").write_text(json.dumps({"id": "abc123"}))
    settings = {"mode": "offline", "project": "tables", "timeout": 30.0}
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "mine", "seed": 3, "wandb": settings}))
    return folder


def test_a_folder_and_a_file_are_logged_to_the_run_offline(run_dir, tmp_path):
    result = command("export", f"checkpoint={run_dir}", f"output={tmp_path}/hub", "artifact=true")
    assert result.returncode == 0, result.stderr
    (first,) = (run_dir / "wandb").glob("offline-run-*-abc123")
    assert f"logged as artifact model-abc123 of run abc123; to upload: wandb sync {first}\n" in result.stdout
    best = run_dir / "checkpoints" / "best.ckpt"
    result = command("export", f"checkpoint={best}", f"output={tmp_path}/m.ckpt", "artifact=true")
    assert result.returncode == 0, result.stderr
    _, second = sorted((run_dir / "wandb").glob("offline-run-*-abc123*"))
    assert f"to upload: wandb sync {first} {second}\n" in result.stdout
    wandb.teardown()  # as at the end of a process: only then are wandb's files complete
    for folder, names in ((first, (b"model.safetensors", b"README.md")), (second, (b"m.ckpt",))):
        content = (folder / "run-abc123.wandb").read_bytes()
        # also the name and the settings of the run, so that an upload does not take them away
        assert all(text in content for text in (b"model-abc123", b"mine", b"seed", *names))


def test_a_run_without_a_run_of_wandb_is_refused_before_anything_is_written(run_dir, tmp_path):
    (run_dir / "wandb.json").unlink()
    for checkpoint in (run_dir, run_dir / "checkpoints" / "step-00000010.ckpt", tmp_path / "nowhere"):
        result = command("export", f"checkpoint={checkpoint}", f"output={tmp_path}/m.ckpt", "artifact=true")
        assert result.returncode == 2 and not (tmp_path / "m.ckpt").exists()
        assert result.stderr == f"error: artifact=true, but '{checkpoint}' belongs to no run that was logged to wandb\n"


def test_a_checkpoint_belongs_to_its_run_whatever_its_path_looks_like(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir / "checkpoints")
    assert wandb_run_of("best.ckpt") == wandb_run_of(str(run_dir))


def test_a_run_in_training_and_a_missing_package_are_refused(run_dir, tmp_path, monkeypatch):
    arguments = (f"checkpoint={run_dir}", f"output={tmp_path}/m.ckpt", "artifact=true")
    with monkeypatch.context() as patch:
        patch.setattr("tabicl_train.callbacks.wandb_artifact.is_in_use", lambda folder: folder == run_dir)
        result = command("export", *arguments)
        assert result.returncode == 2 and "is in training, so its wandb run is in use" in result.stderr
    monkeypatch.setattr("tabicl_train.callbacks.wandb_artifact.is_installed", lambda package: False)
    result = command("export", *arguments)
    assert result.returncode == 2 and "wandb is not installed: pip install wandb" in result.stderr
    assert not (tmp_path / "m.ckpt").exists()


def test_an_export_that_cannot_be_logged_is_still_written(run_dir, tmp_path, monkeypatch):
    online = mock.MagicMock(offline=False)  # a run of wandb whose upload fails at its end
    online.log_artifact.return_value.wait.side_effect = ValueError("no space left")
    for init, reason in (
        (mock.Mock(side_effect=OSError("no network")), "no network"),
        (
            mock.Mock(return_value=online),
            "no space left",
        ),
    ):
        monkeypatch.setattr("wandb.init", init)
        result = command("export", f"checkpoint={run_dir}", f"output={tmp_path}/m.ckpt", "artifact=true")
        assert result.returncode == 1
        assert f"error: {tmp_path}/m.ckpt is written, but was not logged to wandb: {reason}" in result.stderr
        assert load_checkpoint(str(tmp_path / "m.ckpt"))
    online.finish.assert_called_once_with()  # the run itself has not failed
    assert init.call_args.kwargs["settings"].finish_timeout == 0  # an upload takes as long as it takes
