"""The public file format: weights that `tabicl.TabICLClassifier(model_path=FILE, allow_auto_download=False)` loads.

A file is torch.save({"config": 26 values, "state_dict": weights, "format_version": 1, "origin": where they come from}).
The package silently replaces a missing value of the configuration by its own default, so all 26 are written, and all
are required when a file is read. It ignores the version and the origin, which the files of others lack.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import TabICLConfig, family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.public_config import from_public
from tabicl_train.prediction.origin import mismatches
from tabicl_train.run_dir.atomic import save, write_atomically
from tabicl_train.run_dir.checkpoint import check_version

FORMAT_VERSION = 1


def save_public(
    config: NetworkConfig,
    weights: dict[str, Tensor],
    path: str | Path,
    origin: dict | None = None,
    check: Callable[[Path], None] = lambda path: None,
) -> None:
    """Write a public file.

    origin: see origin.origin_of
    check: called with the file before it takes its place; what it raises leaves everything as it was
    Raises ConfigError if the weights do not fit the configuration or the format has no such network, and OSError.
    """
    weights = {name: weight.detach().to("cpu", torch.float32, copy=True) for name, weight in weights.items()}
    if problems := mismatches(config, weights):
        raise ConfigError([f"{path} is not written: {problem}" for problem in problems])
    content = {"config": family_of(config).to_public(config), "state_dict": weights, "format_version": FORMAT_VERSION}

    def write(file: BinaryIO) -> None:
        save(content | {"origin": origin or {}}, file)
        file.flush()
        check(Path(file.name))

    write_atomically(Path(path), write)


def public_weights(path: str | Path, content: Any) -> tuple[TabICLConfig, dict[str, Tensor]]:
    """The configuration and the weights in the content of a file; raises ConfigError that names what is wrong."""
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
