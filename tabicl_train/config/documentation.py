"""The help of the commands and configs/README.md, made from the strings under the options.

python -m tabicl_train.config.documentation > configs/README.md
python -m tabicl_train.config.documentation PACKAGE > PACKAGE/configs/README.md    # of a plug-in
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from tabicl_train import register
from tabicl_train.config.compose import CONFIG_DIR, group_choices, search_folders
from tabicl_train.config.options import MISSING, SweepConfig, usage
from tabicl_train.config.schema import RunConfig, StageConfig, default_of
from tabicl_train.console import markdown_table
from tabicl_train.model.config import TabICLConfig

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

OFTEN_CHANGED = (
    *("run_dir", "seed", "init_weights", "preflight", "trainer.max_steps", "trainer.max_hours", "trainer.precision"),
    *("trainer.devices", "stream.num_workers", "checkpoint.every", "validation.every"),
)

PLUGINS = "plugins=[A,./b.py]"
OPEN_OPTIONS = {"EvaluateOptions.suite": register.suite, "ExportOptions.format": register.export_format}
OPTIONS = {
    "--cfg job": "Print the configuration, and the steps, FLOPs and memory of each stage; run nothing.",
    "-m": "Run one training for each combination of values, such as seed=0,1,2: the short form of tabicl-sweep.",
    "--config-dir DIR": "Also search a folder of your own for configuration files.",
    PLUGINS: "Load modules or files of your own that register something; every command takes it.",
    "--version": "Print versions, commit and device.",
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


INTRODUCTION = """\
# Settings

All settings of `tabicl-train`, each with its type, default and meaning. A setting is given by `KEY=VALUE`, and a group
of settings by `GROUP=NAME`, which reads `configs/GROUP/NAME.yaml`. Single settings win over groups, and
`experiment=NAME` sets several groups at once. `tabicl-train experiment=demo --cfg job` prints the values in force.

This page is made from the code by `python -m tabicl_train.config.documentation > configs/README.md`.

Files of your own go into a folder with the layout of `configs/`. It is searched after this one with `--config-dir DIR`,
or always if an installed package registers it, and so is the folder `configs` inside a package that is a plug-in. The
same package can bring priors; nothing here needs to change:

    [project.entry-points."tabicl_train.configs"]
    mine = "my_package.configs"       # a package whose folder holds prior/mine.yaml, model/mine.yaml, ...

    [project.entry-points."tabicl_train.priors"]
    mine = "my_package.my_prior"      # a module with one subclass of priors.Prior, or the class
"""


PLUGIN_INTRODUCTION = """\
# Settings of {module}

Settings that this plug-in adds to those of `tabicl-train`, which are in its own configs/README.md. This page is made
from the code by `python -m tabicl_train.config.documentation {module}`.
"""


def class_doc(cls: type) -> str:
    """Return the docstring of a dataclass without its numpydoc sections."""
    doc = inspect.getdoc(cls)
    assert doc is not None  # `dataclass` adds one
    return re.split(r"\n\n\w+\n-+\n", doc)[0]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Read the strings under the fields of a dataclass and its bases from their source."""
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
    """Name the type of a field in terms of YAML: `int or null` for `int | None`."""
    hint = get_type_hints(cls)[name]
    text = re.sub(r"\w+\.", "", hint.__name__ if isinstance(hint, type) and not get_origin(hint) else str(hint))
    return text.replace(" | ", " or ").replace("None", "null")


def value_text(value: Any) -> str:
    """Format a value as YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def help_text(options: type, prefix: str = "") -> str:
    """Return usage, description, and each option with its default; `prefix` comes before the options' names."""
    description = class_doc(options).partition("\n")[2].strip("\n")
    lines = option_lines(options, prefix)
    if not prefix:
        lines.append(option_line("plugins", OPTIONS[PLUGINS]))
    return "\n".join([f"usage: {usage(options)}", "", description, "", *lines])


def option_lines(options: type, prefix: str = "") -> list[str]:
    lines = []
    for field in dataclasses.fields(options):
        text = setting_text(options, field.name)
        registry = OPEN_OPTIONS.get(f"{options.__name__}.{field.name}")
        if registry is not None and registry.of_plugins():
            text += f" Plug-ins add {', '.join(registry.of_plugins())}."
        lines.append(option_line(prefix + field.name, text))
    return lines


def option_line(key: str, text: str, width: int = 22) -> str:
    """Format a key and its meaning in two columns, wrapped to the width of a terminal."""
    return textwrap.fill(f"{key:<{width - 4}}  {text}", 110, initial_indent="  ", subsequent_indent=" " * width)


def setting_text(cls: type, key: str) -> str:
    """Return the string and the default of a setting, by its dotted key."""
    first, _, rest = key.partition(".")
    default = default_of(next(field for field in dataclasses.fields(cls) if field.name == first))
    if rest:
        return setting_text(type(default), rest)
    has_none = default in (None, MISSING, [], {}) or dataclasses.is_dataclass(default)
    return field_docs(cls)[first] + ("" if has_none else f" (default: {value_text(default)})")


