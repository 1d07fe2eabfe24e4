"""Logs an export as an artifact of a run that was logged to Weights and Biases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tabicl_train.callbacks.wandb_runs import start
from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.records import Records, open_or_empty


class WandbRun(NamedTuple):
    """A run of wandb: the folder of the run whose values it holds, and the content of config.yaml and wandb.json."""

    folder: Path
    config: dict[str, Any]
    state: dict


def wandb_run_of(checkpoint: str) -> WandbRun:
    """The run of wandb of a run's folder, or of a checkpoint in it; raises ConfigError if there is none."""
    if not is_installed("wandb"):
        raise ConfigError([f"artifact=true, but wandb is not installed: {install('wandb', 'wandb')}"])
    folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).resolve().parent.parent
    state = Records(folder).json("wandb.json") or {}
    with open_or_empty(folder / "config.yaml") as file:
        config = yaml.safe_load(file) or {}
    settings = config.get("wandb", {})
    if "id" not in state or "mode" not in settings:
        raise ConfigError([f"artifact=true, but {checkpoint!r} belongs to no run that was logged to wandb"])
    if owner_is_alive(folder):
        raise ConfigError([f"artifact=true, but {folder} is in training, so its wandb run is in use"])
    if settings["mode"] == "disabled":  # it was logged before
        settings["mode"] = "offline"
    return WandbRun(folder, config, state)


def log_artifact(run: WandbRun, output: Path, metadata: dict[str, str]) -> str:
    """Log a file or folder as an artifact; returns a line that says so. Exits with 1 if it fails."""
    import wandb

    artifact = wandb.Artifact(f"model-{run.state['id']}", type="model", metadata=metadata)
    try:
        artifact.add_dir(str(output)) if output.is_dir() else artifact.add_file(str(output))
        # Without a limit: 110 MB, as of the default network, can take minutes to upload.
        opened = start(run.config, run.folder, run.state, finish_timeout=0)
        try:
            logged = opened.log_artifact(artifact)
            if not opened.offline:
                logged.wait()  # raises what the upload has failed with
        finally:
            opened.finish()  # by a context manager, an error would mark the run as failed
        upload = f"; to upload: wandb sync {opened.settings.sync_dir}" if opened.offline else ""
    except Exception as error:  # wandb has many, none of which concerns the export
        sys.exit(f"error: {output} is written, but was not logged to wandb: {first_line(error)}")
    return f"logged as artifact {artifact.name} of run {run.state['id']}{upload}"
