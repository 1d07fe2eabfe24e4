"""Composes and checks the configuration of a command line.

1. Each word of the command line is parsed. It is either the choice of a group (experiment=demo) or a value (seed=1).
2. Hydra composes the files that the choices name into plain values.
3. The values of the command line are put in, one after the other.
4. OmegaConf replaces ${KEY} by the value of another option.
5. `priors.options` turns them into a RunConfig, and everything that is wrong is reported at once.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from priors.options import (
    NEEDS_VALUE,
    REQUIRED,
    Typed,
    check,
    default_of,
    joined,
    key_of,
    merged,
    option,
    options_of,
    plain,
    read,
    unknown,
)
from tabicl_train.config.checks import check_values
from tabicl_train.config.options import PATHS, SweepConfig, usage
from tabicl_train.config.schema import RunConfig, flatten
from tabicl_train.console import first_line, info
from tabicl_train.doors import plugins, register
from tabicl_train.errors import ConfigError, unreadable_text
from tabicl_train.model.config import FIRST
from tabicl_train.outputs import expand_home
from tabicl_train.run.records import read_yaml
from tabicl_train.run.removed import REMOVED_CHOICES, removal, without_removed
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
        GROUP=CHOICE and KEY=VALUE, as on the command line of `tabicl-train`.
    config_dir : str, optional
        A folder of your own, as for `--config-dir`.
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
    overrides = plugins.take(overrides)  # in a call from Python; a command has done this before
    return Composer(config_dir).compose(overrides, also)


def from_values(values: dict[str, Any]) -> RunConfig:
    """Build the configuration from the plain values in a checkpoint; raises ConfigError if it now has problems."""
    plugins.load_installed()  # its prior may be a plug-in's
    config, problems = to_config(without_removed(Path(values["run_dir"], "config.yaml"), values))
    if problems:
        raise ConfigError(problems)
    return config


@dataclass
class CommandLine:
    """The words of a command line, by how they are applied.

    Parameters
    ----------
    choices : list of str
        GROUP=CHOICE, for Hydra.
    values : list of (str, Override)
        KEY=VALUE in order, as text and as Hydra parses them.
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
    """Composes configurations from the files in the folders that are searched.

    Parameters
    ----------
    config_dir : str, optional
        A folder of the user, from the option --config-dir.

    Raises
    ------
    ConfigError
        If the folder is missing.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        self.config_dir = expand_home(config_dir) if config_dir else None
        self.folders = search_folders(self.config_dir)
        # The choices of a group are its files and, for these groups, the registered names.
        self.choices = group_choices(self.folders)
        self.registered = (
            ("prior", tuple(register.prior)),
            ("model", tuple(register.network)),
            ("objective", tuple(register.objective)),
            ("optimizer", tuple(register.optimizer)),
        )
        for group, names_of_group in self.registered:
            self.choices[group] = sorted({*self.choices.get(group, []), *names_of_group})

    def compose(self, overrides: list[str], also: Collection[str] = ()) -> RunConfig:
        """Compose and check the configuration of a run; see the function `compose`."""
        # Hydra's part: files and choices.
        line = self.divide(overrides)
        try:
            times = [path.lstat().st_mtime_ns for path in yaml_files(self.folders)]  # an editor's lock is a broken link
            file_values, choices = hydra_values(tuple(self.folders), tuple(line.choices), self.registered, max(times))
            values = copy.deepcopy(file_values)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError([*line.problems, *self.unreadable(error)]) from None

        # init_weights=mini also chooses the architecture of these weights, unless a model was chosen. This comes before
        # the values, which can change it.
        if not any(text.startswith("model=") for text in line.choices):
            weights = values.get("init_weights")
            for _, override in line.values:
                if override.key_or_group == "init_weights":
                    weights = override.value()
            take_architecture(values, weights)

        # Put in the values of the command line: names first, since a prior's or an optimizer's options depend on them.
        keys = [*also, *flatten(plain(read(RunConfig, without_references(values))[0]))]
        value_problems = []
        for text, override in sorted(line.values, key=lambda value: not value[1].key_or_group.endswith(".name")):
            problem = put(values, RunConfig, text, override)
            if problem is not None:
                value_problems.append(problem)

        # Build and check the configuration.
        config, wrong = to_config(values, keys)
        texts = {override.key_or_group: text for text, override in line.values}
        value_problems += [self.with_source(problem, texts, choices) for problem in wrong]

        # Do not report settings of a group whose choice is wrong: they may be right for the choice that was meant.
        doubtful = list(line.wrong_groups)
        if "experiment" in line.wrong_groups:
            doubtful += [STAGES, "prior"]  # what experiments choose
        problems = list(line.problems)
        for problem in value_problems:
            if not problem.startswith(tuple(doubtful)):
                problems.append(problem)
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)), config)
        return config

    def with_source(self, problem: str, texts: Mapping[str, str], choices: Mapping[str, Any]) -> str:
        """Add to a problem the file that sets the value, or advice for a word of the command line.

        Parameters
        ----------
        problem : str
            The problem.
        texts : mapping
            The words of the command line by their keys.
        choices : mapping
            The choice of each group.

        Returns
        -------
        str
            The problem, with its source.
        """
        key = key_of(problem)
        if key in texts:
            return f"{problem}; {in_quotes(key)}" if re.search(r"is [\[{].* of type str$", problem) else problem
        if not re.search(r": no such setting|: it must be|: it needs| of type ", problem):
            return problem

        # Search the user's files that were chosen, and those that they name, for the key.
        waiting = list(choices.items())
        for group, choice in waiting:  # grows in the loop
            file = self.file(group, choice)
            if file is None or file.is_relative_to(CONFIG_DIR):
                continue
            text = file.read_text(encoding="utf-8")
            content = yaml.safe_load(text) or {}
            content_of_run = content if re.search(r"^# *@package +_global_", text, re.MULTILINE) else {group: content}
            if any(f"{name}.".startswith(f"{key}.") for name in flatten(content_of_run)):
                return f"{group}/{choice}.yaml: {problem}"
            for default in content.get("defaults", []):
                if isinstance(default, str) and (group, default) not in waiting:
                    waiting.append((group, default))
        return problem

    def divide(self, overrides: list[str]) -> CommandLine:
        """Divide a command line into choices of groups and single values, and find what is wrong with its words."""
        parsed, problems = self.read(overrides)
        line = CommandLine(choices=[], values=[], wrong_groups=set(), problems=problems)
        for text, override in parsed:
            key = override.key_or_group
            value = override.value()
            is_group = key in self.choices
            # A word for a sweep only.
            if is_of_sweep(text):
                line.problems.append(f"{text}: a setting of tabicl-sweep, and of tabicl-train -m")
            elif override.is_sweep_override():
                line.problems.append(f"{text!r} has several values, which needs -m; {in_quotes(key)}")
                if is_group:
                    line.wrong_groups.add(key)
            # A value.
            elif not is_group:
                line.values.append((text, override))
            # A choice that undoes another, or cannot be used.
            elif text.startswith("+"):
                line.problems.append(f"{text}: leave out the plus: {text.lstrip('+')}")
            elif key == "experiment" and value is None:  # undoes an earlier choice, such as that of a sweep
                line.choices = [choice for choice in line.choices if not choice.startswith("experiment=")]
            elif value not in self.choices[key]:
                why = f"there is no such choice; there are {', '.join(self.choices[key])}"
                why = "; ".join([why, *plugins.broken()])
                if text in REMOVED_CHOICES:
                    why = f"removed in version 0.3.0; {REMOVED_CHOICES[text]}"
                line.problems.append(f"{text}: {why}")
                line.wrong_groups.add(key)
            elif problem := self.file_problem(key, value):
                line.problems.append(problem)
                line.wrong_groups.add(key)
            # A choice.
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
        list of (str, Override)
            The words that could be parsed, as text and as Hydra parses them.
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
        """Describe an error of Hydra, OmegaConf or YAML in lines for a ConfigError."""
        if isinstance(error, UnicodeDecodeError):  # in a file that another file names
            return undecodable_files(self.folders, error)
        if isinstance(error, RecursionError):
            return ["the settings, or a file that another one names, are nested too deeply"]
        missing = re.search(r"Could not find 'model/schema/(\w+)'", str(error))
        if missing is not None:  # a file begins with the settings of a network that is not registered
            line = register.network.unknown(missing[1])
            return [f"{line}; if a plug-in registers it, add plugins=[...] to the command"]
        return [" ".join(str(error).split())]

    def compose_sweep(self, overrides: list[str]) -> SweepConfig:
        """Compose the settings of a sweep.

        Parameters
        ----------
        overrides : list of str
            The words of the command line about the sweep itself: sweep=NAME and sweep.KEY=VALUE.

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
        values: dict[str, Any] = {"sweep": {}}
        # Files first, since single settings win over them in whatever order they were typed.
        for text, override in parsed:
            if override.key_or_group == "sweep":
                problems += self.merge_sweep(values, text, override.value())
        # Single settings, each with one value.
        for text, override in parsed:
            key = override.key_or_group
            if key == "sweep":
                continue
            if key.startswith("sweep.space"):
                form = "KEY=VALUE,VALUE or KEY=interval(LOW,HIGH)"
                problems.append(f"{text}: on the command line, write {form} for a setting that varies")
            elif override.is_sweep_override():
                hint = "this setting of the sweep takes one value; a list needs brackets: [VALUE,VALUE]"
                problems.append(f"{text}: {hint}")
            else:
                problem = put(values, SweepLine, text, override)
                if problem is not None:
                    problems.append(problem)
        # Build and check the settings.
        line, wrong = read_resolved(SweepLine, values)
        problems += merged(wrong, check(line))
        if problems:
            raise ConfigError(problems)
        return line.sweep

    def merge_sweep(self, values: dict[str, Any], text: str, name: Any) -> list[str]:
        """Merge the file of a sweep into the values; returns its problems."""
        names = self.choices["sweep"]
        if name not in names:
            return [f"{text}: there is no such choice; there are {', '.join(names)}"]
        problem = self.file_problem("sweep", name)
        if problem is not None:
            return [problem]
        file = self.file("sweep", name)
        assert file is not None  # it is among the choices
        try:
            content = {"sweep": OmegaConf.to_container(OmegaConf.load(file))}
        except (OSError, ValueError, yaml.YAMLError) as error:  # OmegaConf raises OSError for a file of plain text
            return [f"{text}: {unreadable_text(file, error)}"]
        problems = advise_on_removed(read(SweepLine, without_references(content))[1])
        if not problems:
            merge(values, content)
        return [f"{text}: {problem}" for problem in problems]

    def file(self, group: str, choice: Any) -> Path | None:
        """Return the file of a choice: the first one in the folders that are searched, as Hydra does.

        The result is None if there is no file, which a registered name does not need.
        """
        for folder in self.folders:
            path = folder / group / f"{choice}.yaml"
            if path.is_file():
                return path
        return None

    def file_problem(self, group: str, choice: Any) -> str | None:
        """Return why a file in the folder of --config-dir cannot be used (it is empty or not in UTF-8), or None."""
        path = self.file(group, choice)
        if path is None or self.config_dir is None:
            return None
        # Built-in files, and those of installed packages, may hold nothing but a comment about the defaults.
        if not path.is_relative_to(Path(self.config_dir).absolute()) or path.is_relative_to(CONFIG_DIR):
            return None
        try:
            content = read_yaml(path.read_text(encoding="utf-8"), yaml.BaseLoader)
        except (ValueError, yaml.constructor.ConstructorError) as error:  # ConstructorError: an alias holds itself
            return unreadable_text(path, error)
        except yaml.YAMLError:  # Hydra reports it with file and line
            return None
        if not isinstance(content, dict) or not content:
            return f"{path} has no settings; write lines of the form KEY: VALUE into it, or leave out {group}={choice}"
        return None


