"""Weights out: from a run or a checkpoint to a file that the public client loads."""

from __future__ import annotations

from pathlib import Path

import torch

from tabicl_train.callbacks.averages import averaged
from tabicl_train.config.options import ExportOptions
from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.prediction.public_format import load_public, save_public
from tabicl_train.run_dir.checkpoint import load
from tabicl_train.run_dir.console import first_line
from tabicl_train.run_dir.outputs import check_output

WEIGHTS = ("trained", "ema", "last")
SUFFIXES = (".ckpt", ".pt", ".pth")  # a public file is one that torch.save wrote


def load_checkpoint(checkpoint: str, weights: str = "trained") -> tuple[TabICLConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a run directory, a checkpoint of a run, or a file in the public format.

    weights: trained, or an average that the run keeps: ema, last
    """
    if weights not in WEIGHTS:
        raise ConfigError([f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}"])
    return weights_of(*load(checkpoint), weights)


def weights_of(path: Path, content: dict, weights: str = "trained") -> tuple[TabICLConfig, dict[str, torch.Tensor]]:
    """The same of a checkpoint that has been read."""
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
    return build_model(*load_checkpoint(checkpoint))


def build_model(config: TabICLConfig, weights: dict[str, torch.Tensor]) -> TabICL:
    model = TabICL(config)
    model.load_state_dict(weights)
    return model.eval()


def export(checkpoint: str, output: str, weights: str = ExportOptions.weights) -> str:
    """Write the public file; returns a line that says what was written. Raises ConfigError where it cannot be."""
    if Path(output).suffix not in SUFFIXES:
        raise ConfigError(
            [f"output is {output!r}; the format is torch's, so the name must end in {', '.join(SUFFIXES)}"]
        )
    check_output(output)
    config, tensors = load_checkpoint(checkpoint, weights)
    try:
        save_public(config, tensors, output)
    except OSError as error:
        raise ConfigError([f"output is {output!r}; it cannot be written ({first_line(error)})"]) from None
    count = sum(tensor.numel() for tensor in tensors.values())
    return f"{output}: {count:,} parameters, loads with tabicl.TabICLClassifier(model_path={output!r})"
