"""Where a run begins: at step 0, perhaps from given weights, or at its newest checkpoint.

Rank 0 reads the files, and the other ranks get what they need from it: ranks that looked for themselves could see
different files (a slow view of a shared folder, an error of one disk, another machine's folder), and would exchange the
gradients of different steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import family_name
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import FREE_TO_CHANGE, refuse_changes
from tabicl_train.run_dir.restart import Restart, find_restart


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    steps: optimiser steps done
    seed: that of rank 0
    checkpoint: the file that rank 0 continues from, if any
    restart: what torchrun's restart has cost, if this start is one
    real_tables: the hash of the real tables that rank 0 sees, if the prior has any
    """

    steps: int
    seed: int
    checkpoint: Path | None = None
    restart: Restart | None = None
    real_tables: str | None = None

    def problem(self, config: RunConfig) -> str | None:
        """Why a rank with this configuration cannot take part; None if it can."""
        if config.seed != self.seed:
            return f"seed is {config.seed}, that of rank 0 {self.seed}"
        if build_prior(config).fingerprint() != self.real_tables:
            return "the real tables of the prior are others than on rank 0"
        return None


def find_start(config: RunConfig) -> tuple[Start, dict | None]:
    """The newest intact checkpoint of the run and its content; raises ConfigError if it belongs to another run."""
    folder = Path(config.run_dir)
    newest = checkpoint.newest_valid(folder / "checkpoints")
    real_tables = build_prior(config).fingerprint()
    if newest is None:
        return Start(0, config.seed, restart=find_restart(folder, 0), real_tables=real_tables), None
    path, content = newest
    steps = checkpoint.step_of(path)
    refuse_changes(config, content, steps)
    return Start(steps, config.seed, path, find_restart(folder, steps), real_tables), content


def initial_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights of the run, checkpoint, public file or hub folder that `init_weights` names.

    Raises ConfigError if they cannot be read, or if their model is not the configured one.
    """
    assert config.init_weights is not None
    try:
        file_config, weights = load_checkpoint(config.init_weights)
    except ConfigError as error:
        raise ConfigError([f"init_weights: {problem}" for problem in error.problems]) from None
    if type(file_config) is not type(config.model):
        names = (family_name(type(model)) for model in (file_config, config.model))
        raise ConfigError(["init_weights: the file's model is of the family {}; this run trains {}".format(*names)])
    if file_config.is_regression != config.model.is_regression:
        kinds = ("a classifier", "a regressor") if config.model.is_regression else ("a regressor", "a classifier")
        why = "whose labels are read by other weights"
        raise ConfigError([f"init_weights: the file's model is {kinds[0]}; this run trains {kinds[1]}, {why}"])
    if different := [
        f"init_weights: the file's model has {key}={value}, the configuration model.{key}={configured}"
        for key, value in dataclasses.asdict(file_config).items()
        if (configured := getattr(config.model, key)) != value and key not in FREE_TO_CHANGE
    ]:
        raise ConfigError(different)
    return weights
