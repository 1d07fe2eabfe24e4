"""Logs an export to the run of Weights and Biases that belongs to a run, which is continued for it."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from tabicl_train.callbacks.wandb_runs import why_offline
from tabicl_train.console import first_line, tell
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.run_dir.lock import owner_is_alive
from tabicl_train.run_dir.records import Records, open_or_empty


@dataclass(frozen=True)
class WandbRun:
    """A run of wandb, and the folder of the run whose values it holds."""

    folder: Path
    id: str
    project: str
    mode: str
    timeout: float


def wandb_run_of(checkpoint: str) -> WandbRun:
    """The run of wandb of a run's folder, or of a checkpoint in it; raises ConfigError if there is none."""
    if not is_installed("wandb"):
        raise ConfigError([f"artifact=true, but wandb is not installed: {install('wandb', 'wandb')}"])
    folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent.parent
    state = Records(folder).json("wandb.json") or {}
    with open_or_empty(folder / "config.yaml") as file:
        settings = (yaml.safe_load(file) or {}).get("wandb", {})
    if "id" not in state or "mode" not in settings:
        raise ConfigError([f"artifact=true, but {checkpoint!r} belongs to no run that was logged to wandb"])
    if owner_is_alive(folder):
        raise ConfigError([f"artifact=true, but {folder} is in training, and its run of wandb in use"])
    mode = "offline" if settings["mode"] == "disabled" else settings["mode"]  # it was logged before
    return WandbRun(folder, state["id"], settings["project"], mode, settings["timeout"])


def log_artifact(run: WandbRun, output: Path, metadata: dict[str, str]) -> str:
    """Log a file or folder as an artifact; returns a line that says so. Exits with 1 if it fails."""
    import wandb

    if run.mode == "online" and (obstacle := why_offline(run.timeout)):
        tell(f"wandb     the artifact is logged offline: {obstacle}")
        run = dataclasses.replace(run, mode="offline")
    artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=metadata)
    try:
        artifact.add_dir(str(output)) if output.is_dir() else artifact.add_file(str(output))
        with wandb.init(
            project=run.project,
            id=run.id,
            dir=run.folder,
            mode=run.mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", init_timeout=run.timeout, finish_timeout=run.timeout),
        ) as opened:
            opened.log_artifact(artifact)
            place = opened.settings.sync_dir
    except Exception as error:  # wandb has many, none of which concerns the export
        sys.exit(f"error: {output} is written, but was not logged to wandb: {first_line(error)}")
    upload = "" if run.mode == "online" else f"; to upload: wandb sync {place}"
    return f"logged as artifact {artifact.name} of run {run.id}{upload}"
