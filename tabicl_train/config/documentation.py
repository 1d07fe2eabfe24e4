"""The help of the commands and the reference of all settings, made from the strings under the options.

The reference is part of the site (launch/docs/conf.py), and can be printed:

python -m tabicl_train.config.documentation
python -m tabicl_train.config.documentation PACKAGE    # of a plug-in
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from priors.options import REQUIRED, default_of
from tabicl_train.config.compose import CONFIG_DIR, group_choices, search_folders
from tabicl_train.config.options import SweepConfig, usage
from tabicl_train.config.schema import RunConfig, StageConfig
from tabicl_train.console import markdown_table
from tabicl_train.doors import register
from tabicl_train.model.config import TabICLConfig

TRAIN = """\
Pretrains a TabICL-style model on synthetic tables.

usage: tabicl-train experiment=NAME run_dir=DIR KEY=VALUE ...
       (without experiment=NAME: stage 1 of TabICLv2, 500,000 steps)

Settings most often changed:
{settings}

Groups of settings, chosen by GROUP=NAME:
{groups}

Options:
{options}

Other commands, each with --help:
{commands}

All settings: python -m tabicl_train.config.documentation"""

OFTEN_CHANGED = (
    "run_dir",
    "seed",
    "init_weights",
    "trainer.max_steps",
    "trainer.max_hours",
    "trainer.precision",
    "trainer.devices",
    "stream.num_workers",
    "checkpoint.every",
    "validation.every",
)

ABOUT_PLUGINS = "Load your own modules or files that register something, in any command."
TRAIN_OPTIONS = {
    "--cfg job": "Print the configuration, and the steps, FLOPs and memory of each stage; run nothing.",
    "-m": "Run one training for each combination of values, such as seed=0,1,2: the short form of tabicl-sweep.",
    "--config-dir DIR": "Also search your own folder for configuration files.",
    "plugins=[A,./b.py]": ABOUT_PLUGINS,
    "--version": "Print versions, commit and device.",
}

OTHER_COMMANDS = {
    "tabicl-runs": "List the runs in a folder and their status.",
    "tabicl-report": "Write a page about one or several runs.",
    "tabicl-export": "Write the weights of a run in a format that others load.",
    "tabicl-predict": "Predict a column of a table.",
    "tabicl-evaluate": "Score a checkpoint and baselines on real data.",
    "tabicl-compare": "Compare runs, checkpoints or sweeps on the same tasks, with intervals.",
    "tabicl-sweep": "Run one training for each point of a space.",
    "tabicl-submit": "Submit a run to SLURM.",
    "tabicl-prior": "Show the tables of a prior, or store them.",
    "tabicl-replay": "Repeat one step of a run and print the loss of each table.",
    "tabicl-gpu-check": "Check results, speed and memory of a GPU.",
    "tabicl-lab": "Run an experiment with attention.",
}

# Options whose help also names what plug-ins have registered.
REGISTRY_OF_OPTION = {"EvaluateOptions.suite": register.suite, "ExportOptions.format": register.export_format}

SWEEP = """\
Runs tabicl-train for each point of a space: a grid, random points, or a search.

usage: tabicl-sweep sweep=NAME run_dir=DIR KEY=VALUE ...
       tabicl-train -m KEY=VALUE,VALUE run_dir=DIR ...    the same, for short

Settings of tabicl-train apply to all runs; one with several values (key=a,b or key=interval(low,high)) varies.

{groups}

Settings of a sweep:
{settings}

{options}

How to write a sweep: {reference}"""


INTRODUCTION = """\
# Settings

All settings of `tabicl-train`, each with its type, default and meaning. A setting is given by `KEY=VALUE`, and a group
of settings by `GROUP=NAME`, which reads `configs/GROUP/NAME.yaml`. Single settings win over groups, and
`experiment=NAME` sets several groups at once. `tabicl-train experiment=demo --cfg job` prints the values in force.
"""


PLUGIN_INTRODUCTION = """\
# Settings of {module}

Settings that this plug-in adds to those of `tabicl-train`.
"""


def class_doc(cls: type) -> str:
    """Return the docstring of a dataclass without its numpydoc sections."""
    doc = inspect.getdoc(cls)
    assert doc is not None  # `dataclass` adds one if there is none
    return re.split(r"\n\n\w+\n-+\n", doc)[0]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Read the strings under the fields of a dataclass and of its bases from the source.

    Python does not keep them: such a string is an expression after a statement of the form NAME: TYPE = DEFAULT.

    Returns
    -------
    dict
        The strings by field, each in one line.
    """
    docs = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        definition = ast.parse(source).body[0]
        assert isinstance(definition, ast.ClassDef)
        for field, below in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                name = ast.unparse(field.target)
                docs[name] = " ".join(ast.literal_eval(below.value).split())
    return docs


