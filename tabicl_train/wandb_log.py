"""The logged steps of a run in Weights and Biases, beside its files. Nothing here can stop or hold up a run."""

from __future__ import annotations

import dataclasses
import json
import secrets
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from tabicl_train.config import RunConfig
from tabicl_train.figures import GROUPS, weighted_means
from tabicl_train.lengths import Lengths
from tabicl_train.messages import first_line, tell
from tabicl_train.metrics import Metrics, is_logged
from tabicl_train.module import Pretraining
from tabicl_train.records import Records


class WandbLog(L.Callback):
    """Logs the row of metrics.csv, its losses by rows and classes, and the multipliers, on the first rank.

    wandb.json in the run's folder holds the id, with which a resumed run continues the same one, and the last step
    logged: steps that are done again after an interruption are not logged again.
    """

    def __init__(self, config: RunConfig, records: Records, metrics: Metrics, lengths: Lengths) -> None:
        self.config, self.records, self.metrics, self.lengths = config, records, metrics, lengths
        self.run: Any = None

    def on_train_start(self, trainer: L.Trainer, module: Pretraining) -> None:
        if not trainer.is_global_zero:
            return
        self.state = self.records.json("wandb.json") or {"id": secrets.token_hex(8), "logged": 0}
        self.write()
        self.run = start(self.config, self.records.folder, self.state["id"])

    def on_train_batch_end(self, trainer: L.Trainer, module: Pretraining, *_: object) -> None:
        step = trainer.global_step
        if self.run is None or not is_logged(self.config, step) or step <= self.state["logged"]:
            return
        row = {key: value for key, value in self.metrics.row.items() if key != "step" and value != ""}
        losses = {key: mean for by in GROUPS for key, mean in losses_by(by, self.lengths.losses).items()}
        multipliers = {f"multiplier/{layer}": value for layer, value in self.lengths.multipliers.items()}
        self.run.log(row | losses | multipliers, step=step)
        self.state["logged"] = step
        self.write()

    def write(self) -> None:
        self.records.replace("wandb.json", json.dumps(self.state))

    def teardown(self, trainer: L.Trainer, module: Pretraining, stage: str) -> None:
        if self.run is not None:
            self.run.finish()
            if self.run.settings.mode == "offline":
                tell(f"wandb     to upload: wandb sync {self.run.settings.sync_dir}")


def losses_by(what: str, rows: list[dict]) -> dict[str, float]:
    """Mean losses over the tables of rows of batches.csv, by their rows or classes."""
    group_of, name_of = GROUPS[what]
    group, loss, tables = (
        np.array(values) for values in zip(*((group_of(r[what]), r["loss"], r["tables"]) for r in rows), strict=True)
    )
    return {f"loss_by_{what}/{name_of(g).replace(',', '')}": m for g, m in weighted_means(group, loss, tables).items()}


def start(config: RunConfig, run_dir: Path, run_id: str) -> Any:
    """A run of wandb, offline where online cannot be had; None, and a message, where there can be none."""
    import wandb

    wanted = config.wandb
    settings = wandb.Settings(silent=True, console="off", init_timeout=wanted.timeout, finish_timeout=wanted.timeout)
    mode = wanted.mode
    if mode == "online" and (obstacle := why_offline(wanted.timeout)):
        tell(f"wandb     the run is logged offline: {obstacle}")
        mode = "offline"
    try:
        return wandb.init(
            project=wanted.project,
            id=run_id,
            name=config.name,
            dir=run_dir,
            mode=mode,
            resume="allow",
            config=dataclasses.asdict(config),
            settings=settings,
        )
    except Exception as error:  # a run is worth more than its log
        tell(f"wandb     the run is not logged: {first_line(error)}")
        return None


def why_offline(timeout: float) -> str | None:
    """What keeps a run from being logged online. wandb itself would ask for an account, or try for minutes."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        return "no account is logged in (wandb login)"
    server = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(server, timeout=timeout)
    except urllib.error.HTTPError:
        return None  # it answers
    except OSError as error:
        return f"{server} cannot be reached ({first_line(error)})"
    return None
