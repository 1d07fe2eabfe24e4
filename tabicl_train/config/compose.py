"""From a command line to a checked configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import field
from pathlib import Path

from hydra import compose as hydra_compose
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import priors
from tabicl_train.config.folders import CONFIG_DIR, installed_folders
from tabicl_train.config.hydra_internals import file_exists, searching
from tabicl_train.config.mistakes import (
    COMPOSE_ERRORS,
    STAGES,
    Diagnosis,
    diagnose,
    diagnose_sweep,
    find_problems,
    sweep_problems,
    to_dataclasses,
)
from tabicl_train.config.schema import RunConfig
from tabicl_train.config.suggestions import first_lines
from tabicl_train.config.sweep import SweepConfig, SweepRoot, hydra_sweep_problems
from tabicl_train.errors import ConfigError
from tabicl_train.model.families import FAMILIES, FIRST, family_name, settings_of


class InstalledConfigs(SearchPathPlugin):
    """Hydra searches the folders that other packages register, after the folder of this package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, folder in installed_folders().items():
            search_path.append(f"tabicl_train.configs:{name}", f"file://{folder}")


def register() -> None:
    """Make known to Hydra the schema of a run, that of each prior (the prior's own fields), and installed folders.

    Raises ConfigError for a package whose entry points are broken.
    """
    installed_folders()
    Plugins.instance().register(InstalledConfigs)
    try:
        store_schemas(tuple((name, priors.prior_class(name)) for name in priors.prior_names()), tuple(FAMILIES))
    except priors.PriorError as error:
        raise ConfigError([str(error)]) from error


@functools.lru_cache(maxsize=1)  # a quarter of the time of a composition, of which a sweep makes hundreds
def store_schemas(classes: tuple[tuple[str, type], ...], families: tuple[type, ...]) -> None:
    store = ConfigStore.instance()
    run = OmegaConf.structured(RunConfig)
    run.model = MISSING  # its schema is that of a family, which a file of the group `model` may replace by another
    store.store(name="run", node=run)
    store.store(name="run_schema", node={"defaults": ["run", {"model/schema@model": FIRST}, "_self_"]})
    for settings in families:
        store.store(group="model/schema", name=family_name(settings), node=settings)
    store.store(name="sweep_schema", node=SweepRoot)
    store.store(name="sweep_root", node={"defaults": ["sweep_schema", {"sweep": None}, "_self_"]})
    for name, cls in classes:
        schema = dataclasses.make_dataclass(cls.__name__, [("name", str, field(default=name))], bases=(cls,))
        store.store(group="prior/schema", name=name, node=schema, package="prior")


def compose(
    overrides: list[str],
    config_name: str = "train",
    config_path: str | None = None,
    config_dir: str | None = None,
    also: Collection[str] = (),
) -> RunConfig:
    """The checked configuration of a command line; raises ConfigError with every problem.

    config_name, config_path, config_dir: Hydra's options of these names
    also: keys that the command takes beside the settings of a run, to be suggested for a misspelled one
    """
    with config_files(config_name, config_path, config_dir):
        problems = hydra_sweep_problems(overrides)
        problems += [
            f"{text}: a setting of tabicl-sweep, and of tabicl-train -m" for text in filter(is_of_sweep, overrides)
        ]
        if problems:
            raise ConfigError(problems)
        return compose_one(config_name, prepare(overrides), also)


def compose_jobs(config_name: str, points: list[list[str]], seeds: list[int]) -> list[RunConfig]:
    """The checked configurations of the runs of a sweep, for each of the lists of overrides with each of the seeds; to
    be used inside `config_files`.

    Raises ConfigError with their problems, each once. A diagnosis takes a second, so an override is diagnosed in the
    first job that has it: a wrong value is left out of later jobs, and a job with a wrong choice of a group is skipped.
    """
    configs: list[RunConfig] = []
    problems: dict[str, None] = {}
    wrong_values: set[str] = set()
    wrong_choices: set[str] = set()
    for point in map(prepare, points):
        if wrong_choices.intersection(point):
            continue
        try:
            tree = compose_tree(config_name, [text for text in point if text not in wrong_values])
            for seed in seeds:  # setting it takes a tenth of the time of composing again
                OmegaConf.update(tree, "seed", seed)
                configs.append(to_config(tree))
        except InvalidOverrides as error:
            problems |= dict.fromkeys(error.problems)
            wrong_values |= error.diagnosis.wrong_values
            wrong_choices |= error.diagnosis.wrong_choices
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))
    return configs


