"""Finds out everything that is wrong with a command line, in the user's terms."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tabicl_train.config.schema import RunConfig, StageConfig, flatten
from tabicl_train.config.suggestions import first_lines, unknown_key, wrong_type

# What Hydra raises for a command line that it cannot compose; ValueError for GROUP=null, TypeError for GROUP=[1].
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)

STAGES = "curriculum.stages"


def find_problems(tree: DictConfig) -> list[str]:
    """Everything wrong with a composed configuration: contradictions, unknown keys, numbers that are not finite."""
    if OmegaConf.get_type(tree) is not RunConfig:
        return ["the configuration has no schema; its file must begin with defaults: [run_schema, ...]"]
    try:
        config = to_dataclasses(tree)
        not_finite = non_finite_numbers(config)
        problems = [p for p in config.problems() if not p.startswith(tuple(f"{key} " for key in not_finite))]
        return unknown_keys(tree, RunConfig, setting_keys(tree)) + list(not_finite.values()) + problems
    except OmegaConfBaseException as error:
        return [first_lines(error)]


# Limits that inf switches off. Anywhere else inf is a mistake. nan always is: comparisons with it never fail.
UNLIMITED = (".clip", "guard.loss", "guard.multiplier", "guard.multiplier_loss", "stream.prefetch_gib")


def non_finite_numbers(config: RunConfig) -> dict[str, str]:
    """The problems with numbers that are nan or infinite, by their keys."""
    problems = {}
    for key, value in flatten(dataclasses.asdict(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if number != math.inf or not key.endswith(UNLIMITED):
                problems[key] = f"{key} is {value}; it must be a finite number"
    return problems


def to_dataclasses(tree: DictConfig) -> RunConfig:
    config = OmegaConf.to_object(tree)
    assert isinstance(config, RunConfig)
    config.curriculum.drop_skipped()
    config.prior = OmegaConf.to_container(tree.prior, resolve=True) if tree.prior is not None else None
    return config


@dataclass
class Diagnosis:
    """What is wrong with overrides, and which of them are to blame: `wrong_choices` of groups and `wrong_values`.

    usable: the overrides that compose together
    """

    config_name: str
    problems: list[str] = field(default_factory=list)
    wrong_choices: set[str] = field(default_factory=set)
    wrong_values: set[str] = field(default_factory=set)
    usable: list[str] = field(default_factory=list)

    def compose(self, *overrides: str) -> DictConfig:
        return hydra_compose(self.config_name, [*self.usable, *overrides])

    def try_override(self, text: str) -> Exception | None:
        """Add an override to the usable ones, or return what Hydra raises."""
        try:
            self.compose(text)
        except COMPOSE_ERRORS as error:
            return error
        self.usable.append(text)
        return None


def diagnose(config_name: str, overrides: list[str], also: Collection[str]) -> Diagnosis:
    """Everything wrong with overrides that Hydra cannot compose; Hydra itself stops at the first problem.

    Each override is tried by itself: first those that name the folders searched, then choices of groups, then values.
    """
    diagnosis = Diagnosis(config_name)
    parsed = parse_overrides(overrides, diagnosis)
    options = {text: group_options(config_name, override.key_or_group, diagnosis.usable) for text, override in parsed}
    values = [(text, override) for text, override in parsed if not options[text]]
    wrong_groups = set()
    for text, override in parsed:
        if options[text] and (error := diagnosis.try_override(text)):
            wrong_groups.add(override.key_or_group)
            diagnosis.wrong_choices.add(text)
            diagnosis.problems.append(wrong_choice(override, options[text]) or first_lines(error))
    added_stages = [text for text, override in values if override.is_add() and override.key_or_group == STAGES]
    try:
        tree = diagnosis.compose(*added_stages)
    except COMPOSE_ERRORS as error:
        diagnosis.problems.append(first_lines(error))
        return diagnosis
    # After a wrong choice, the names of the stages or the options of the prior are unknown; after a wrong experiment,
    # both are.
    groups = [group for group in (STAGES, "prior") if wrong_groups & {"experiment", group.partition(".")[0]}]
    undecided = tuple(f"{group}." for group in groups)
    for text, override in values:
        if failure := diagnosis.try_override(text):
            diagnosis.wrong_values.add(text)
            missing = None if override.is_add() else missing_key(tree, override.key_or_group, also)
            if missing is None or not override.key_or_group.startswith(undecided):
                diagnosis.problems.append(missing or wrong_value(override, failure))
    with contextlib.suppress(*COMPOSE_ERRORS):
        hidden = ("",) if "experiment" in wrong_groups else tuple(wrong_groups)
        diagnosis.problems += [p for p in find_problems(diagnosis.compose()) if not p.startswith(hidden)]
    diagnosis.problems = list(dict.fromkeys(diagnosis.problems))
    return diagnosis


def diagnose_sweep(config_name: str, overrides: list[str]) -> list[str]:
    """Everything wrong with overrides of a sweep's own settings that Hydra cannot compose."""
    diagnosis = Diagnosis(config_name)
    parsed = parse_overrides(overrides, diagnosis)
    for text, override in sorted(parsed, key=lambda pair: pair[1].key_or_group != "sweep"):  # its file first
        if error := diagnosis.try_override(text):
            if override.key_or_group == "sweep":
                problem = wrong_choice(override, group_options(config_name, "sweep", [])) or first_lines(error)
            elif override.is_sweep_override():
                problem = f"{text}: this setting of the sweep has one value; a list needs brackets: [VALUE,VALUE]"
            else:
                tree = diagnosis.compose()
                problem = missing_key(tree, override.key_or_group, ()) or wrong_value(override, error)
            diagnosis.problems.append(problem)
    return diagnosis.problems + sweep_problems(diagnosis.compose())


