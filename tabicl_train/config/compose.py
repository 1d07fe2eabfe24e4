"""Composes and checks the configuration of a command line.

1. Each word of the command line is parsed, and is either the choice of a group (experiment=demo) or a value (seed=1).
2. Hydra composes the files that the choices name, over the defaults of all options.
3. The values are set one after the other, as Hydra would set them.
4. The result becomes a RunConfig, and is checked.

Hydra would stop at the first value that is wrong; here all errors of a command line are reported together.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tabicl_train import plugins, register
from tabicl_train.config.finite import not_finite
from tabicl_train.config.options import PATHS, SweepConfig, error_in_one_line, unknown_key, usage, wrong_type
from tabicl_train.config.removed import REMOVED_CHOICES, removal, without_removed
from tabicl_train.config.run_checks import run_problems
from tabicl_train.config.schema import OptimizerConfig, RunConfig, flatten
from tabicl_train.console import info
from tabicl_train.errors import ConfigError, unreadable_text
from tabicl_train.model.config import FIRST, TabICLConfig, settings_of
from tabicl_train.outputs import expand_home
from tabicl_train.run_dir.records import read_yaml
from tabicl_train.weights import architecture, names

__all__ = ["compose"]

STAGES = "curriculum.stages"
LIST_ADVICE = "write a list as [a,b], and a text with special characters in quotes: ['a #1','b']"
PACKAGE = Path(__file__).resolve().parents[1]

CONFIG_DIR = PACKAGE / "configs"  # in a wheel
if not CONFIG_DIR.is_dir():
    CONFIG_DIR = PACKAGE.parent / "configs"  # in a checkout


def compose(overrides: list[str], config_dir: str | None = None, also: Collection[str] = ()) -> RunConfig:
    """Compose and check the configuration of a command line.

    Parameters
    ----------
    overrides : list of str
        GROUP=CHOICE and KEY=VALUE, as they follow `tabicl-train`.
    config_dir : str, optional
        The folder of your own that `--config-dir` names.
    also : collection of str, optional
        Other keys of the command, which may be suggested for a misspelled one.

    Returns
    -------
    RunConfig
        The configuration, without problems.

    Raises
    ------
    ConfigError
        With all problems.
    """
    overrides = plugins.take(overrides)  # in a call from Python; a command has taken them before
    return Composer(config_dir).compose(overrides, also)


def from_values(values: dict[str, Any]) -> RunConfig:
    """Return the configuration that a checkpoint keeps, in plain values; raises ConfigError if it has problems now."""
    plugins.load_installed()  # its prior may be of one
    values = without_removed(Path(values["run_dir"], "config.yaml"), values)
    try:
        name = values["optimizer"]["name"]
        optimizer = register.optimizer[name].settings(name)()
        run = RunConfig(model=settings_of(values["model"])(), optimizer=optimizer)
        tree = OmegaConf.merge(OmegaConf.structured(run), values)
        config, problems = to_config(tree)
    except OmegaConfBaseException as error:
        raise ConfigError([error_in_one_line(error)]) from None
    if problems:
        raise ConfigError(problems)
    return config


@dataclass
class CommandLine:
    """The words of a command line, divided by how they are applied.

    Parameters
    ----------
    choices : list of str
        GROUP=CHOICE, for Hydra.
    values : list
        KEY=VALUE in their order, as text and as Hydra parses them.
    wrong_groups : set of str
        The groups whose choice is wrong.
    problems : list of str
        What is wrong with single words.
    """

    choices: list[str]
    values: list[tuple[str, Override]]
    wrong_groups: set[str]
    problems: list[str]


class Composer:
    """Composes configurations from the folders that are searched, a user's `config_dir` among them.

    Parameters
    ----------
    config_dir : str, optional
        The option --config-dir: a folder of the user's.

    Raises
    ------
    ConfigError
        If the folder is missing, or an installed package with priors or configuration files is broken.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        import priors  # on first use: torch takes 2 s, and the help needs only the folders

        self.config_dir = expand_home(config_dir) if config_dir else None
        self.folders = search_folders(self.config_dir)
        plugins.load_installed()
        try:
            self.priors = tuple((name, priors.prior_class(name)) for name in priors.prior_names())
        except priors.PriorError as error:
            raise ConfigError([str(error)]) from error
        # The choices of a group are its files and, in these groups, what is registered.
        self.choices = group_choices(self.folders)
        registries = {
            "prior": priors.prior_names(),
            "model": register.network,
            "objective": register.objective,
            "optimizer": register.optimizer,
        }
        for group, registered in registries.items():
            files = self.choices.get(group, [])
            self.choices[group] = sorted({*files, *registered})

    def compose(self, overrides: list[str], also: Collection[str] = ()) -> RunConfig:
        """Compose and check the configuration of a run; see the function `compose`."""
        line = self.divide(overrides)
        try:
            # The files that the choices name, over the defaults of all options. The optimizer's follow from its name.
            times = [path.lstat().st_mtime_ns for path in yaml_files(self.folders)]  # lstat: a lock links to nothing
            tree = copy.deepcopy(hydra_tree(tuple(self.folders), tuple(line.choices), self.priors, max(times)))
            add_optimizer_schema(tree, [override for _, override in line.values])
            content: Any = OmegaConf.to_container(tree)
            keys = list(flatten(content))

            # init_weights=mini stands for the architecture of these weights, too, unless a model was chosen. This comes
            # before the values, which can change it.
            if not any(text.startswith("model=") for text in line.choices):
                weights = tree.init_weights
                for _, override in line.values:
                    if override.key_or_group == "init_weights":
                        weights = override.value()
                take_architecture(tree, weights)

            # The values of the command line.
            wrong_values = []
            for text, override in line.values:
                problem = set_value(tree, text, override, keys, also)
                if problem is not None:
                    wrong_values.append(problem)

            config, contradictions = to_config(tree)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError([*line.problems, *self.unreadable(error)]) from None

        # A setting of a group whose choice is wrong may be right for the choice that was meant, and is not reported.
        doubtful = list(line.wrong_groups)
        if "experiment" in line.wrong_groups:
            doubtful += [STAGES, "prior"]  # what experiments choose
        problems = list(line.problems)
        for problem in wrong_values + contradictions:
            if not problem.startswith(tuple(doubtful)):
                problems.append(problem)
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)), config)
        return config

    def divide(self, overrides: list[str]) -> CommandLine:
        """Divide a command line into choices of groups and single values, and find what is wrong with its words."""
        parsed, problems = self.read(overrides)
        line = CommandLine(choices=[], values=[], wrong_groups=set(), problems=problems)
        for text, override in parsed:
            key = override.key_or_group
            value = override.value()
            is_group = key in self.choices
            if is_of_sweep(text):
                line.problems.append(f"{text}: a setting of tabicl-sweep, and of tabicl-train -m")
            elif override.is_sweep_override():
                line.problems.append(f"{text!r} has several values, which needs -m; {in_quotes(key)}")
                if is_group:
                    line.wrong_groups.add(key)
            elif not is_group:
                line.values.append((text, override))
            elif text.startswith("+"):
                line.problems.append(f"{text}: leave out the plus: {text.lstrip('+')}")
            elif key == "experiment" and value is None:  # takes back an experiment before it, such as that of a sweep
                line.choices = [choice for choice in line.choices if not choice.startswith("experiment=")]
            elif value not in self.choices[key]:
                why = f"there is no such choice; there are {', '.join(self.choices[key])}"
                if text in REMOVED_CHOICES:
                    why = f"removed in version 0.3.0; {REMOVED_CHOICES[text]}"
                line.problems.append(f"{text}: {why}")
                line.wrong_groups.add(key)
            elif problem := self.file_problem(key, value):
                line.problems.append(problem)
                line.wrong_groups.add(key)
            else:
                line.choices.append(text)
        return line

    def read(self, overrides: list[str]) -> tuple[list[tuple[str, Override]], list[str]]:
        """Parse the words of a command line.

        Parameters
        ----------
        overrides : list of str
            The words.

        Returns
        -------
        list of tuple
            Those that could be parsed, as text and as Hydra parses them.
        list of str
            A problem for each of the others.
        """
        parsed = []
        problems = []
        for text in overrides:
            key, equals, value = text.partition("=")
            override = parse_override(text)
            # A value that Hydra cannot parse, as in run_dir=runs/it's(1), is quoted and parsed again, unless it has a
            # comma or a backslash, or begins with a bracket or a quote: then it may be more than text.
            if override is None and equals and not re.search(r"[,\\]|^[\[{'\"]", value):
                text = f"{key}='" + value.replace("'", "\\'") + "'"
                override = parse_override(text)
            if override is not None:
                parsed.append((text, override))
            elif equals:
                problems.append(f"{text!r} cannot be read; {in_quotes(key)}")
            else:
                problems.append(f"{text!r} is not of the form KEY=VALUE")
        return parsed, problems

    def unreadable(self, error: Exception) -> list[str]:
        """Describe an error of Hydra, OmegaConf or YAML in the lines of a ConfigError."""
        if isinstance(error, yaml.YAMLError):
            return [" ".join(str(error).split())]
        if isinstance(error, UnicodeDecodeError):  # in a file that another one names
            return undecodable_files(self.folders, error)
        if isinstance(error, RecursionError):
            return ["the settings, or a file that another one names, are nested too deeply"]
        missing = re.search(r"Could not find 'model/schema/(\w+)'", str(error))
        if missing is not None:  # a file begins with the settings of a network that nobody has registered
            unknown = register.network.unknown(missing[1])
            return [f"{unknown}; if it is one of a plug-in, add plugins=[...] to the command"]
        return [error_in_one_line(error)]

    def compose_sweep(self, overrides: list[str]) -> SweepConfig:
        """Compose the settings of a sweep.

        Parameters
        ----------
        overrides : list of str
            Those of the command line that concern the sweep itself: sweep=NAME and sweep.KEY=VALUE.

        Returns
        -------
        SweepConfig
            The settings, without problems.

        Raises
        ------
        ConfigError
            With all problems.
        """
        parsed, problems = self.read(overrides)
        tree = OmegaConf.create({"sweep": OmegaConf.structured(SweepConfig)})
        # The files first: single settings win over them, in whatever order they were typed.
        for text, override in parsed:
            if override.key_or_group == "sweep":
                problems += self.merge_sweep(tree, text, override.value())
        for text, override in parsed:
            key = override.key_or_group
            if key == "sweep":
                continue
            if key.startswith("sweep.space"):
                form = "KEY=VALUE,VALUE or KEY=interval(LOW,HIGH)"
                problems.append(f"{text}: on the command line, write {form} for a setting that varies")
            elif override.is_sweep_override():
                hint = "this setting of the sweep has one value; a list needs brackets: [VALUE,VALUE]"
                problems.append(f"{text}: {hint}")
            else:
                problem = set_value(tree, text, override)
                if problem is not None:
                    problems.append(problem)
        sweep = OmegaConf.to_object(tree.sweep)
        assert isinstance(sweep, SweepConfig)
        problems += not_finite(sweep, "sweep.") or [f"sweep.{problem}" for problem in sweep.problems()]
        if problems:
            raise ConfigError(problems)
        return sweep

    def merge_sweep(self, tree: DictConfig, text: str, name: Any) -> list[str]:
        """Merge the file of a sweep into the tree; lists the problem with it."""
        names = self.choices["sweep"]
        if name not in names:
            return [f"{text}: there is no such choice; there are {', '.join(names)}"]
        problem = self.file_problem("sweep", name)
        if problem is not None:
            return [problem]
        file = self.file("sweep", name)
        assert file is not None  # it is among the choices
        try:
            content: Any = OmegaConf.load(file)
            problems = [f"{file}: {line}" for key in content if (line := removal(f"sweep.{key}"))]
            if problems:
                return problems
            tree.sweep = OmegaConf.merge(tree.sweep, content)
        except OmegaConfBaseException as error:
            return [f"{text}: {error_in_one_line(error)}"]
        except (OSError, ValueError, yaml.YAMLError) as error:  # OSError: also for a file that holds plain text
            return [f"{text}: {unreadable_text(file, error)}"]
        return []

    def file(self, group: str, choice: Any) -> Path | None:
        """Return the file of a choice; of several with the same name the first one counts, as for Hydra.

        None if there is none: what a plug-in registers needs no file.
        """
        for folder in self.folders:
            path = folder / group / f"{choice}.yaml"
            if path.is_file():
                return path
        return None

    def file_problem(self, group: str, choice: Any) -> str | None:
        """Return why a file in the folder of --config-dir cannot be used: it is empty or not in UTF-8; or None."""
        path = self.file(group, choice)
        if path is None or self.config_dir is None:
            return None
        # Some of ours, and perhaps of an installed package, hold nothing but a comment about the defaults.
        if not path.is_relative_to(Path(self.config_dir).absolute()) or path.is_relative_to(CONFIG_DIR):
            return None
        try:
            content = read_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader)
        except (ValueError, yaml.constructor.ConstructorError) as error:  # the latter: it holds itself
            return unreadable_text(path, error)
        except yaml.YAMLError:  # Hydra's message names the file and the line
            return None
        if not isinstance(content, dict) or not content:
            return f"{path} has no settings; write lines of the form KEY: VALUE into it, or leave out {group}={choice}"
        return None


