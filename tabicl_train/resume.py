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
import yaml

from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import family_name
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import FREE_TO_CHANGE, refuse_changes
from tabicl_train.run_dir.records import Records, open_or_empty


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    steps: optimizer steps done
    seed: that of rank 0
    checkpoint: the file that rank 0 continues from, if any
    real_tables: the hash of the real tables that rank 0 sees, if the prior has any
    """

    steps: int
    seed: int
    checkpoint: Path | None = None
    real_tables: str | None = None

    def problems(self, seed: int, real_tables: str | None) -> list[str]:
        """Why a rank with this seed, which sees these real tables, cannot take part."""
        problems = [f"seed is {seed}, that of rank 0 {self.seed}"] if seed != self.seed else []
        if real_tables != self.real_tables:
            problems.append("the real tables of the prior are others than on rank 0")
        return problems


def find_start(config: RunConfig, real_tables: str | None) -> tuple[Start, dict | None]:
    """Where a run begins.

    Parameters
    ----------
    config : RunConfig
        The run.
    real_tables : str or None
        The hash of the real tables of its prior.

    Returns
    -------
    Start
    dict or None
        The content of the newest intact checkpoint.

    Raises
    ------
    ConfigError
        If the run directory belongs to another run, or if its checkpoints are gone.
    """
    folder = Path(config.run_dir)
    if (newest := checkpoint.newest_valid(folder / "checkpoints")) is None:
        check_beginning(config)
        return Start(0, config.seed, real_tables=real_tables), None
    path, content = newest
    steps = checkpoint.step_of(path)
    refuse_changes(config, content, steps)
    return Start(steps, config.seed, path, real_tables), content


def check_beginning(config: RunConfig) -> None:
    """Refuse a start at step 0 in a run directory whose records say more: of a saved checkpoint, or another seed."""
    records = Records(Path(config.run_dir))
    over = "to start over, name another run_dir or remove this one"
    if saved := (records.json("status.json") or {}).get("saved"):
        raise ConfigError([f"{records.folder} lacks the checkpoint of step {saved}, which status.json names; {over}"])
    with open_or_empty(records.folder / "config.yaml") as file:
        recorded = yaml.safe_load(file) or {}
    if recorded.get("seed", config.seed) != config.seed:
        raise ConfigError([f"{records.folder} holds a run with seed={recorded['seed']}, not {config.seed}; {over}"])


def initial_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights of the run, checkpoint, public file or hub folder that `init_weights` names.

    A network that sees missing values may start from one that saw their means: its tokens for them begin as zeros.
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
    free: tuple[str, ...] = FREE_TO_CHANGE
    if config.model.missing_values and not file_config.missing_values:
        free, name = (*free, "missing_values"), "col_embedder.missing_values"
        weights = weights | {name: torch.zeros_like(weights["col_embedder.in_linear.weight"])}
    if different := [
        f"init_weights: the file's model has {key}={value}, the configuration model.{key}={configured}"
        for key, value in dataclasses.asdict(file_config).items()
        if (configured := getattr(config.model, key)) != value and key not in free
    ]:
        raise ConfigError(different)
    return weights