def compose_sweep(overrides: list[str]) -> SweepConfig:
    """The settings of a sweep from overrides of them alone; to be used inside `config_files`.

    Raises ConfigError with every problem.
    """
    if wrong := [text for text in overrides if re.match(r"[+~]*sweep\.space", text)]:
        advice = "on the command line, KEY=VALUE,VALUE or KEY=interval(LOW,HIGH) says what varies"
        raise ConfigError([f"{text}: {advice}" for text in wrong])
    try:
        tree = hydra_compose("sweep_root", overrides)
    except COMPOSE_ERRORS as error:
        raise ConfigError(diagnose_sweep("sweep_root", overrides) or [first_lines(error)]) from None
    if problems := sweep_problems(tree):
        raise ConfigError(problems)
    root = OmegaConf.to_object(tree)
    assert isinstance(root, SweepRoot)
    return root.sweep


def is_of_sweep(override: str) -> bool:
    """Whether an override is one of the sweep's own settings rather than of its jobs'."""
    return re.match(r"[+~]*sweep[.=@]", override) is not None


def split_values(overrides: list[str]) -> list[tuple[str, Override | None]]:
    """Overrides by their text with what Hydra reads in them, None if it cannot; inside `config_files`."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed: list[tuple[str, Override | None]] = []
    for text in map(quote, overrides):
        try:
            parsed.append((text, parser.parse_overrides([text])[0]))  # which alone knows the files that glob() names
        except HydraException:  # it is reported when its job is composed
            parsed.append((text, None))
    return parsed


@contextlib.contextmanager
def config_files(
    config_name: str = "train", config_path: str | None = None, config_dir: str | None = None
) -> Iterator[None]:
    """Inside the context, Hydra composes from the folders that its options name; raises ConfigError without them."""
    for option, folder in (("--config-path", config_path), ("--config-dir", config_dir)):
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError([f"{option} is {folder!r}; there is no such folder"])
    register()
    with searching(config_path or CONFIG_DIR, config_dir):
        if not file_exists(config_name):
            raise ConfigError([f"--config-name is {config_name!r}; there is no such file in the folders searched"])
        yield


def group_choices() -> dict[str, list[str]]:
    """The groups of configuration files and the choices of each, those of sweeps too; inside `config_files`."""
    loader = GlobalHydra.instance().config_loader()
    groups = [name for name in loader.get_group_options("", ObjectType.GROUP) if name != "hydra"]
    return {group: sorted(loader.get_group_options(group)) for group in groups}


def prepare(overrides: list[str]) -> list[str]:
    """The overrides of a user as Hydra understands them: values quoted where needed, and stages added."""
    return [STAGE_MIX.sub("++", text) for text in add_stages([quote(text) for text in overrides])]


# settings that are text, whatever they look like
NAMES = ("name", "run_dir", "init_weights", "prior.folder", "prior.file", "prior.target")
NUMBER = r"[-+]?[\d._]+(e[-+]?\d+)?"


def quote(override: str) -> str:
    """KEY=VALUE with quotes around a value that Hydra's grammar cannot read, such as run_dir=runs/it's(1).

    Also around a name that looks like a number: run_dir=2024_10 would become the folder 202410.
    Values with commas, brackets at the start or backslashes stay as they are, as they may be meant as more than text.
    """
    key, equals, value = override.partition("=")
    is_name = key in NAMES and re.fullmatch(NUMBER, value)
    if not equals or (is_readable(override) and not is_name):
        return override
    if "," in value or "\\" in value or value.startswith(("[", "{", "'", '"')):
        return override
    quoted = f"{key}='" + value.replace("'", "\\'") + "'"
    return quoted if is_readable(quoted) else override


def is_readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


STAGE_MIX = re.compile(r"(?=curriculum\.stages\.[^.=]+\.mix[.=])")  # with any keys, which Hydra adds after ++ only
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


class InvalidOverrides(ConfigError):
    """Overrides that Hydra cannot compose."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.problems)
        self.diagnosis = diagnosis


def compose_one(config_name: str, overrides: list[str], also: Collection[str] = ()) -> RunConfig:
    return to_config(compose_tree(config_name, overrides, also))


def compose_tree(config_name: str, overrides: list[str], also: Collection[str] = ()) -> DictConfig:
    try:
        return hydra_compose(config_name, overrides)
    except COMPOSE_ERRORS as error:
        diagnosis = diagnose(config_name, overrides, also)
        diagnosis.problems = diagnosis.problems or [first_lines(error)]
        raise InvalidOverrides(diagnosis) from None


def to_config(tree: DictConfig) -> RunConfig:
    """The composed tree as checked dataclasses; raises ConfigError."""
    if problems := find_problems(tree):
        raise ConfigError(problems)
    return to_dataclasses(tree)


def from_values(values: dict) -> RunConfig:
    """The configuration that a checkpoint keeps as plain values; raises ConfigError if it does not fit the schema."""
    try:
        tree = OmegaConf.merge(OmegaConf.structured(RunConfig(model=settings_of(values["model"])())), values)
    except OmegaConfBaseException as error:
        raise ConfigError([first_lines(error)]) from None
    assert isinstance(tree, DictConfig)
    return to_config(tree)
