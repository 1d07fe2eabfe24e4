"""Weights out: from a run or a checkpoint to a file that the public client loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tabicl_train.checkpoint import DamagedCheckpoint, read, resolve
from tabicl_train.config import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.weights import load_public, save_public


def load_checkpoint(checkpoint: str) -> tuple[TabICLConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a run directory, a checkpoint of a run, or a file in the public format."""
    path = resolve(checkpoint)
    try:
        content = read(path)
    except DamagedCheckpoint as error:
        raise ConfigError([str(error)]) from None
    if not is_run_checkpoint(content):
        return load_public(path)
    weights = {k.removeprefix("model."): v for k, v in content["state_dict"].items()}
    return TabICLConfig(**content["config"]["model"]), weights


def is_run_checkpoint(content: dict) -> bool:
    return isinstance(content, dict) and "global_step" in content


def load_model(checkpoint: str) -> TabICL:
    """The model of a checkpoint in any of the three forms, in evaluation mode."""
    config, weights = load_checkpoint(checkpoint)
    model = TabICL(config)
    model.load_state_dict(weights)
    return model.eval()


def export(checkpoint: str, output: str) -> str:
    """Write the public file; returns a line that says what was written."""
    config, weights = load_checkpoint(checkpoint)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    save_public(config, weights, output)
    count = sum(w.numel() for w in weights.values())
    return f"{output}: {count:,} parameters, loads with tabicl.TabICLClassifier(model_path={output!r})"