@functools.lru_cache(maxsize=8)  # it takes 0.15 s, and a sweep makes hundreds that differ in values only
def hydra_tree(
    folders: tuple[Path, ...], choices: tuple[str, ...], priors: tuple[tuple[str, type], ...], changed_at: int
) -> DictConfig:
    """Return the tree that Hydra composes of files; it is cached and must not be changed.

    Parameters
    ----------
    folders : tuple of Path
        The folders to search.
    choices : tuple of str
        GROUP=CHOICE.
    priors : tuple of (str, type)
        The classes of all priors, by name.
    changed_at : int
        When the newest file was changed. It is not read here, but makes the cache miss when a file differs.
    """
    # Hydra takes schemas, and choices without a file, from a store of the process, which is filled first.
    networks = tuple((name, family.settings) for name, family in register.network.items())
    store_schemas(priors, networks)
    store_objectives()
    choose_without_files(folders, priors, networks)

    searched = []
    for folder in folders[1:]:
        escaped = str(folder).replace("'", "\\'")
        searched.append(f"'file://{escaped}'")
    with initialize_config_dir(str(folders[0]), job_name="tabicl-train", version_base="1.3"):
        tree = hydra_compose("train", [*choices, f"hydra.searchpath=[{','.join(searched)}]"])
    OmegaConf.set_struct(tree, None)  # set by Hydra; keys could only be added to a dictionary with +
    return tree


