"""The public file format: weights that `tabicl.TabICLClassifier(model_path=FILE, allow_auto_download=False)` loads.

A file is torch.save({"config": 26 values, "state_dict": weights, "format_version": 1, "origin": where they come from}).
The client silently replaces a missing value of the configuration by its own default, so all 26 are written, and all are
required when a file is read. It ignores the version and the origin, which the files of others lack.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig
from tabicl_train.model.families import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.public_config import from_public
from tabicl_train.run_dir.atomic import save, write_atomically
from tabicl_train.run_dir.checkpoint import check_version

FORMAT_VERSION = 1
"""Raised when files are written that the last release could not read; files of other programs have none."""


def save_public(
    config: NetworkConfig,
    weights: dict[str, Tensor],
    path: str | Path,
    origin: dict | None = None,
    check: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a public file; prefixes that compilation and DDP add to the names of weights are removed.

    origin: see origin.origin_of
    check: called with the file before it takes its place; what it raises leaves everything as it was
    Raises ConfigError if the weights do not fit the configuration or the format has no such network, and OSError.
    """
    weights = {plain(name): weight.detach().to("cpu", torch.float32, copy=True) for name, weight in weights.items()}
    if problems := mismatches(config, weights):
        raise ConfigError([f"{path} is not written: {problem}" for problem in problems])
    content = {"config": family_of(config).to_public(config), "state_dict": weights, "format_version": FORMAT_VERSION}

    def write(file: BinaryIO) -> None:
        save(content | {"origin": origin or {}}, file)
        file.flush()
        check(Path(file.name))

    write_atomically(Path(path), write)


def load_public(path: str | Path) -> tuple[TabICLConfig, dict[str, Tensor]]:
    """Read a public file; raises ConfigError that names the file if it is missing, damaged or of another kind."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file"]) from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise ConfigError([f"{path} is truncated or not a file of weights: {reason}"]) from None
    return public_weights(path, content)


def public_weights(path: str | Path, content: Any) -> tuple[TabICLConfig, dict[str, Tensor]]:
    """The same for the content of a file that has already been read."""
    kinds = {"config": dict, "state_dict": dict}
    if not isinstance(content, dict) or any(not isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise ConfigError([f"{path} is not a file of weights: it must hold a config and a state_dict"])
    check_version(path, content, FORMAT_VERSION)
    try:
        config = from_public(content["config"])
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    weights = dict(content["state_dict"])
    if problems := mismatches(config, weights):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return config, weights


def plain(name: str) -> str:
    """The name of a weight without the parts that torch.compile and DDP add."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def mismatches(config: NetworkConfig, weights: dict[str, Tensor]) -> list[str]:
    """Why the weights do not fit the network of the configuration; empty if they do."""
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in family_of(config)(config).state_dict().items()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    problems = []
    if missing := sorted(expected.keys() - shapes.keys()):
        problems.append(f"{len(missing)} weights are missing, for example {missing[0]}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        problems.append(f"{len(unknown)} weights do not belong to the network, for example {unknown[0]}")
    if wrong := sorted(name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]):
        problems.append(f"{wrong[0]} has shape {shapes[wrong[0]]}, the network needs {expected[wrong[0]]}")
    return problems
