"""Export: from a run or a checkpoint to a file that the public client loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from tabicl_train.console import first_line
from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.tabicl import TabICL
from tabicl_train.prediction.public_format import load_public, save_public
from tabicl_train.run_dir.checkpoint import averaged, is_run_checkpoint, load
from tabicl_train.run_dir.outputs import check_output

WEIGHTS = ("trained", "ema", "last")
SUFFIXES = (".ckpt", ".pt", ".pth")  # the public format is written by torch.save


def load_checkpoint(checkpoint: str, weights: str = "trained") -> tuple[TabICLConfig, dict[str, Tensor]]:
    """Configuration and weights of a run directory, a checkpoint of a run, or a file in the public format.

    weights: trained, or an average that the run keeps: ema, last
    """
    if weights not in WEIGHTS:
        raise ConfigError([f"weights is {weights!r}; it must be one of {', '.join(WEIGHTS)}"])
    return weights_of(*load(checkpoint), weights)


def weights_of(path: Path, content: dict, weights: str = "trained") -> tuple[TabICLConfig, dict[str, Tensor]]:
    """The same for the content of a checkpoint that has already been read."""
    if not is_run_checkpoint(content):
        if weights != "trained":
            raise ConfigError([f"{path} holds one set of weights; weights={weights} needs a checkpoint of a run"])
        return load_public(path)
    if weights == "trained":
        tensors = {name.removeprefix("model."): tensor for name, tensor in content["state_dict"].items()}
    elif not (tensors := averaged(content, weights)):
        raise ConfigError([f"{path} keeps no such average: averages.{weights} was 0, or the run has just begun"])
    settings = content["config"]["model"]
    known = {field.name for field in dataclasses.fields(TabICLConfig)}
    if unknown := [f"model.{name}={value}" for name, value in settings.items() if name not in known]:
        raise ConfigError([f"{path} has {', '.join(unknown)}, which this version of tabicl-train does not have"])
    return TabICLConfig(**settings), tensors


def load_model(checkpoint: str) -> TabICL:
    """The network of a run directory, a checkpoint or a public file, in evaluation mode."""
    return build_model(*load_checkpoint(checkpoint))


def build_model(config: TabICLConfig, weights: dict[str, Tensor]) -> TabICL:
    model = TabICL(config)
    model.load_state_dict(weights)
    return model.eval()


def export(checkpoint: str, output: str, weights: str = "trained") -> str:
    """Write a public file; returns a line that says what was written. Raises ConfigError if that is impossible."""
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