@functools.lru_cache(maxsize=1)  # that of the store: the same schemas are stored already
def store_schemas(priors: tuple[tuple[str, type], ...], networks: tuple[tuple[str, type], ...]) -> None:
    """Store for Hydra the schemas of a run, of each prior, and of the settings of each network."""
    store = ConfigStore.instance()
    run = OmegaConf.structured(RunConfig)
    run.model = MISSING
    run.optimizer = MISSING  # its schema follows from its name, see `add_optimizer_schema`
    store.store(name="run", node=run)
    store.store(name="run_schema", node={"defaults": ["run", {"model/schema@model": FIRST}, "_self_"]})
    for name, settings in networks:
        store.store(group="model/schema", name=name, node=settings)
    for name, cls in priors:
        fields: list[Any] = [("name", str, field(default=name))]
        if name == "mix_scm":  # Hydra would add the components of a file to the default ones
            fields.append(("components", dict[str, dict[str, Any]], field(default_factory=dict)))
        schema = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,))
        store.store(group="prior/schema", name=name, node=schema, package="prior")


def store_objectives() -> None:
    """Store for Hydra the choices of `objective`, with the defaults of their options."""
    store = ConfigStore.instance()
    for name, cls in register.objective.items():
        node: Any = {"name": name}
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            fields = [("name", str, field(default=name))]
            node = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,))
        store.store(group="objective", name=name, node=node, package="objective")


