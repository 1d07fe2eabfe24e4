"""From a command line to a checked configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import field
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

import priors
from tabicl_train.config.mistakes import COMPOSE_ERRORS, STAGES, find_problems, first_lines, sort_out, to_dataclasses
from tabicl_train.config.schema import RunConfig
from tabicl_train.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]

# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())


def register() -> None:
    """Tell Hydra the schemas: the run's, and one a prior, from the prior's own fields."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for name in priors.prior_names():
        cls = priors.prior_class(name)
        schema = dataclasses.make_dataclass(cls.__name__, [("name", str, field(default=name))], bases=(cls,))
        store.store(group="prior/schema", name=name, node=schema, package="prior")


def compose(
    overrides: list[str],
    config_name: str = "train",
    config_path: str | None = None,
    config_dir: str | None = None,
    also: Collection[str] = (),
) -> RunConfig:
    """The checked configuration of a command line; raises ConfigError with every problem found.

    config_name, config_path, config_dir: Hydra's options of these names
    also: keys that are no settings of a run, but that the command takes as well
    """
    with config_files(config_name, config_path, config_dir):
        return compose_one(config_name, add_stages(overrides), also)


def compose_sweep(
    overrides: list[str], config_name: str, config_path: str | None, config_dir: str | None
) -> list[RunConfig]:
    """The checked configurations of all jobs of a sweep; raises ConfigError with their problems, each once."""
    configs: list[RunConfig] = []
    found: dict[str, None] = {}
    with config_files(config_name, config_path, config_dir):
        for combination in combinations(add_stages(overrides)):
            try:
                configs.append(compose_one(config_name, combination))
            except ConfigError as error:
                if found.keys() >= set(error.problems):
                    break  # a typo is in every job; to sort one out takes a second
                found |= dict.fromkeys(error.problems)
    if found:
        raise ConfigError(list(found))
    return configs


@contextlib.contextmanager
def config_files(config_name: str, config_path: str | None, config_dir: str | None) -> Iterator[None]:
    """Within it Hydra composes from the folders that its options name; raises ConfigError where there are none."""
    for option, folder in (("--config-path", config_path), ("--config-dir", config_dir)):
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError([f"{option} is {folder!r}; there is no such folder"])
    register()
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    search_path = create_config_search_path(os.path.abspath(config_path or CONFIG_DIR))
    if config_dir is not None:  # where Hydra's own main puts it
        search_path.prepend("command-line", f"file://{os.path.abspath(config_dir)}", SearchPathQuery(provider="schema"))
    try:
        loader = Hydra.create_main_hydra2("tabicl-train", search_path).config_loader
        if not loader.repository.config_exists(config_name):
            raise ConfigError([f"--config-name is {config_name!r}; there is no such file in the folders searched"])
        yield
    finally:
        GlobalHydra.instance().clear()


NEW_STAGE = re.compile(r"\+{1,2}(curriculum\.stages\.([^.=]+)[.=].*)", re.DOTALL)


def add_stages(overrides: list[str]) -> list[str]:
    """+curriculum.stages.NAME.KEY=VALUE as Hydra understands it: a new stage with its defaults, and values of it.

    Hydra cannot add to a typed dictionary key by key, but it merges an entry into it.
    """
    matches = [NEW_STAGE.fullmatch(text) for text in overrides]
    if not any(matches):
        return overrides
    names = dict.fromkeys(match[2] for match in matches if match)
    first = next(index for index, match in enumerate(matches) if match)
    plain = [match[1] if match else text for match, text in zip(matches, overrides, strict=True)]
    return [*plain[:first], f"+{STAGES}={{{','.join(f'{name}:{{}}' for name in names)}}}", *plain[first:]]


def combinations(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of every job of a sweep. Of an interval, which a sampling sweeper draws from, its start."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for text in overrides:
        choices.append([text])
        with contextlib.suppress(HydraException):  # what cannot be read is told where it is composed
            override = parser.parse_overrides([text])[0]
            if override.is_discrete_sweep():
                choices[-1] = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            elif override.is_interval_sweep():
                choices[-1] = [f"{override.get_key_element()}={override.value().start}"]
    return map(list, itertools.product(*choices))


def compose_one(config_name: str, overrides: list[str], also: Collection[str] = ()) -> RunConfig:
    try:
        tree = hydra_compose(config_name, overrides)
    except COMPOSE_ERRORS as error:
        raise ConfigError(sort_out(config_name, overrides, also) or [first_lines(error)]) from None
    return to_config(tree)


def to_config(tree: DictConfig) -> RunConfig:
    """The composed tree as checked dataclasses; raises ConfigError."""
    if found := find_problems(tree):
        raise ConfigError(found)
    return to_dataclasses(tree)


def from_values(values: dict) -> RunConfig:
    """The configuration that a checkpoint keeps as plain values."""
    return to_config(OmegaConf.merge(OmegaConf.structured(RunConfig), values))