def train_help(config_dir: str | None) -> str:
    """Return the help of tabicl-train, with the choices of groups in the folders searched."""
    choices = group_choices(search_folders(config_dir))
    return TRAIN.format(
        settings="\n".join(option_line(key, setting_text(RunConfig, key)) for key in OFTEN_CHANGED),
        groups="\n".join(option_line(group, ", ".join(choices[group])) for group in choices if group != "sweep"),
        options="\n".join(option_line(*option) for option in OPTIONS.items()),
        reference=CONFIG_DIR / "README.md",
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
    """Return the page of all options in Markdown, without those of plug-ins."""
    from priors.realism import Realism  # takes 2 s

    groups = f"## Groups\n\nThe files of values that come with the project.\n\n{choice_table(CONFIG_DIR)}\n"
    sections = [INTRODUCTION, groups]
    top = [field for field in dataclasses.fields(RunConfig) if not is_part(field) and field.name != "prior"]
    sections.append(section("## The run", RunConfig, fields=top))
    for field in dataclasses.fields(RunConfig):
        title, prefix = f"## `{field.name}`", f"{field.name}."
        if field.name == "prior":
            sections.append(f"{title}\n\nThe distribution that tables are drawn from.\n")
            sections += prior_sections("priors")
            sections.append(section("### `prior.realism`", Realism, "prior.realism."))
        elif field.name == "model":
            sections += network_sections("tabicl_train.model")
        elif is_part(field):
            sections.append(section(title, type(default_of(field)), prefix))
        if field.name == "curriculum":
            sections.append(section("## `curriculum.stages.NAME`", StageConfig, "curriculum.stages.NAME."))
    sections.append(section("## `sweep`, for `tabicl-sweep`", SweepConfig, "sweep."))
    return "\n".join(sections)


def plugin_reference(module: str) -> str:
    """Return the page of the options of a plug-in, which is a package with a folder `configs`, in Markdown."""
    package = importlib.import_module(module)
    folder = Path(package.__path__[0]) / "configs"
    groups = f"## Groups\n\nThe files of values in its folder `configs`.\n\n{choice_table(folder)}\n"
    introduction = PLUGIN_INTRODUCTION.format(module=module)
    return "\n".join([introduction, groups, *prior_sections(module, "##"), *network_sections(module)])


def choice_table(folder: Path) -> str:
    """Tell what the files of values in a folder are."""
    files = [file for group in sorted(folder.iterdir()) for file in sorted(group.glob("*.yaml"))]
    rows = [(f"`{file.parent.name}={file.stem}`", first_sentence(file)) for file in files]
    return markdown_table(("choice", "what it is"), rows)


def prior_sections(package: str, level: str = "###") -> list[str]:
    """Describe the options of the priors of a package."""
    import priors

    classes = {name: priors.prior_class(name) for name in priors.prior_names()}
    own = {name: cls for name, cls in classes.items() if cls.__module__.startswith(f"{package}.")}
    return [section(f"{level} `prior={name}`", cls, "prior.") for name, cls in own.items()]


def network_sections(package: str) -> list[str]:
    """Describe the settings of the networks of a package."""
    own = [name for name in register.network if register.network.place(name).startswith(f"{package}.")]
    sections = []
    for name in own:
        settings = register.network[name].settings
        fields = dataclasses.fields(settings)
        if settings is not TabICLConfig and issubclass(settings, TabICLConfig):  # a variant, as its docstring says
            inherited = {field.name for field in dataclasses.fields(TabICLConfig)}
            fields = tuple(field for field in fields if field.name not in inherited)
        sections.append(section(f"## `model` of the family {name}", settings, "model.", fields))
    return sections


def is_part(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(default_of(field))


def section(title: str, cls: type, prefix: str = "", fields: Iterable[dataclasses.Field] | None = None) -> str:
    """Describe a dataclass, with a row for each field: key, type, default and meaning."""
    rows = []
    for field in dataclasses.fields(cls) if fields is None else fields:
        default = "{}" if is_part(field) else value_text(default_of(field)) or '""'
        meaning = field_docs(cls).get(field.name, "")
        rows.append((f"`{prefix}{field.name}`", type_text(cls, field.name), f"`{default}`", meaning))
    table = markdown_table(("key", "type", "default", "meaning"), rows) if rows else "It has no options."
    return f"{title}\n\n{class_doc(cls)}\n\n{table}\n"


def first_sentence(file: Path) -> str:
    """Return the first sentence of the comment at the top of a configuration file."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines if "@package" not in line)
    return re.split(r"(?<=[.?]) ", comment)[0]


if __name__ == "__main__":
    print(plugin_reference(sys.argv[1]) if sys.argv[1:] else reference(), end="")
