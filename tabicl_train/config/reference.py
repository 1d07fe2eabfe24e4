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
from tabicl_train.model.families import FAMILIES, family_name

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
    sections = [INTRODUCTION, groups_section()]
    top = [field for field in dataclasses.fields(RunConfig) if not is_part(field) and field.name != "prior"]
    sections.append(section("The run", class_doc(RunConfig), table(RunConfig, top)))
    for field in dataclasses.fields(RunConfig):
        if field.name == "prior":
            sections.append(priors_section())
        elif is_part(field):
            for cls in FAMILIES if field.name == "model" else [default_of(field).__class__]:
                title = f"`{field.name}`" + (f" of the family {family_name(cls)}" if field.name == "model" else "")
                rows = table(cls, dataclasses.fields(cls), f"{field.name}.")
                sections.append(section(title, class_doc(cls), rows))
        if field.name == "curriculum":
            rows = table(StageConfig, dataclasses.fields(StageConfig), "curriculum.stages.NAME.")
            sections.append(section("`curriculum.stages.NAME`", class_doc(StageConfig), rows))
    rows = table(SweepConfig, dataclasses.fields(SweepConfig), "sweep.")
    sections.append(section("`sweep`, for `tabicl-sweep`", class_doc(SweepConfig), rows))
    return "\n".join(sections)


def is_part(field: dataclasses.Field) -> bool:
    return dataclasses.is_dataclass(default_of(field))


def section(title: str, description: str, rows: str) -> str:
    return f"## {title}\n\n{description}\n\n{rows}"


def table(cls: type, fields: Iterable[dataclasses.Field], prefix: str = "") -> str:
    """A row for each field: key, type, default and meaning."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        default = "{}" if is_part(field) else value_text(default_of(field)) or '""'
        meaning = field_docs(cls).get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{prefix}{field.name}` | {type_text(cls, field.name)} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def groups_section() -> str:
    lines = ["| choice | what it is |", "|---|---|"]
    for folder in sorted(path for path in CONFIG_DIR.iterdir() if path.is_dir()):
        lines += [f"| `{folder.name}={file.stem}` | {first_sentence(file)} |" for file in sorted(folder.glob("*.yaml"))]
    return section("Groups", "The files of values that come with the project.", "\n".join(lines) + "\n")


def first_sentence(file: Path) -> str:
    """The first sentence of the comment at the top of a configuration file."""
    comment = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            comment.append(line.removeprefix("#").strip())
    text = " ".join(comment).replace("|", "\\|")
    return text.partition(". ")[0].rstrip(".") + "." if text else ""


def priors_section() -> str:
    """The options of the priors of this package."""
    sections = [section("`prior`", "The distribution that tables are drawn from.", "").rstrip() + "\n"]
    for name in priors.prior_names():
        cls = priors.prior_class(name)
        if not cls.__module__.startswith("priors."):
            continue  # of another package that happens to be installed
        fields = dataclasses.fields(cls)
        rows = table(cls, fields, "prior.") if fields else "It has no options.\n"
        sections.append(f"### `prior={name}`\n\n{class_doc(cls)}\n\n{rows}")
    rows = table(Realism, dataclasses.fields(Realism), "prior.realism.")
    sections.append(f"### `prior.realism`\n\n{class_doc(Realism)}\n\n{rows}")
    return "\n".join(sections)


if __name__ == "__main__":
    print(reference(), end="")