def type_text(cls: type, name: str) -> str:
    """Name the type of a field in terms of YAML: `int or null` for `int | None`."""
    hint = get_type_hints(cls)[name]
    is_plain_class = isinstance(hint, type) and get_origin(hint) is None
    text = hint.__name__ if is_plain_class else str(hint)  # str(int) would be <class 'int'>
    text = re.sub(r"\w+\.", "", text)  # drop the names of modules
    return text.replace(" | ", " or ").replace("None", "null")


def yaml_text(value: Any) -> str:
    """Format a value as YAML."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def help_text(options: type, prefix: str = "") -> str:
    """Return usage, description, and each option with its default; `prefix` comes before the options' names."""
    description = class_doc(options).partition("\n")[2].strip("\n")
    lines = option_lines(options, prefix)
    if not prefix:
        lines.append(option_line("plugins", ABOUT_PLUGINS))
    return "\n".join([f"usage: {usage(options)}", "", description, "", *lines])


def option_lines(options: type, prefix: str = "") -> list[str]:
    """Describe each option of a dataclass in the two columns of `option_line`."""
    lines = []
    # Required options come first, also where options are inherited.
    for field in sorted(dataclasses.fields(options), key=lambda field: field.default != REQUIRED):
        text = setting_text(options, field.name)
        registry = REGISTRY_OF_OPTION.get(f"{options.__name__}.{field.name}")
        if registry is not None and registry.of_plugins():
            text += f" Plug-ins add {', '.join(registry.of_plugins())}."
        lines.append(option_line(prefix + field.name, text))
    return lines


def option_line(key: str, text: str, width: int = 22) -> str:
    """Format a key and its meaning in two columns, wrapped to the width of a terminal."""
    return textwrap.fill(f"{key:<{width - 4}}  {text}", 110, initial_indent="  ", subsequent_indent=" " * width)


def setting_text(cls: type, key: str) -> str:
    """Return the string and the default of a setting, by its dotted key."""
    name, _, rest = key.partition(".")
    (field,) = [field for field in dataclasses.fields(cls) if field.name == name]
    default = default_of(field)
    if rest:
        return setting_text(type(default), rest)
    text = field_docs(cls)[name]
    if default in (None, REQUIRED, [], {}) or dataclasses.is_dataclass(default):
        return text
    return f"{text} (default: {yaml_text(default)})"


def train_help(config_dir: str | None) -> str:
    """Return the help of tabicl-train, with the choices of groups in the folders that are searched."""
    settings = [option_line(key, setting_text(RunConfig, key)) for key in OFTEN_CHANGED]
    groups = []
    for group, choices in group_choices(search_folders(config_dir)).items():
        if group != "sweep":  # of tabicl-sweep
            groups.append(option_line(group, ", ".join(choices)))
    options = [option_line(key, text) for key, text in TRAIN_OPTIONS.items()]
    return TRAIN.format(
        settings="\n".join(settings),
        groups="\n".join(groups),
        options="\n".join(options),
        commands="\n".join(option_line(name, text) for name, text in OTHER_COMMANDS.items()),
    )


def sweep_help(config_dir: str | None) -> str:
    """Return the help of tabicl-sweep."""
    choices = group_choices(search_folders(config_dir))
    return SWEEP.format(
        groups=option_line("sweep", ", ".join(choices.get("sweep", []))),
        settings="\n".join(option_lines(SweepConfig, "sweep.")),
        options=option_line("--cfg job", "Print the sweep and the commands of its runs; run nothing."),
        reference=CONFIG_DIR / "sweep" / "README.md",
    )


