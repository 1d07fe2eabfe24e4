"""Logs a run to Weights and Biases."""

from __future__ import annotations

import json
import secrets
import shlex
from pathlib import Path
from typing import Any

from tabicl_train.config.schema import WandbConfig
from tabicl_train.console import first_line, info
from tabicl_train.outputs import write_atomically

TIMEOUT = 30.0  # seconds for which wandb tries to connect to its server, and to upload at the end of the run


class WandbLogger:
    """Log to a wandb run, which a resumed run continues: its id is in wandb.json. Repeated steps are logged again.

    Parameters
    ----------
    options : WandbConfig
        The section `wandb` of the configuration.
    folder : Path
        The run directory.
    config : dict
        The configuration in plain values, which wandb shows.
    """

    name = "wandb"

    def __init__(self, options: WandbConfig, folder: Path, config: dict[str, Any]) -> None:
        self.options = options
        self.folder = folder
        self.config = config
        self.run: Any = None  # opened with the first values

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values by optimizer step, since wandb's own step counts calls."""
        if self.run is None:
            self.run = self.open_run()
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        self.run.log({"step": step, **values})

    def close(self, exit_code: int = 0) -> None:
        """Finish the wandb run; if it is offline, print the command that uploads the logs of all starts."""
        if self.run is None:
            return
        self.run.finish(exit_code)
        if self.run.offline:
            # A folder is named by the time of its start and the id; a second one within a second ends with -1.
            folders = sorted(self.folder.resolve().glob(f"wandb/offline-run-*-{self.run_id()}*"))
            info(f"wandb     to upload: {shlex.join(['wandb', 'sync', *map(str, folders)])}")

    def run_id(self) -> str:
        """Return the id of the wandb run, which the first call writes to wandb.json."""
        path = self.folder / "wandb.json"
        if not path.exists():
            write_atomically(path, lambda file: file.write(json.dumps({"id": secrets.token_hex(8)}).encode()))
        return json.loads(path.read_text())["id"]

    def open_run(self) -> Any:
        """Start or continue the wandb run, offline if wandb cannot be reached or no account is logged in."""
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=TIMEOUT, finish_timeout=TIMEOUT)

        def init(mode: str) -> Any:
            return wandb.init(
                project=self.options.project,
                group=self.options.group,
                id=self.run_id(),
                name=self.options.name or self.config["name"],
                dir=self.folder,
                mode=mode,  # type: ignore[arg-type]
                resume="allow",
                config=self.config,
                settings=settings,
            )

        # Online, unless that fails.
        if self.options.mode == "online":
            try:
                # Without an account, init would ask for one in a terminal.
                if wandb.login(prompt=False, verify=False):
                    return init("online")
                info("wandb     logged offline: no account is logged in (wandb login)")
            except wandb.Error as error:
                wandb.teardown()  # since the id is still in use
                info(f"wandb     logged offline: {first_line(error)}")
        return init("offline")
