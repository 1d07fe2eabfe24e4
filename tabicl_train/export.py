"""Weights out: from a run or a checkpoint to a file that the public client loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tabicl_train.averages import averaged
from tabicl_train.checkpoint import load
from tabicl_train.config import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.weights import load_public, save_public

WEIGHTS = ("trained", "ema", "last")


def load_checkpoint(checkpoint: str, weights: str = "trained") -> tuple[TabICLConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a run directory, a checkpoint of a run, or a file in the public format.

    weights: trained, or an average that the run keeps: ema, last
    """
    if weights not in WEIGHTS:
        raise ConfigError([f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}"])
    path, content = load(checkpoint)
    if not is_run_checkpoint(content):
        if weights != "trained":
            raise ConfigError([f"{path} holds one set of weights; weights={weights} needs a checkpoint of a run"])
        return load_public(path)
    if weights == "trained":
        found = {k.removeprefix("model."): v for k, v in content["state_dict"].items()}
    elif not (found := averaged(content["callbacks"]["Averages"], weights)):
        raise ConfigError([f"{path} keeps no such average: averages.{weights} was 0, or the run has just begun"])
    return TabICLConfig(**content["config"]["model"]), found


def is_run_checkpoint(content: dict) -> bool:
    return isinstance(content, dict) and "global_step" in content


def load_model(checkpoint: str) -> TabICL:
    """The model of a checkpoint in any of the three forms, in evaluation mode."""
    config, weights = load_checkpoint(checkpoint)
    model = TabICL(config)
    model.load_state_dict(weights)
    return model.eval()


def export(checkpoint: str, output: str, weights: str = "trained") -> str:
    """Write the public file; returns a line that says what was written."""
    config, found = load_checkpoint(checkpoint, weights)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    save_public(config, found, output)
    count = sum(w.numel() for w in found.values())
    return f"{output}: {count:,} parameters, loads with tabicl.TabICLClassifier(model_path={output!r})"