@dataclass
class SweepLine:
    """The settings of a sweep, as a command line names them."""

    sweep: SweepConfig = option(SweepConfig)


@functools.lru_cache(maxsize=8)  # a call takes 0.15 s, and a sweep makes hundreds that differ in values only
def hydra_values(
    folders: tuple[Path, ...],
    choices: tuple[str, ...],
    registered: tuple[tuple[str, tuple[str, ...]], ...],
    changed_at: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compose the values in configuration files with Hydra.

    Parameters
    ----------
    folders : tuple of Path
        The folders to search.
    choices : tuple of str
        GROUP=CHOICE.
    registered : tuple
        For each group that has a registry, the group and the registered names.
    changed_at : int
        The time in ns when the newest file was changed. It is not read, but makes the cache miss if a file has changed.

    Returns
    -------
    dict
        The values, which must not be changed, since they are cached.
    dict
        The choice of each group; likewise.
    """
    # Registered names can be chosen without a file, which would hold nothing but the name. A file refers to one by
    # `schema/NAME`.
    store = ConfigStore.instance()  # of the process
    for group, names_of_group in registered:
        store.repo.pop(group, None)  # a file may have been added since
        for name in names_of_group:
            node: dict[str, Any] = {"name": name}
            if group == "model":
                node = {} if name == FIRST else {"family": name}
            if not any((folder / group / f"{name}.yaml").is_file() for folder in folders):
                store.store(group=group, name=name, node=node)
            if name == "mix_scm":  # a file has exactly the components that it lists
                node = node | {"components": {}}
            store.store(group=f"{group}/schema", name=name, node=node, package=group)

    # Compose, with the other folders as Hydra's search path.
    searched = []
    for folder in folders[1:]:
        escaped = str(folder).replace("'", "\\'")
        searched.append(f"'file://{escaped}'")
    with initialize_config_dir(str(folders[0]), job_name="tabicl-train", version_base="1.3"):
        words = [*choices, f"hydra.searchpath=[{','.join(searched)}]"]
        tree = hydra_compose("train", words, return_hydra_config=True)
    chosen = dict(tree.hydra.runtime.choices)
    OmegaConf.set_struct(tree, False)
    del tree["hydra"]
    values: Any = OmegaConf.to_container(tree)
    return values, chosen


def is_of_sweep(override: str) -> bool:
    """Whether an override is a setting of the sweep itself rather than of its runs."""
    return re.match(r"[+~]*sweep[.=@]", override) is not None


def parse_override(text: str) -> Override | None:
    """Parse a word with Hydra; None if it cannot be parsed, or asks for choices by a pattern (model=glob(*))."""
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
    """Advise how to write a text that Hydra takes for something else."""
    return f"plain text needs quotes: \"{key}='...'\""


def put(values: dict[str, Any], cls: type, text: str, override: Override) -> str | None:
    """Apply one word of the command line to nested values.

    Keys of dictionaries can be added with a plus (in a `mix` also without) and removed with a tilde. Unknown names of
    options and wrong types of values are found later, when the values are read.

    Parameters
    ----------
    values : dict
        Nested plain values, which are changed.
    cls : type
        The dataclass that the values will be turned into.
    text : str
        The word.
    override : Override
        The word as parsed by Hydra.

    Returns
    -------
    str or None
        Why it cannot be applied; None if it has been.
    """
    key = override.key_or_group
    if key == "model.family":
        return f"model.family is {override.value()!r}; it cannot be changed, choose another model instead"

    # Go down to the section that holds the key, and add what it lacks.
    *sections, last = key.split(".")
    node: Any = values
    kind: Any = cls
    for depth, name in enumerate([*sections, last]):
        section = ".".join(sections[:depth])
        is_dictionary = not (kind is None or is_dataclass(kind))
        if not isinstance(node, dict):  # a number, a text or a list: reported when the values are read
            return unknown(joined(section, name), []) if is_dictionary else None
        can_add = text.startswith("+") or section.endswith(".mix")
        if is_dictionary and name not in node and not can_add:
            problem = unknown(joined(section, name), node)
            if section == STAGES and depth < len(sections):
                problem += f" (+{STAGES}.{name}.KEY=VALUE adds a stage)"
            return removal(joined(section, name)) or problem
        if depth == len(sections):
            break
        kind, default = kind_below(kind, name, node.get(name))
        if node.get(name) is None and default is not None:
            node[name] = default
        node = node.get(name)

    # Remove the key, or set it.
    if override.is_delete():
        if not is_dictionary:
            return f"{text}: only a key of a dictionary can be removed"
        del node[last]
        return None
    value = typed(text, override.value())
    # A value for a dictionary is merged into it, except for a mixture, which consists of the components that are named
    # (with a plus, they are added).
    is_mixture = key == "prior.components" or (key.startswith(STAGES) and key.endswith(".mix"))
    if isinstance(value, dict) and not (is_mixture and not text.startswith("+")):
        _, default = kind_below(kind, last, node.get(last))
        present = node.get(last, default)
        value = merge(present, value) if isinstance(present, dict) else value
    node[last] = value
    return None


def kind_below(kind: Any, name: str, value: Any) -> tuple[Any, Any]:
    """Return the type and the default of an option.

    Parameters
    ----------
    kind : type
        A dataclass, or the type of a dictionary.
    name : str
        The name of the option, or the key.
    value : object
        Its value so far, which may decide its type.

    Returns
    -------
    type or None
        The type; None if it is not known, since there is no such option.
    object
        The default, in plain values.
    """
    options = options_of(kind)
    if kind is not None and not is_dataclass(kind):  # a dictionary
        return (get_args(kind)[1] if get_args(kind) else Any), {}
    if name not in options:
        return None, {}
    kind, declared = options[name]
    default = plain(default_of(declared))
    if "chosen" in declared.metadata:
        chosen = declared.metadata["chosen"](plain(value) if isinstance(value, dict) else {})
        return (chosen if is_dataclass(chosen) else None), {}
    (kind, *_) = [each for each in alternatives(kind) if each is not NoneType]
    if is_dataclass(kind):
        return kind, {}
    return kind, default if get_origin(kind) is dict else None


def typed(text: str, value: Any) -> Any:
    """Keep what was typed together with the value that Hydra parses from it.

    Hydra reads the folder 2024_10 as the number 202410, and drops backslashes and spaces at both ends.

    Parameters
    ----------
    text : str
        The word KEY=TEXT.
    value : object
        The value of TEXT for Hydra.

    Returns
    -------
    Typed, list, dict, str or None
        Both. A text in quotes and null are returned as they are.
    """
    after = text.partition("=")[2]
    if isinstance(value, dict | list):
        return typed_elements(value, re.split(r"[\[\]{}:,\s]+", after))
    is_quoted = after.lstrip().startswith(("'", '"'))
    return value if is_quoted or value is None else Typed(after, value)


def typed_elements(value: Any, words: list[str]) -> Any:
    """Return a list or a dictionary whose numbers and booleans know whether they were typed in their usual form."""
    if isinstance(value, dict):
        return {key: typed_elements(each, words) for key, each in value.items()}
    if isinstance(value, list):
        return [typed_elements(each, words) for each in value]
    if not isinstance(value, int | float):
        return value
    return Typed(str(value) if str(value) in words else None, value)


def merge(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Merge other values into nested ones, which are changed and returned."""
    for name, value in others.items():
        is_section = isinstance(value, dict) and isinstance(values.get(name), dict)
        values[name] = merge(values[name], value) if is_section else value
    return values


def take_architecture(values: dict[str, Any], name: Any) -> None:
    """Set the model to the architecture of built-in weights.

    Parameters
    ----------
    values : dict
        The nested values of a configuration, changed in place.
    name : object
        The value of `init_weights`. The model stays as it is if this is None or a file, if these weights are of the
        other task, or if the model is a network of another family.
    """
    model = values.setdefault("model", {})
    # The built-in weights are all of a TabICL, which is the family without a name in a configuration.
    if "family" in model:
        return
    is_regression = model.get("max_classes") == 0
    weights_by_name = names(is_regression)
    if str(name) not in weights_by_name:  # None, or a file
        return
    settings = architecture(weights_by_name[str(name)])
    # Names with the task, such as mini-regressor, are found for both. Weights of the other one are refused when the run
    # starts.
    is_same_task = (settings["max_classes"] == 0) == is_regression
    if is_same_task:
        model.update(settings)


def to_config(values: dict[str, Any], keys: Iterable[str] = ()) -> tuple[RunConfig, list[str]]:
    """Turn nested values into a configuration.

    Parameters
    ----------
    values : dict
        Nested plain values.
    keys : iterable of str
        See `options.read`.

    Returns
    -------
    RunConfig
        The configuration.
    list of str
        Everything that is wrong with it.
    """
    config, problems = read_resolved(RunConfig, values, keys)
    config.curriculum.drop_skipped()
    config.curriculum.apply_scales()
    return config, merged(problems, expand_paths(vars(config)) or check_values(config))


def read_resolved(cls: type, values: dict[str, Any], keys: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Read nested values in which ${KEY} stands for the value of another option.

    Parameters
    ----------
    cls : type
        The dataclass that the values are turned into.
    values : dict
        Nested plain values, or `Typed` ones.
    keys : iterable of str
        See `options.read`.

    Returns
    -------
    object, list of str
        As from `options.read`.
    """
    # Separate the references from the other values.
    flat = flatten(values)
    if cls is RunConfig and "run_dir" not in values:
        flat["run_dir"] = RunConfig.run_dir
    references = {key: text_of(value) for key, value in flat.items() if is_reference(text_of(value))}
    values = without_references(values)

    # Let OmegaConf resolve the references in a tree of all values, defaults included.
    tree = OmegaConf.create(plain(read(cls, values)[0]), flags={"allow_objects": True})
    problems = {}
    for key, text in references.items():
        try:
            OmegaConf.update(tree, key, text, force_add=True)
        except OmegaConfBaseException as error:
            problems[key] = first_line(error)
    for key in references.keys() - problems.keys():
        *sections, name = key.split(".")
        node = functools.reduce(lambda node, section: node.setdefault(section, {}), sections, values)
        try:
            resolved = OmegaConf.select(tree, key, throw_on_missing=True)
            node[name] = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
        except OmegaConfBaseException as error:
            problems[key] = first_line(error)

    # Read the values again, with what the references stand for.
    built, wrong = read(cls, values, "", keys)
    return built, advise_on_removed([f"{key}: {problems[key]}" for key in references if key in problems] + wrong)


def advise_on_removed(problems: list[str]) -> list[str]:
    """Replace problems about options of earlier versions by advice what to do instead."""
    advised = []
    for line in problems:
        advice = removal(key_of(line)) if ": no such setting" in line else None
        advised.append(advice or line)
    return advised


def text_of(value: Any) -> Any:
    """Return what was typed if Hydra also reads it as text, and otherwise the value."""
    return value.text if isinstance(value, Typed) and isinstance(value.value, str) else plain(value)


def is_reference(value: Any) -> bool:
    """Whether a value, or an element of a list, stands for the value of another option, or for none (???)."""
    if isinstance(value, list):
        return any(map(is_reference, value))
    return isinstance(value, str) and ("${" in value or value == REQUIRED)


def without_references(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values without those that are references."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            kept[name] = without_references(value)
        elif not is_reference(text_of(value)):
            kept[name] = value
    return kept


def expand_paths(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Expand ~ in all options that are paths.

    Parameters
    ----------
    values : dict
        Nested values, which are changed.
    prefix : str
        What comes before the keys in messages.

    Returns
    -------
    list of str
        The problems, such as a user that does not exist.
    """
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
    # Read the words.
    problems = []
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            problems.append(f"{argument!r} is not of the form KEY=VALUE")
            continue
        kind, _ = options_of(options).get(key, (str, None))
        try:
            values[key] = read_value(text, kind)
        except ValueError as error:
            problems.append(f"{key} is {repr(text) if text else 'empty'}; {error}")

    # Build the options, and check them. After a wrong word, the usage is shown too.
    parsed, wrong = read(options, values)
    problems = merged(problems, advise_on_removed(wrong))
    if problems:
        mistake = ConfigError(problems)
        mistake.add_note(f"usage: {usage(options)}")
        raise mistake
    problems = expand_paths(vars(parsed)) or check(parsed)
    if problems:
        raise ConfigError(problems)
    return parsed


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types that an option may have, such as str and None for `str | None`."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def read_value(text: str, kind: Any) -> Any:
    """Read the text of a value.

    Parameters
    ----------
    text : str
        What was typed.
    kind : type
        The type of the option.

    Returns
    -------
    None, Typed, list or dict
        None for null, if the option can be None. Lists and dictionaries, if it can be one, are read as YAML. Everything
        else stays as it was typed.

    Raises
    ------
    ValueError
        If the text is empty, or is not a list or a dictionary although it begins like one.
    """
    kinds = {get_origin(each) or each for each in alternatives(kind)}
    if not text:
        raise ValueError(NEEDS_VALUE)
    if text == "null" and (str not in kinds or NoneType in kinds):
        return None
    is_list = text.startswith("[") and bool(kinds & {list, Any})
    is_dictionary = text.startswith("{") and dict in kinds
    if not is_list and not is_dictionary:
        return scalar(text)
    value = read_whole(text)
    if is_list and not all(isinstance(element, str) for element in value):  # YAML reads [?] as a list of a dictionary
        raise ValueError(LIST_ADVICE)
    return [scalar(each) for each in value] if is_list else scalars(value)


def scalars(value: Any) -> Any:
    """Apply `scalar` to all texts in a nested dictionary."""
    if isinstance(value, dict):
        return {key: scalars(each) for key, each in value.items()}
    return [scalars(each) for each in value] if isinstance(value, list) else scalar(value)


def scalar(text: str) -> Typed:
    """Return a text, together with its number if it is one."""
    for kind in (int, float):
        try:
            return Typed(text, kind(text))
        except ValueError:
            continue
    return Typed(text, text)


class TextLoader(yaml.BaseLoader):
    """Reads all values of YAML as text, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError("duplicate key")
        return mapping


def read_whole(text: str) -> Any:
    """Read a list or a dictionary in YAML.

    Raises
    ------
    ValueError
        If YAML would drop or change any of the text: it drops comments, tags (!x) and names of anchors (&x), and joins
        lines.
    """
    # Compare the text with its tokens.
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
    """Return the folders to search, in order: the built-in one, that of --config-dir, those of plug-ins."""
    folders = [CONFIG_DIR]
    if config_dir:
        if not Path(config_dir).is_dir():
            raise ConfigError([f"--config-dir is {config_dir!r}; there is no such folder"])
        folders.append(Path(config_dir).absolute())
    folders += plugins.config_folders()
    for folder in folders[1:]:
        warn_of_ignored_files(folder)
    return list(dict.fromkeys(folders))


@functools.cache  # once in a process, which may compose many configurations
def warn_of_ignored_files(folder: Path) -> None:
    """Print a warning about files that are ignored since built-in files with other content have the same names."""
    ignored = []
    for path in yaml_files([folder]):
        ours = CONFIG_DIR / path.relative_to(folder)
        if ours.is_file() and path.is_file() and ours.read_bytes() != path.read_bytes():
            ignored.append(str(path.relative_to(folder)))
    if ignored:
        names = ", ".join(sorted(ignored))
        info(f"warning   files in {folder} with the names of built-in files are ignored; rename them: {names}")


def yaml_files(folders: list[Path], pattern: str = "**/*.yaml") -> list[Path]:
    """Return the configuration files in some folders; the pattern `*/*.yaml` finds those of groups only."""
    files: list[Path] = []
    for folder in folders:
        files += folder.glob(pattern)
    return files


def undecodable_files(folders: list[Path], error: UnicodeDecodeError) -> list[str]:
    """List the configuration files that are not UTF-8 text, since Hydra's error does not name the file."""
    problems = []
    for path in sorted(yaml_files(folders)):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError as wrong:
            problems.append(unreadable_text(path, wrong))
    return problems or [str(error)]


def group_choices(folders: list[Path]) -> dict[str, list[str]]:
    """Return the groups of configuration files in some folders with the choices of each, in alphabetical order."""
    choices: dict[str, set[str]] = {}
    for path in yaml_files(folders, "*/*.yaml"):
        choices.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(choices[group]) for group in sorted(choices)}
