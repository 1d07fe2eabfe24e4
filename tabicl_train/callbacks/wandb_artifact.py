"""Logs an export as an artifact of the wandb run of a run directory, for `tabicl-export artifact=true`."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from tabicl_train.callbacks.wandb_logger import open_run, run_id, sync_command
from tabicl_train.config.monitoring import WandbConfig
from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.run_dir.lock import is_in_use


def wandb_run_of(checkpoint: str) -> Path:
    """The run directory of a checkpoint, or itself; raises ConfigError if nothing can be logged to its wandb run."""
    if not is_installed("wandb"):
        raise ConfigError([f"artifact=true, but wandb is not installed: {install('wandb', 'wandb')}"])
    folder = Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).resolve().parent.parent
    if not (folder / "wandb.json").exists():
        raise ConfigError([f"artifact=true, but {checkpoint!r} belongs to no run that was logged to wandb"])
    if is_in_use(folder):
        raise ConfigError([f"artifact=true, but {folder} is in training, so its wandb run is in use"])
    return folder


def log_artifact(folder: Path, output: Path, metadata: dict[str, str]) -> str:
    """Log a file or folder as an artifact; a line for the user. Exits with 1 and one line if that fails."""
    import wandb

    try:
        artifact = wandb.Artifact(f"model-{run_id(folder)}", type="model", metadata=metadata)
        artifact.add_dir(str(output)) if output.is_dir() else artifact.add_file(str(output))
        config = yaml.safe_load((folder / "config.yaml").read_text())
        # Without a limit: 110 MB, as of the default network, can take minutes to upload.
        mode = "offline" if config["wandb"]["mode"] == "disabled" else config["wandb"]["mode"]  # it was logged before
        options = WandbConfig(**config["wandb"] | {"mode": mode})
        run = open_run(options, folder, config, finish_timeout=0)
        try:
            logged = run.log_artifact(artifact)
            if not run.offline:
                logged.wait()  # raises what the upload has failed with
        finally:
            run.finish()  # by a context manager, an error would mark the run as failed
        upload = f"; to upload: {sync_command(folder)}" if run.offline else ""
    except Exception as error:  # wandb has many, none of which concerns the export
        sys.exit(f"error: {output} is written, but was not logged to wandb: {first_line(error)}")
    return f"logged as artifact {artifact.name} of run {run_id(folder)}{upload}"
