"""The public file format: weights that `tabicl.TabICLClassifier(model_path=FILE, allow_auto_download=False)` loads.

A file is torch.save({"config": 26 values, "state_dict": weights}). The client silently fills a missing value with its
own default, so all of them are written, and all are required when a file is read.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tabicl_train.errors import ConfigError
from tabicl_train.model import TabICL, TabICLConfig
from tabicl_train.run_dir.atomic import save_atomically

# ours -> the client's
NAMES = {
    "max_classes": "max_classes",
    "embed_dim": "embed_dim",
    "col_num_blocks": "col_num_blocks",
    "col_num_heads": "col_nhead",
    "col_num_inducing": "col_num_inds",
    "col_affine": "col_affine",
    "col_grouping": "col_feature_group",
    "col_group_size": "col_feature_group_size",
    "col_target_aware": "col_target_aware",
    "col_scaling": "col_ssmax",
    "row_num_blocks": "row_num_blocks",
    "row_num_heads": "row_nhead",
    "row_num_cls": "row_num_cls",
    "row_rope_base": "row_rope_base",
    "row_rope_interleaved": "row_rope_interleaved",
    "icl_num_blocks": "icl_num_blocks",
    "icl_num_heads": "icl_nhead",
    "icl_scaling": "icl_ssmax",
    "ff_factor": "ff_factor",
    "dropout": "dropout",
    "bias_free_ln": "bias_free_ln",
    "zero_init": "zero_init",
}
# what the client could vary and we do not: a classifier, pre-norm, GELU
FIXED = {"num_quantiles": 999, "activation": "gelu", "norm_first": True, "recompute": False}
GROUPINGS = {"none": False, "circular": "same", "disjoint": "valid"}
SCALINGS = {
    "none": "none",
    "ssmax": "ssmax",
    "ssmax_mlp": "ssmax-mlp",
    "ssmax_mlp_elementwise": "ssmax-mlp-elementwise",
    "qassmax": "qassmax-mlp",
    "qassmax_elementwise": "qassmax-mlp-elementwise",
}
VALUES = {"col_grouping": GROUPINGS, "col_scaling": SCALINGS, "icl_scaling": SCALINGS}
SWITCHES = {  # the client also takes plain switches
    "col_grouping": {True: "circular"},
    "col_scaling": {True: "qassmax_elementwise", False: "none"},
    "icl_scaling": {True: "qassmax_elementwise", False: "none"},
}


def to_public(config: TabICLConfig) -> dict[str, Any]:
    """The client's configuration of the same network, all 26 keys; raises ConfigError where it has no such network."""
    if config.scaling_bound is not None:
        raise ConfigError([f"the public format has no model.scaling_bound ({config.scaling_bound}) of the multipliers"])
    public = dict(FIXED)
    for ours, theirs in NAMES.items():
        value = getattr(config, ours)
        public[theirs] = VALUES[ours][value] if ours in VALUES else value
    return public


def from_public(public: dict[str, Any]) -> TabICLConfig:
    """Our configuration of a client's network; raises ConfigError with everything that we cannot build."""
    missing = [key for key in (*NAMES.values(), *FIXED) if key not in public]
    if missing:
        raise ConfigError([f"the configuration lacks {', '.join(missing)}"])
    if public["max_classes"] == 0:
        raise ConfigError(["it is a regression model (max_classes=0); only classifiers are supported"])
    problems = []
    for key in ("activation", "norm_first"):
        if public[key] != FIXED[key]:
            problems.append(f"{key}={public[key]!r} is not supported, only {FIXED[key]!r}")
    values = {}
    for field in dataclasses.fields(TabICLConfig):
        if field.name not in NAMES:
            continue
        theirs = NAMES[field.name]
        value = public[theirs]
        if field.name in VALUES:
            ours = {v: k for k, v in VALUES[field.name].items()} | SWITCHES[field.name]
            if value not in ours:
                problems.append(f"{theirs}={value!r} is not supported, only {', '.join(map(repr, ours))}")
                continue
            value = ours[value]
        elif type(value) is not field.type and not (field.type is float and type(value) is int):
            problems.append(f"{theirs}={value!r} is not of type {field.type.__name__}")
            continue
        values[field.name] = field.type(value)
    if problems:
        raise ConfigError(problems)
    if values["col_grouping"] == "none":
        del values["col_group_size"]  # without effect there
    config = TabICLConfig(**values)
    if problems := config.problems():
        raise ConfigError(problems)
    return config


def save_public(config: TabICLConfig, weights: dict[str, Tensor], path: str | Path) -> None:
    """Write a public file. Prefixes that compilation and DDP put into the names of weights are taken out."""
    weights = {plain(name): weight.detach().to("cpu", torch.float32, copy=True) for name, weight in weights.items()}
    if problems := mismatches(config, weights):
        raise ConfigError([f"{path} is not written: {problem}" for problem in problems])
    save_atomically({"config": to_public(config), "state_dict": weights}, Path(path))


def load_public(path: str | Path) -> tuple[TabICLConfig, dict[str, Tensor]]:
    """Read a public file; raises ConfigError that names the file when it is missing, damaged or of another kind."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file"]) from None
    except Exception as error:  # torch raises many kinds for a damaged file
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise ConfigError([f"{path} is truncated or no file of weights: {reason}"]) from None
    kinds = {"config": dict, "state_dict": dict}
    if not isinstance(content, dict) or any(not isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise ConfigError([f"{path} is no file of weights: it must hold a config and a state_dict"])
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


def mismatches(config: TabICLConfig, weights: dict[str, Tensor]) -> list[str]:
    """What keeps the weights from fitting the network of the configuration."""
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in TabICL(config).state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"{len(missing)} weights are missing, such as {missing[0]}")
    if unknown := sorted(found.keys() - expected.keys()):
        problems.append(f"{len(unknown)} weights do not belong to the network, such as {unknown[0]}")
    if wrong := sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name]):
        problems.append(f"{wrong[0]} has shape {found[wrong[0]]}, the network needs {expected[wrong[0]]}")
    return problems
