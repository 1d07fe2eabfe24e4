"""Writes the reference of all options: python -m tabicl_train.config.reference > configs/README.md"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import priors
from priors.realism import Realism
from tabicl_train.config.documentation import class_doc, default_of, field_docs, type_text, value_text
from tabicl_train.config.folders import CONFIG_DIR
from tabicl_train.config.schema import RunConfig, StageConfig
from tabicl_train.config.sweep import SweepConfig
from tabicl_train.console import markdown_table
from tabicl_train.model.config import FAMILIES, family_name

INTRODUCTION = """\
# Options

Made from the code by `python -m tabicl_train.config.reference > configs/README.md`; a test keeps it up to date.

Every option is set by `KEY=VALUE` after `tabicl-train`, and a group of options by `GROUP=NAME`, which reads
`configs/GROUP/NAME.yaml`. Single options win over groups, and `experiment=NAME` sets several groups at once.
`tabicl-train experiment=demo --cfg job` prints the values in force.

Files of your own go into a folder with the layout of `configs/`. It is searched after this one with `--config-dir DIR`,
or always if an installed package registers it. The same package can bring priors; nothing here needs to change:

    [project.entry-points."tabicl_train.configs"]
    mine = "my_package.configs"       # a package whose folder holds prior/mine.yaml, model/mine.yaml, ...

    [project.entry-points."tabicl_train.priors"]
    mine = "my_package.my_prior"      # a module with one subclass of priors.Prior, or the class
"""


def reference() -> str:
    """The whole page, in Markdown."""
    files = [file for folder in sorted(CONFIG_DIR.iterdir()) for file in sorted(folder.glob("*.yaml"))]
    choices = [(f"`{file.parent.name}={file.stem}`", first_sentence(file)) for file in files]
    groups = markdown_table(("choice", "what it is"), choices)
    sections = [INTRODUCTION, f"## Groups\n\nThe files of values that come with the project.\n\n{groups}\n"]
    top = [field for field in dataclasses.fields(RunConfig) if not is_part(field) and field.name != "prior"]
    sections.append(section("## The run", RunConfig, fields=top))
    for field in dataclasses.fields(RunConfig):
        title, prefix = f"## `{field.name}`", f"{field.name}."
        if field.name == "prior":
            sections.append(f"{title}\n\nThe distribution that tables are drawn from.\n")
            own = {
                name: cls
                for name in priors.prior_names()
                if (cls := priors.prior_class(name)).__module__[:7] == "priors."
            }
            sections += [section(f"### `prior={name}`", cls, prefix) for name, cls in own.items()]
            sections.append(section("### `prior.realism`", Realism, "prior.realism."))
        elif field.name == "model":
            sections += [section(f"{title} of the family {family_name(cls)}", cls, prefix) for cls in FAMILIES]
        elif is_part(field):
            sections.append(section(title, type(default_of(field)), prefix))
        if field.name == "curriculum":
            sections.append(section("## `curriculum.stages.NAME`", StageConfig, "curriculum.stages.NAME."))
    sections.append(section("## `sweep`, for `tabicl-sweep`", SweepConfig, "sweep."))
    return "\n".join(sections)


def is_part(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(default_of(field))


def section(title: str, cls: type, prefix: str = "", fields: Iterable[dataclasses.Field] | None = None) -> str:
    """The description of a dataclass, and a row for each field: key, type, default and meaning."""
    rows = []
    for field in dataclasses.fields(cls) if fields is None else fields:
        default = "{}" if is_part(field) else value_text(default_of(field)) or '""'
        meaning = field_docs(cls).get(field.name, "")
        rows.append((f"`{prefix}{field.name}`", type_text(cls, field.name), f"`{default}`", meaning))
    table = markdown_table(("key", "type", "default", "meaning"), rows) if rows else "It has no options."
    return f"{title}\n\n{class_doc(cls)}\n\n{table}\n"


def first_sentence(file: Path) -> str:
    """The first sentence of the comment at the top of a configuration file."""
    comment = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            comment.append(line.removeprefix("#").strip())
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    print(reference(), end="")
