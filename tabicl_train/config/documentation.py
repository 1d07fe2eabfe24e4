"""Reads the documentation of options, the string under each field of a dataclass, and makes the help of it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
from typing import Any, get_origin, get_type_hints

from tabicl_train.config.folders import CONFIG_DIR, group_choices, search_folders

MISSING = "???"  # OmegaConf's mark of an option without a default


def class_doc(cls: type) -> str:
    """The docstring of a dataclass, without its indentation."""
    doc = inspect.getdoc(cls)
    assert doc is not None  # Python writes the docstring of a dataclass that has none
    return doc


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass and of the dataclasses it inherits from, by field name.

    Python does not keep these strings, so they are read from the source. Fields without one are left out.
    """
    docs = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
            for field, below in itertools.pairwise(definition.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return docs


def type_text(cls: type, name: str) -> str:
    """The type of a field as a reader of YAML knows it: `int or null` for `int | None`."""
    hint = get_type_hints(cls)[name]
    text = re.sub(r"\w+\.", "", hint.__name__ if isinstance(hint, type) and not get_origin(hint) else str(hint))
    return text.replace(" | ", " or ").replace("None", "null")


def default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def value_text(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


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
    "--config-path DIR": "Search this folder instead of that of this program.",
    "--config-name NAME": "Begin from this file of the folders searched instead of train.",
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


def train_help(config_path: str | None, config_dir: str | None) -> str:
    """The help of tabicl-train; the choices of groups are those of the folders searched."""
    from tabicl_train.config.schema import RunConfig

    choices = group_choices(search_folders(config_path, config_dir))
    return TRAIN.format(
        settings="\n".join(option_line(key, setting_text(RunConfig, key)) for key in COMMON),
        groups="\n".join(option_line(group, ", ".join(choices[group])) for group in choices if group != "sweep"),
        options="\n".join(option_line(*option) for option in OPTIONS.items()),
        reference=CONFIG_DIR / "README.md",
    )


def sweep_help(config_path: str | None, config_dir: str | None) -> str:
    """The help of sweeps."""
    from tabicl_train.config.sweep import SweepConfig

    choices = group_choices(search_folders(config_path, config_dir))
    return SWEEP.format(
        groups=option_line("sweep", ", ".join(choices.get("sweep", []))),
        settings="\n".join(option_lines(SweepConfig, "sweep.")),
        options=option_line("--cfg job", "Print the sweep and the commands of its runs; run nothing."),
        reference=CONFIG_DIR / "sweep" / "README.md",
    )
