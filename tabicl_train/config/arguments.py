"""The help of the commands, and the key=value arguments of those other than tabicl-train, without Hydra."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml

from tabicl_train.config.checks import unknown_key, wrong_type
from tabicl_train.config.documentation import class_doc, default_of, field_docs, value_text
from tabicl_train.config.folders import CONFIG_DIR, group_choices, search_folders
from tabicl_train.config.options import MISSING
from tabicl_train.config.schema import RunConfig
from tabicl_train.config.sweep import SweepConfig
from tabicl_train.errors import ConfigError


def parse(options: type, arguments: list[str]) -> Any:
    """key=value arguments as an instance of a dataclass of options; raises ConfigError with everything wrong."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = OmegaConf.structured(options)
    keys = list(schema)
    problems, given = [], set()
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(f"{text!r} is not of the form key=value")
        elif key not in keys:
            problems.append(unknown_key("", key, keys))
        else:
            given.add(key)
            try:
                schema[key] = read_value(value)
            except OmegaConfBaseException as error:
                is_null = read_value(value) is None
                problems.append(f"{key} is {value or 'empty'}; it needs a value" if is_null else wrong_type(key, error))
    problems += [f"{key} is missing" for key in keys if OmegaConf.is_missing(schema, key) and key not in given]
    if problems:
        mistake = ConfigError(problems)
        mistake.add_note(f"usage: {usage(options)}")
        raise mistake
    return OmegaConf.to_object(schema)


def read_value(text: str) -> Any:
    """A value in YAML, its numbers as text: the options have types, and a folder may be called 2024_10.

    What is no YAML, such as a path with an opening quote, is plain text.
    """
    if text in ("", "null"):
        return None
    try:
        return yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError:
        return text


def usage(options: type) -> str:
    return class_doc(options).splitlines()[0]


def help_text(options: type, prefix: str = "") -> str:
    """Usage, description, and every option with its default.

    prefix: of the options on the command line
    """
    description = class_doc(options).partition("\n")[2].strip("\n")
    return "\n".join([f"usage: {usage(options)}", "", description, "", *option_lines(options, prefix)])


def option_lines(options: type, prefix: str = "") -> list[str]:
    return [
        option_line(prefix + field.name, setting_text(options, field.name)) for field in dataclasses.fields(options)
    ]


def option_line(key: str, text: str, width: int = 22) -> str:
    """A key and, beside it, what it means, wrapped to the width of a terminal."""
    return textwrap.fill(f"{key:<{width - 4}}  {text}", 110, initial_indent="  ", subsequent_indent=" " * width)


def setting_text(cls: type, key: str) -> str:
    """The sentence and the default of a setting, by its dotted key."""
    first, _, rest = key.partition(".")
    default = default_of(next(field for field in dataclasses.fields(cls) if field.name == first))
    if rest:
        return setting_text(type(default), rest)
    has_none = default in (None, MISSING, [], {}) or dataclasses.is_dataclass(default)
    return field_docs(cls)[first] + ("" if has_none else f" (default: {value_text(default)})")


TRAIN = """\
Pretrains a TabICL-style model on synthetic tables.

usage: tabicl-train experiment=NAME run_dir=DIR key=value ...
       (without experiment=NAME: stage 1 of TabICLv2, 500,000 steps)

Settings most often changed:
{settings}

Groups of settings, chosen by GROUP=NAME:
{groups}

Options:
{options}

All settings: {reference}"""

COMMON = (
    *("run_dir", "seed", "init_weights", "preflight", "trainer.max_steps", "trainer.max_hours", "trainer.precision"),
    *("trainer.devices", "stream.num_workers", "checkpoint.every", "validation.every"),
)

OPTIONS = {
    "--cfg job": "Print the configuration, and the steps, FLOPs and memory of each stage; run nothing.",
    "-m": "Run one training for each combination of values, such as seed=0,1,2: the short form of tabicl-sweep.",
    "--config-dir DIR": "Also search a folder of your own for configuration files.",
    "--version": "Print the version.",
}

SWEEP = """\
Runs tabicl-train for each point of a space: a grid, random points, or a search.

usage: tabicl-sweep sweep=NAME run_dir=DIR key=value ...
       tabicl-train -m key=value,value run_dir=DIR ...    the same, for short

Settings of tabicl-train apply to all runs; one with several values (key=a,b or key=interval(low,high)) varies.

{groups}

Settings of a sweep:
{settings}

{options}

How to write a sweep: {reference}"""


def train_help(config_dir: str | None) -> str:
    """The help of tabicl-train; the choices of groups are those of the folders searched."""
    choices = group_choices(search_folders(config_dir))
    return TRAIN.format(
        settings="\n".join(option_line(key, setting_text(RunConfig, key)) for key in COMMON),
        groups="\n".join(option_line(group, ", ".join(choices[group])) for group in choices if group != "sweep"),
        options="\n".join(option_line(*option) for option in OPTIONS.items()),
        reference=CONFIG_DIR / "README.md",
    )


def sweep_help(config_dir: str | None) -> str:
    """The help of sweeps."""
    choices = group_choices(search_folders(config_dir))
    return SWEEP.format(
        groups=option_line("sweep", ", ".join(choices.get("sweep", []))),
        settings="\n".join(option_lines(SweepConfig, "sweep.")),
        options=option_line("--cfg job", "Print the sweep and the commands of its runs; run nothing."),
        reference=CONFIG_DIR / "sweep" / "README.md",
    )