def choose_without_files(
    folders: tuple[Path, ...], priors: tuple[tuple[str, type], ...], networks: tuple[tuple[str, type], ...]
) -> None:
    """Let priors, networks and optimizers without a file be chosen by name, with the defaults of their options."""
    nodes: dict[tuple[str, str], dict] = {}  # by group and name: what the file would hold
    for name, _ in priors:
        nodes["prior", name] = {"defaults": [f"schema/{name}"]}
    for name, _ in networks:
        nodes["model", name] = {"defaults": [{"override /model/schema@_global_.model": name}]}
    for name in register.optimizer:
        nodes["optimizer", name] = {"name": name}

    store = ConfigStore.instance()
    for (group, name), node in nodes.items():
        file = f"{name}.yaml"
        has_file = any((folder / group / file).is_file() for folder in folders)
        if not has_file:
            store.store(group=group, name=name, node=node)
        elif file in store.repo.get(group, {}):  # from before there was a file, in the same process
            del store.repo[group][file]


def add_optimizer_schema(tree: DictConfig, overrides: Collection[Override]) -> None:
    """Check what the files say of the optimizer against its options, and fill in their defaults.

    Hydra cannot do it: which options there are follows from the name, which the command line may change.
    """
    content: Any = {} if OmegaConf.is_missing(tree, "optimizer") else tree.optimizer
    name = content.get("name")
    for override in overrides:
        if override.key_or_group == "optimizer.name":
            name = str(override.value())
    settings: type = OptimizerConfig  # whose `problems` reports an unknown name
    if name in register.optimizer:
        settings = register.optimizer[name].settings(name)
    schema = OmegaConf.create({"optimizer": OmegaConf.structured(settings)})
    tree.optimizer = OmegaConf.merge(schema, {"optimizer": content}).optimizer