def sweep_problems(tree: DictConfig) -> list[str]:
    """The problems with the values of a composed sweep."""
    root: Any = OmegaConf.to_object(tree)
    return [f"sweep.{problem}" for problem in root.sweep.problems()]


def parse_overrides(overrides: list[str], diagnosis: Diagnosis) -> list[tuple[str, Override]]:
    """The overrides that can be read. Those that name the folders searched become usable at once."""
    parsed = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            diagnosis.wrong_values.add(text)
            diagnosis.problems.append(unreadable(text))
            continue
        if override.key_or_group == "hydra.searchpath":
            diagnosis.usable.append(text)
        else:
            parsed.append((text, override))
    return parsed


def unreadable(override: str) -> str:
    key, equals, _ = override.partition("=")
    if not equals:
        return f"{override!r} is not of the form key=value"
    return f"{override!r} cannot be read; if the value is plain text, put it in quotes: \"{key}='...'\""


def group_options(config_name: str, key: str, search_path: list[str]) -> list[str]:
    """The choices of a group of configuration files; empty if the key is not a group's."""
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
                hint = "" if depth + 1 == len(parts) else f" (+{prefix}.{part}.KEY=VALUE adds a stage)"
                return unknown_key(prefix, part, known) + hint
            known = [*known, *also] if depth == 0 else known
            return unknown_key(prefix, part, known, parts[-1], setting_keys(tree))
        node = node[part]
    return None


def setting_keys(tree: DictConfig) -> list[str]:
    """The dotted keys of all settings."""
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return list(flatten(values))


def wrong_value(override: Override, error: Exception) -> str:
    if override.is_sweep_override():
        key = override.key_or_group
        return f"{override.input_line!r} has several values, which needs -m; plain text needs quotes: \"{key}='...'\""
    return wrong_type(override.key_or_group, error)


def unknown_keys(tree: DictConfig, cls: type, all_keys: Collection[str], prefix: str = "") -> list[str]:
    """The problems with keys that `+key=value` added to a typed node: Hydra allows it, but nothing would read them."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    problems = []
    for key in map(str, tree):
        path = f"{prefix}{key}"
        if key not in fields:
            elsewhere = [name for name in all_keys if not f"{name}.".startswith(f"{path}.")]
            problems.append(unknown_key(prefix.rstrip("."), key, list(fields), None, elsewhere))
        elif path == "curriculum":
            for name, stage in tree.curriculum.stages.items():
                problems += unknown_keys(stage, StageConfig, all_keys, f"{path}.stages.{name}.")
        elif isinstance(tree._get_node(key), DictConfig) and path != "prior":
            node_type = OmegaConf.get_type(tree, key)
            if dataclasses.is_dataclass(node_type):
                problems += unknown_keys(tree[key], node_type, all_keys, f"{path}.")
    return problems
