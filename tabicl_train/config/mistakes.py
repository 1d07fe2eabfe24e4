"""What is wrong with a command line, all of it, in the user's terms."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Collection
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tabicl_train.config.schema import RunConfig, StageConfig, flatten

# What Hydra raises for a command line it cannot compose; ValueError for GROUP=null.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)

STAGES = "curriculum.stages"


def find_problems(tree: DictConfig) -> list[str]:
    if OmegaConf.get_type(tree) is not RunConfig:
        return ["the configuration has no schema; its file must begin with defaults: [run_schema, ...]"]
    try:
        config = to_dataclasses(tree)
        infinite = not_finite(config)
        others = [p for p in config.problems() if not p.startswith(tuple(f"{key} " for key in infinite))]
        return unknown_keys(tree, RunConfig, every_key(tree)) + list(infinite.values()) + others
    except OmegaConfBaseException as error:
        return [first_lines(error)]


# Limits that inf switches off. Anywhere else it is a mistake, and nan always is: comparisons with it pass unnoticed.
UNLIMITED = (".clip", "guard.loss", "guard.multiplier", "guard.multiplier_loss", "stream.prefetch_gib")


def not_finite(config: RunConfig) -> dict[str, str]:
    """What is wrong with the numbers that are nan or infinite, by their keys."""
    found = {}
    for key, value in flatten(dataclasses.asdict(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if number != math.inf or not key.endswith(UNLIMITED):
                found[key] = f"{key} is {value}; it must be a finite number"
    return found


def to_dataclasses(tree: DictConfig) -> RunConfig:
    config = OmegaConf.to_object(tree)
    config.curriculum.drop_skipped()
    config.prior = OmegaConf.to_container(tree.prior, resolve=True) if tree.prior is not None else None
    return config


def sort_out(config_name: str, overrides: list[str], also: Collection[str]) -> list[str]:
    """Everything that is wrong with overrides that Hydra cannot compose: it stops at the first problem.

    Each is tried by itself: first what says where configurations lie, then the choices of groups, then the values.
    """
    found, parsed = [], []
    usable: list[str] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            found.append(f"{text!r} is not of the form key=value")
            continue
        if override.key_or_group == "hydra.searchpath":
            usable.append(text)
        else:
            parsed.append((text, override))
    options = {text: group_options(config_name, override.key_or_group, usable) for text, override in parsed}
    groups = [(text, override) for text, override in parsed if options[text]]
    values = [(text, override) for text, override in parsed if not options[text]]
    added_stages = [text for text, override in values if override.is_add() and override.key_or_group == STAGES]
    wrong = set()
    for text, override in groups:
        try:
            hydra_compose(config_name, [*usable, text])
            usable.append(text)
        except COMPOSE_ERRORS as error:
            wrong.add(override.key_or_group)
            found.append(wrong_choice(override, options[text]) or first_lines(error))
    try:
        tree = hydra_compose(config_name, [*usable, *added_stages])
    except COMPOSE_ERRORS as error:
        return [*found, first_lines(error)]
    # A wrong choice leaves open which stages there are and which options the prior has, and nearly all else.
    open_keys = tuple(f"{group}." for group in (STAGES, "prior") if wrong & {"experiment", group.partition(".")[0]})
    for text, override in values:
        try:
            hydra_compose(config_name, [*usable, text])
            usable.append(text)
        except COMPOSE_ERRORS as error:
            missing = None if override.is_add() else missing_key(tree, override.key_or_group, also)
            if missing is None or not override.key_or_group.startswith(open_keys):
                found.append(missing or wrong_value(override, error))
    with contextlib.suppress(*COMPOSE_ERRORS):
        others = find_problems(hydra_compose(config_name, usable))
        found += [p for p in others if not p.startswith(("",) if "experiment" in wrong else tuple(wrong))]
    return list(dict.fromkeys(found))


def group_options(config_name: str, key: str, search_path: list[str]) -> list[str]:
    """The choices of a group of configurations; none where the key is not a group's."""
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(key, config_name=config_name, overrides=search_path))


def wrong_choice(override: Override, choices: list[str]) -> str | None:
    if override.value() in choices:
        return None
    return f"{override.key_or_group}={override.value()}: there is no such choice; there are {', '.join(choices)}"


def missing_key(tree: DictConfig, key: str, also: Collection[str]) -> str | None:
    """The message for a key that the configuration does not have, with the nearest one that it has."""
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = list(node) if isinstance(node, DictConfig) else []
            prefix = ".".join(parts[:depth])
            if prefix == STAGES:
                adding = "" if depth + 1 == len(parts) else f" (+{prefix}.{part}.KEY=VALUE adds a stage)"
                return unknown(prefix, part, known) + adding
            return unknown(prefix, part, [*known, *also] if depth == 0 else known, parts[-1], every_key(tree))
        node = node[part]
    return None


def every_key(tree: DictConfig) -> list[str]:
    return list(flatten(OmegaConf.to_container(tree)))


def unknown(prefix: str, key: str, known: list[str], last: str | None = None, everywhere: Collection[str] = ()) -> str:
    """The message for a key that is not among the `known` ones under `prefix`, with what may have been meant.

    last: the last part of the whole key, which may be the name of a setting elsewhere
    everywhere: the dotted keys of all settings
    """
    where = f"{prefix}." if prefix else ""
    by_name: dict[str, list[str]] = {}
    for path in everywhere:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    last = last or key
    siblings = [where + name for name in closest(key, known)]
    near = [*siblings, *by_name.get(last, [])] if last == key else by_name.get(last, siblings)
    near = near or [path for name in closest(last, by_name) for path in by_name[name]]
    if near:
        return f"{where}{key}: no such setting; did you mean {' or '.join(near[:3])}?"
    return f"{where}{key}: no such setting; there are {', '.join(map(str, known))}"


def closest(name: str, names: Collection[str]) -> list[str]:
    """The most similar one, if any; at a similarity of 0.5 tabel was taken for trainer."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.7)


def wrong_value(override: Override, error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{override.key_or_group}: {str(cause).splitlines()[0]}"


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines[:3] if not line.startswith("object_type"))


def unknown_keys(tree: DictConfig, cls: type, everywhere: Collection[str], prefix: str = "") -> list[str]:
    """Keys that `+key=value` added to a typed node; Hydra lets them through, and nothing would ever read them."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    found = []
    for key in tree:
        path = f"{prefix}{key}"
        if key not in fields:
            elsewhere = [name for name in everywhere if not f"{name}.".startswith(f"{path}.")]
            found.append(unknown(prefix.rstrip("."), str(key), list(fields), None, elsewhere))
        elif path == "curriculum":
            for name, stage in tree.curriculum.stages.items():
                found += unknown_keys(stage, StageConfig, everywhere, f"{path}.stages.{name}.")
        elif isinstance(tree._get_node(key), DictConfig) and path != "prior":
            node_type = OmegaConf.get_type(tree, key)
            if dataclasses.is_dataclass(node_type):
                found += unknown_keys(tree[key], node_type, everywhere, f"{path}.")
    return found