def is_of_sweep(override: str) -> bool:
    """Whether an override is a setting of the sweep itself rather than of its runs."""
    return re.match(r"[+~]*sweep[.=@]", override) is not None


def parse_override(text: str) -> Override | None:
    """Parse a word as Hydra does; None if it cannot be parsed, or asks for choices by a pattern (model=glob(*))."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return None
    if isinstance(override.value(), Glob):
        return None
    return override


def hydra_text(text: str) -> str:
    """Quote a text for Hydra's grammar where needed: 'lr=0.1,width=2' would be several values."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)  # backslashes are escaped only before quotes and at the end
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def in_quotes(key: str) -> str:
    """Return the advice for a text that Hydra takes for something else."""
    return f"plain text needs quotes: \"{key}='...'\""


def set_value(
    tree: DictConfig, text: str, override: Override, all_keys: Collection[str] = (), also: Collection[str] = ()
) -> str | None:
    """Set a value in the configuration, or remove one.

    Keys of dictionaries can be added with a plus (in a `mix` also without) and removed with a tilde.

    Parameters
    ----------
    tree : DictConfig
        The configuration, which is changed.
    text : str
        The word of the command line.
    override : Override
        The same as Hydra parses it.
    all_keys : collection of str
        Those of all settings, which may be suggested for a misspelled one.
    also : collection of str
        Other keys of the command, likewise.

    Returns
    -------
    str or None
        The problem, if there is one; the value is not set then.
    """
    key = override.key_or_group
    path = key.split(".")
    # From the top down to the value. Each name on the path must be there already, or may be added to a dictionary.
    node: Any = tree
    for depth, name in enumerate(path):
        section = ".".join(path[:depth])
        is_last = depth + 1 == len(path)
        siblings: list[Any] = []
        is_dictionary = False
        if isinstance(node, DictConfig):
            siblings = list(node)
            is_dictionary = OmegaConf.get_type(node) is dict  # otherwise it is a dataclass
        if name not in siblings:
            can_add = is_dictionary and (text.startswith("+") or section.endswith(".mix"))
            if not can_add:
                removed = removal(".".join(path[: depth + 1]))
                if removed is not None:
                    return removed
                if depth == 0:
                    siblings += also
                if is_dictionary:  # whose keys resemble no setting elsewhere
                    problem = unknown_key(section, name, siblings)
                else:
                    problem = unknown_key(section, name, siblings, path[-1], all_keys)
                if section == STAGES and not is_last:
                    problem += f" (+{STAGES}.{name}.KEY=VALUE adds a stage)"
                return problem
            if section != STAGES:
                break  # OmegaConf adds what lies below with it
            OmegaConf.update(tree, STAGES, {name: {}})  # a stage, with the defaults of its settings
        if override.is_delete() and is_last:
            if not is_dictionary:
                return f"{text}: only a key of a dictionary can be removed"
            del node[name]
            return None
        node = None if OmegaConf.is_missing(node, name) else node[name]

    value = override.value()
    try:
        OmegaConf.update(tree, key, value, merge=node is not None and not replaces(text, key, value))
        taken = OmegaConf.select(tree, key)
        if isinstance(taken, str):
            OmegaConf.update(tree, key, typed_text(text, value))
        elif isinstance(taken, ListConfig) and isinstance(value, list):
            # Elements that are text may have been numbers or truth values for Hydra: of true it has made True.
            for element, parsed in zip(taken, value, strict=True):
                if isinstance(element, str) and element != parsed and element not in re.split(r"[\[\],\s]+", text):
                    return f"{text}: the element {element} was typed in another form; put it in quotes: ['...']"
    except OmegaConfBaseException as error:
        problem = wrong_type(key, error)
        # A text that looks like a list or a dictionary.
        return f"{problem}; {in_quotes(key)}" if "to string" in problem else problem
    return None


