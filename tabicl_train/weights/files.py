"""Reads weights from exports: files of the public format, in both kinds of file, and folders of the hub format.

A public file is torch.save({"config": 26 values, "state_dict": weights, "format_version": 1, "origin": origin of the
weights}). The `tabicl` package silently replaces a missing value of the configuration by its own default, so all 26 are
required. Files of other programs lack the version and the origin. A safetensors file holds the same: the weights are
its tensors, and the rest is in its metadata, with a checksum that is verified on reading.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open

from priors.checksum import is_damaged
from priors.nesting import read_json
from tabicl_train.console import first_line
from tabicl_train.doors.plugins import require
from tabicl_train.errors import ConfigError
from tabicl_train.model.public_config import from_public
from tabicl_train.run.checkpoint import check_version, state_dict_problem
from tabicl_train.run.records import Records
from tabicl_train.weights import no_such_weights
from tabicl_train.weights.pretrained import (
    NEEDED,
    Pretrained,
    as_float32,
    check_weights,
    checked_origin,
    network_config,
    plugins_in,
)

PUBLIC_VERSION = 1  # of the public format
HUB_VERSION = 1  # of the hub format
WEIGHTS = "model.safetensors"  # files of a hub folder
CONFIG = "config.json"
LIBRARY = "tabicl-train"


def read_safetensors(path: Path) -> dict:
    """Read a safetensors file and return its content in the form of a public file; raises ConfigError."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ConfigError([no_such_weights("checkpoint", path)]) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    if is_damaged(metadata, tensors, lambda name: as_float32(tensors[name]).numpy()):
        raise ConfigError([f"{path} is damaged: its content does not match its checksum; export or copy it again"])
    try:
        description = {key: read_json(metadata[key]) for key in ("config", "format_version", "origin")}
    except (KeyError, ValueError):
        why = f"it has no configuration; if it is in a hub folder, name the folder, {str(path.parent)!r}"
        raise ConfigError([f"weights are not read from {path}: {why}"]) from None
    return description | {"state_dict": tensors}


def public_weights(path: str | Path, content: Any) -> Pretrained:
    """Read the weights in the content of a public file; raises ConfigError."""
    has_config = isinstance(content, dict) and isinstance(content.get("config"), dict)
    has_weights = isinstance(content, dict) and isinstance(content.get("state_dict"), dict)
    if not has_config or not has_weights:
        raise ConfigError([f"{path} is not a file of weights: it must hold a config and a state_dict"])
    problem = state_dict_problem(content["state_dict"])
    if problem:
        raise ConfigError([f"{path} is not a file of weights: {problem}"])
    check_version(path, content, PUBLIC_VERSION)
    require(plugins_in(content.get("origin")), NEEDED, path)
    try:
        config = from_public(content["config"])
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    weights = dict(content["state_dict"])
    check_weights(path, config, weights)
    return Pretrained(config, weights, checked_origin(path, content.get("origin", {})))


def is_hub_folder(path: Path) -> bool:
    """Whether a path is a folder with one of the two files that loading needs."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


def load_hub(folder: Path) -> Pretrained:
    """Read a hub folder; raises ConfigError if it is incomplete, damaged or of another program."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise ConfigError([f"{folder} has no {name}; it is incomplete or not a folder of tabicl-export"])
    description = read_description(folder)
    if description is None or not isinstance(description.get("model"), dict):
        raise ConfigError([f"{folder / CONFIG} was not written by tabicl-export"])
    check_version(folder, description, HUB_VERSION)
    try:
        content = (folder / WEIGHTS).read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError([f"{folder / WEIGHTS} cannot be read: {first_line(error)}"]) from None
    if recorded_checksum(description, WEIGHTS) != sha256_of(content):
        raise ConfigError([f"{folder / WEIGHTS} is damaged, or does not belong to the {CONFIG} next to it"])
    require(plugins_in(description.get("origin")), NEEDED, folder)
    config = network_config(folder / CONFIG, description["model"])
    check_weights(folder, config, tensors)
    return Pretrained(config, tensors, checked_origin(folder / CONFIG, description.get("origin", {})))


def read_description(folder: Path) -> dict | None:
    """Return the content of config.json; None if it is missing, damaged, or of another program."""
    description = Records(folder).json(CONFIG)
    if not description or description.get("library_name") != LIBRARY:
        return None
    return description


def recorded_checksum(description: dict, name: str) -> Any:
    """Return the checksum that config.json records for a file, or None."""
    checksums = description.get("sha256")
    return checksums.get(name) if isinstance(checksums, dict) else None


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