def reference() -> str:
    """Return the reference of all options in Markdown, without those of plug-ins."""
    from priors.realism import Realism  # takes 2 s

    # Groups, and the settings outside of sections.
    groups = f"## Groups\n\nThe files of values that come with the project.\n\n{choice_table(CONFIG_DIR)}\n"
    fields = dataclasses.fields(RunConfig)
    settings_of_run = [field for field in fields if not is_section(field) and field.name != "prior"]
    blocks = [INTRODUCTION, groups, describe_options("## The run", RunConfig, fields=settings_of_run)]
    # The sections of a configuration, in order. Those of the prior and the network depend on which one is chosen.
    for field in fields:
        name = field.name
        if name == "prior":
            blocks.append("## `prior`\n\nThe distribution that tables are drawn from.\n")
            blocks += describe_priors("priors")
            blocks.append(describe_options("### `prior.realism`", Realism, "prior.realism."))
        elif name == "model":
            blocks += describe_networks("tabicl_train.model")
        elif is_section(field):
            blocks.append(describe_options(f"## `{name}`", type(default_of(field)), f"{name}."))
        if name == "curriculum":
            stage = "curriculum.stages.NAME"
            blocks.append(describe_options(f"## `{stage}`", StageConfig, f"{stage}."))
    blocks.append(describe_options("## `sweep`, for `tabicl-sweep`", SweepConfig, "sweep."))
    return "\n".join(blocks)


def plugin_reference(module: str) -> str:
    """Return the reference of a plug-in's options in Markdown; it must be a package with a folder `configs`."""
    package = importlib.import_module(module)
    folder = Path(package.__path__[0]) / "configs"
    groups = f"## Groups\n\nThe files of values in its folder `configs`.\n\n{choice_table(folder)}\n"
    introduction = PLUGIN_INTRODUCTION.format(module=module)
    return "\n".join([introduction, groups, *describe_priors(module, "##"), *describe_networks(module)])


def choice_table(folder: Path) -> str:
    """Make a table of the files of values in a folder: the choice, and what it is."""
    rows = []
    for group in sorted(folder.iterdir()):
        for file in sorted(group.glob("*.yaml")):
            rows.append((f"`{group.name}={file.stem}`", first_sentence(file)))
    return markdown_table(("choice", "what it is"), rows)


def describe_priors(package: str, level: str = "###") -> list[str]:
    """Describe the options of the priors of a package, each below a title of this level."""
    import priors

    descriptions = []
    for name in priors.prior_names():
        prior = priors.prior_class(name)
        if prior.__module__.startswith(f"{package}."):
            descriptions.append(describe_options(f"{level} `prior={name}`", prior, "prior."))
    return descriptions


def describe_networks(package: str) -> list[str]:
    """Describe the settings of the networks of a package."""
    descriptions = []
    for name in register.network:
        if not register.network.place(name).startswith(f"{package}."):
            continue
        settings = register.network[name].settings
        fields = list(dataclasses.fields(settings))
        if settings is not TabICLConfig and issubclass(settings, TabICLConfig):
            # Of a variant of TabICL, describe only what it adds; its docstring says what it is.
            inherited = {field.name for field in dataclasses.fields(TabICLConfig)}
            fields = [field for field in fields if field.name not in inherited]
        descriptions.append(describe_options(f"## `model` of the family {name}", settings, "model.", fields))
    return descriptions


def is_section(field: dataclasses.Field) -> bool:
    """Whether a field holds options of its own, as RunConfig.trainer does."""
    return dataclasses.is_dataclass(default_of(field))


def describe_options(title: str, cls: type, prefix: str = "", fields: Sequence[dataclasses.Field] | None = None) -> str:
    """Describe a dataclass of options in Markdown.

    Parameters
    ----------
    title : str
        The title.
    cls : type
        The dataclass.
    prefix : str
        What comes before the keys.
    fields : sequence of Field, optional
        The fields to describe. Default: all.

    Returns
    -------
    str
        Title, docstring, and a table of keys, types, defaults and meanings.
    """
    if fields is None:
        fields = dataclasses.fields(cls)
    rows = []
    for field in fields:
        default = "{}"
        if not is_section(field):
            default = yaml_text(default_of(field)) or '""'
        meaning = field_docs(cls).get(field.name, "")
        rows.append((f"`{prefix}{field.name}`", type_text(cls, field.name), f"`{default}`", meaning))
    table = "It has no options."
    if rows:
        table = markdown_table(("key", "type", "default", "meaning"), rows)
    return f"{title}\n\n{class_doc(cls)}\n\n{table}\n"


def first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a configuration file."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:  # a directive for Hydra
            lines.append(line.removeprefix("#").strip())
    return re.split(r"(?<=[.?]) ", " ".join(lines))[0]


if __name__ == "__main__":
    page = plugin_reference(sys.argv[1]) if sys.argv[1:] else reference()
    print(page, end="")