def typed_text(text: str, value: Any) -> str:
    """Return the text of a word KEY=TEXT as it was typed, or without its quotes; value: as Hydra parses it.

    Hydra makes of the folder 2024_10 the number 202410, and leaves out spaces at both ends and backslashes.
    """
    typed = text.partition("=")[2]
    return value if typed.lstrip().startswith(("'", '"')) else typed


def replaces(text: str, key: str, value: Any) -> bool:
    """Whether a value takes the place of what the configuration holds; otherwise it is merged into it."""
    if not isinstance(value, dict):
        return False
    # A mixture, of the run or of a stage, consists of what is named. With a plus, components are added to it.
    is_mixture = key == "prior.components" or (key.startswith(STAGES) and key.endswith(".mix"))
    return is_mixture and not text.startswith("+")


def take_architecture(tree: DictConfig, name: Any) -> None:
    """Set the model to the architecture of the package's weights of this name, if there are such for its task."""
    if OmegaConf.get_type(tree.model) is not TabICLConfig:
        return
    is_regression = tree.model.max_classes == 0
    weights_by_name = names(is_regression)
    if str(name) not in weights_by_name:  # None, or a file
        return
    settings = architecture(weights_by_name[str(name)])
    if (settings["max_classes"] == 0) == is_regression:
        tree.model.update(settings)


