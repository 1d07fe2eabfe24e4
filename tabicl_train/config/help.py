"""The help of tabicl-train: usage, the settings most often changed, and the choices of each group."""

from __future__ import annotations

import dataclasses

from tabicl_train.config.arguments import option_line
from tabicl_train.config.compose import config_files, group_choices
from tabicl_train.config.documentation import default_of, field_docs, value_text
from tabicl_train.config.folders import CONFIG_DIR
from tabicl_train.config.schema import RunConfig
from tabicl_train.config.sweep import SweepConfig

USAGE = """\
Pretrains a TabICL-style model on synthetic tables.

usage: tabicl-train experiment=NAME run_dir=DIR key=value ...
       (without experiment=NAME: stage 1 of TabICLv2, 500,000 steps)
"""

COMMON = (
    *("run_dir", "seed", "init_weights", "preflight", "trainer.max_steps", "trainer.max_hours", "trainer.precision"),
    *("trainer.devices", "stream.num_workers", "checkpoint.every", "validation.every"),
)

OPTIONS = {
    "--cfg job": "Print the configuration, and the steps, FLOPs and memory of each stage; run nothing.",
    "-m": "Run one training for each combination of values, such as seed=0,1,2: the short form of tabicl-sweep.",
    "--config-dir DIR": "Also search a folder of your own for configuration files.",
    "--version": "Print the version.",
    "--hydra-help": "Print further options, and how to install shell completion.",
}


def print_help(config_name: str, config_path: str | None, config_dir: str | None) -> None:
    """Print the help; the choices of groups are those of the folders that Hydra's options name."""
    with config_files(config_name, config_path, config_dir):
        choices = group_choices()
    print(USAGE)
    print("Settings most often changed:")
    for key in COMMON:
        print(option_line(key, setting_text(key)))
    print("\nGroups of settings, chosen by GROUP=NAME:")
    for group, names in choices.items():
        if group != "sweep":
            print(option_line(group, ", ".join(names)))
    print("\nOptions:")
    for option, text in OPTIONS.items():
        print(option_line(option, text))
    print(f"\nAll settings: {CONFIG_DIR / 'README.md'}")


SWEEP_USAGE = """\
Runs tabicl-train for each point of a space: a grid, random points, or a search.

usage: tabicl-sweep sweep=NAME run_dir=DIR key=value ...
       tabicl-train -m key=value,value run_dir=DIR ...    the same, for short

Settings of tabicl-train apply to all runs; one with several values (key=a,b or key=interval(low,high)) varies.
"""


def print_sweep_help(config_name: str, config_path: str | None, config_dir: str | None) -> None:
    """Print the help of sweeps."""
    with config_files(config_name, config_path, config_dir):
        names = group_choices()["sweep"]
    print(SWEEP_USAGE)
    print(option_line("sweep", ", ".join(names)) + "\n\nSettings of a sweep:")
    for field in dataclasses.fields(SweepConfig):
        default = default_of(field)
        is_empty = default in (None, [], {}) or dataclasses.is_dataclass(default)
        shown = "" if is_empty else f" (default: {value_text(default)})"
        print(option_line(f"sweep.{field.name}", field_docs(SweepConfig)[field.name] + shown))
    print("\n" + option_line("--cfg job", "Print the sweep and the commands of its runs; run nothing."))
    print(f"\nHow to write a sweep: {CONFIG_DIR / 'sweep' / 'README.md'}")


def setting_text(key: str) -> str:
    """The sentence and the default of a setting, by its dotted key."""
    cls: type = RunConfig
    *parts, name = key.split(".")
    for part in parts:
        cls = default_of(field_of(cls, part)).__class__
    default = default_of(field_of(cls, name))
    return field_docs(cls)[name] + ("" if default is None else f" (default: {value_text(default)})")


def field_of(cls: type, name: str) -> dataclasses.Field:
    return next(field for field in dataclasses.fields(cls) if field.name == name)
