"""Logs a run to Weights and Biases."""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path
from typing import Any

from tabicl_train.config.monitoring import WandbConfig
from tabicl_train.console import first_line, info
from tabicl_train.run_dir.atomic import write_atomically

__all__ = ["WandbLogger"]

TIMEOUT = 30.0  # seconds after which wandb gives up connecting to its server, and uploading at the end of the run


class WandbLogger:
    """Log to a wandb run, which a resumed run continues: its id is in the run directory's wandb.json.

    Steps that are done again are logged again.

    Parameters
    ----------
    options : WandbConfig
        The section `wandb` of the configuration; its mode is offline or online.
    folder : Path
        Run directory.
    config : dict
        The whole configuration, which wandb shows; `name` is the name of the wandb run.
    """

    name = "wandb"

    def __init__(self, options: WandbConfig, folder: Path, config: dict[str, Any]) -> None:
        self.options, self.folder, self.config = options, folder, config
        self.run: Any = None

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values over our step; wandb's own step only counts the calls; see `Loggers.log_metrics`."""
        if self.run is None:
            self.run = open_run(self.options, self.folder, self.config, TIMEOUT)
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        self.run.log({"step": step, **values})

    def close(self, exit_code: int = 0) -> None:
        """Finish the wandb run, and print the command that uploads one that is offline; see `Loggers.close`."""
        if self.run is not None:
            self.run.finish(exit_code)
            if self.run.offline:
                info(f"wandb     to upload: {sync_command(self.folder)}")


def run_id(folder: Path) -> str:
    """The id of the wandb run of a run directory, which the first call chooses and keeps in wandb.json."""
    path = folder / "wandb.json"
    if not path.exists():
        write_atomically(path, lambda file: file.write(json.dumps({"id": secrets.token_hex(8)}).encode()))
    return json.loads(path.read_text())["id"]


def sync_command(folder: Path) -> str:
    """The command that uploads what all starts of a run have logged offline, oldest first."""
    # The names hold the time of the start; a second start within a second ends with -1.
    folders = sorted(folder.resolve().glob(f"wandb/offline-run-*-{run_id(folder)}*"))
    return shlex.join(["wandb", "sync", *map(str, folders)])


def open_run(options: WandbConfig, folder: Path, config: dict[str, Any], finish_timeout: float) -> Any:
    """Start or continue the wandb run of a run directory, offline where it cannot be online; `finish_timeout`: seconds
    that the upload may take at the end, without a limit if 0."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", init_timeout=TIMEOUT, finish_timeout=finish_timeout)

    def init(mode: str) -> Any:
        return wandb.init(
            project=options.project,
            group=options.group,
            id=run_id(folder),
            name=config["name"],
            dir=folder,
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            config=config,
            settings=settings,
        )

    if options.mode == "online":
        try:
            if wandb.login(prompt=False, verify=False):  # at a terminal, init would ask for an account
                return init("online")
            info("wandb     logged offline: no account is logged in (wandb login)")
        except wandb.Error as error:
            wandb.teardown()  # the attempt has left the id in use
            info(f"wandb     logged offline: {first_line(error)}")
    return init("offline")