def to_config(tree: Any) -> tuple[RunConfig, list[str]]:
    """Return a composed tree as dataclasses, and its problems."""
    config: Any = OmegaConf.to_object(tree)
    config.curriculum.drop_skipped()
    config.curriculum.apply_scales()
    # Of a prior and an objective the configuration holds plain values, from which `config/build.py` makes objects.
    if tree.prior is not None:
        config.prior = OmegaConf.to_container(tree.prior, resolve=True)
    if tree.objective is not None:
        config.objective = OmegaConf.to_container(tree.objective, resolve=True)
    return config, expand_paths(vars(config)) or run_problems(config)


def expand_paths(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Put home folders in place of ~ in all options of dictionaries that are paths; returns the problems with them."""
    problems = []
    for key, value in values.items():
        if isinstance(value, dict):
            problems += expand_paths(value, f"{prefix}{key}.")
        if key not in PATHS or not isinstance(value, str | list):
            continue
        try:
            values[key] = expand_home(value) if isinstance(value, str) else [expand_home(path) for path in value]
        except ConfigError as error:
            problems.append(f"{prefix}{key} is {error}")
    return problems


def parse_options(options: type, arguments: list[str]) -> Any:
    """Parse the command line of a command other than tabicl-train.

    Parameters
    ----------
    options : type
        The dataclass of the command's options.
    arguments : list of str
        Words of the form KEY=VALUE.

    Returns
    -------
    object
        The options, without problems.

    Raises
    ------
    ConfigError
        With all problems.
    """
    schema = OmegaConf.structured(options)
    types = get_type_hints(options)
    keys = list(schema)
    problems = []
    given = set()
    texts: dict[str, Any] = {}  # kept from OmegaConf, for which ${x} is a reference and ??? a missing value
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            problems.append(f"{argument!r} is not of the form KEY=VALUE")
            continue
        if key not in keys:
            problems.append(unknown_key("", key, keys))
            continue
        given.add(key)
        try:
            value = read_value(text, types[key])
        except ValueError as error:
            problems.append(f"{key} is {repr(text) if text else 'empty'}; {error}")
            continue
        texts.pop(key, None)  # of an argument before
        if is_text(value, types[key]):
            texts[key] = value
            continue
        try:
            schema[key] = value
        except OmegaConfBaseException as error:
            if value is None:
                problems.append(f"{key} is {text}; it needs a value")
            else:
                problems.append(wrong_type(key, error))
    for key in keys:
        if OmegaConf.is_missing(schema, key) and key not in given:
            problems.append(f"{key} is missing")
    if problems:
        mistake = ConfigError(problems)
        mistake.add_note(f"usage: {usage(options)}")
        raise mistake

    for key, value in texts.items():
        schema[key] = type(value)()  # until it is replaced
    parsed: Any = dataclasses.replace(OmegaConf.to_object(schema), **texts)  # type: ignore[type-var]
    problems = expand_paths(vars(parsed)) + not_finite(parsed)
    if not problems and hasattr(parsed, "problems"):
        problems = parsed.problems()
    if problems:
        raise ConfigError(problems)
    return parsed


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of an option: str and None of `str | None`."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def is_text(value: Any, kind: Any) -> bool:
    """Whether a value is text, or a list of texts, and an option of this type takes it."""
    if isinstance(value, list):
        return all(isinstance(element, str) for element in value) and bool({list[str], Any} & {*alternatives(kind)})
    return isinstance(value, str) and bool({str, Any} & {*alternatives(kind)})


def read_value(text: str, kind: Any) -> Any:
    """Read a value for an option of a type: text as it was typed, and lists and dictionaries, which are in YAML.

    Numbers stay text, which OmegaConf converts. Raises ValueError for a value that has no meaning for the option.
    """
    kinds = {get_origin(each) or each for each in alternatives(kind)}
    if not text:
        raise ValueError("it needs a value")
    if text == "null" and (str not in kinds or NoneType in kinds):
        return None
    is_list = text.startswith("[") and bool(kinds & {list, Any})
    is_dictionary = text.startswith("{") and dict in kinds
    value = read_whole(text) if is_list or is_dictionary else text
    if is_list and list[str] in alternatives(kind) and not is_text(value, kind):  # [?] holds a dictionary for YAML
        raise ValueError(LIST_ADVICE)
    if not is_text(value, kind) and re.search(r"\$\{|\?\?\?", text):  # OmegaConf would look up ${x}
        raise ValueError("it must not have ${ or ???")
    return value


class TextLoader(yaml.BaseLoader):
    """Reads all values of YAML as text, and refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError("a key is there twice")
        return mapping


def read_whole(text: str) -> Any:
    """Read a list or a dictionary; raises ValueError if YAML would leave out or change any of the text.

    It leaves out comments, tags (!x) and the names of anchors (&x), and joins lines.
    """
    is_whole = True
    end = 0
    try:
        value = read_yaml(text, TextLoader)
        for token in yaml.scan(text):
            source = text[token.start_mark.index : token.end_mark.index]
            is_whole &= not text[end : token.start_mark.index].strip()
            is_whole &= not isinstance(token, yaml.TagToken | yaml.AnchorToken | yaml.AliasToken)
            if isinstance(token, yaml.ScalarToken):
                is_whole &= token.value == source if token.plain else len(source.splitlines()) == 1
            end = token.end_mark.index
    except (yaml.YAMLError, ValueError):
        is_whole = False
    if not is_whole:
        raise ValueError(LIST_ADVICE)
    return value


def search_folders(config_dir: str | None) -> list[Path]:
    """Return the folders to search, in order: the project's, that of --config-dir, those of plug-ins and packages."""
    folders = [CONFIG_DIR]
    if config_dir:
        if not Path(config_dir).is_dir():
            raise ConfigError([f"--config-dir is {config_dir!r}; there is no such folder"])
        folders.append(Path(config_dir).absolute())
    folders += plugins.config_folders()
    for entry in entry_points(group="tabicl_train.configs"):
        try:
            folders.append(Path(next(iter(entry.load().__path__))))
        except (Exception, SystemExit) as error:  # the package is imported, which may fail in any way
            reason = f"is no folder of configuration files ({type(error).__name__}: {error})"
            owner = entry.dist.name if entry.dist else entry.name
            raise ConfigError([f"package {owner}: its entry point {entry.name} = {entry.value!r} {reason}"]) from None
    for folder in folders[1:]:
        warn_of_ignored_files(folder)
    return list(dict.fromkeys(folders))


@functools.cache  # once in a process, which may compose many configurations
def warn_of_ignored_files(folder: Path) -> None:
    """Print a warning if a folder has other files of the names of ours, which are found before them."""
    ignored = []
    for path in yaml_files([folder]):
        ours = CONFIG_DIR / path.relative_to(folder)
        if ours.is_file() and path.is_file() and ours.read_bytes() != path.read_bytes():
            ignored.append(str(path.relative_to(folder)))
    if ignored:
        names = ", ".join(sorted(ignored))
        info(f"warning   files in {folder} with names of ours are ignored, rename them to use them: {names}")


def yaml_files(folders: list[Path], pattern: str = "**/*.yaml") -> list[Path]:
    """Return the configuration files in some folders; with the pattern `*/*.yaml` those of groups."""
    files: list[Path] = []
    for folder in folders:
        files += folder.glob(pattern)
    return files


def undecodable_files(folders: list[Path], error: UnicodeDecodeError) -> list[str]:
    """List the configuration files that are not UTF-8 text, since Hydra's error does not name the one that it read."""
    problems = []
    for path in sorted(yaml_files(folders)):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as wrong:
            problems.append(unreadable_text(path, wrong))
    return problems or [str(error)]


def group_choices(folders: list[Path]) -> dict[str, list[str]]:
    """Return the groups of configuration files in some folders, and the choices of each, both in alphabetical order."""
    choices: dict[str, set[str]] = {}
    for path in yaml_files(folders, "*/*.yaml"):
        choices.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(choices[group]) for group in sorted(choices)}
