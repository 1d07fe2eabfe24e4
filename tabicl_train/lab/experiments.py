"""From the command line of tabicl-lab to an experiment."""

from __future__ import annotations

import importlib
from types import ModuleType

from tabicl_train.config.documentation import help_text, option_line
from tabicl_train.config.options import parse
from tabicl_train.errors import ConfigError, require_matplotlib
from tabicl_train.lab import EXPERIMENTS, SEQUENCES


def run(arguments: list[str]) -> None:
    """Run the experiment of a command line, or print help; raises ConfigError with everything wrong with it."""
    name, *settings = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return
    if name not in EXPERIMENTS:
        raise ConfigError([f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}"])
    experiment = load(name)
    if {"-h", "--help"} & set(settings):
        print(help_text(experiment.Options))
        return
    options = parse(experiment.Options, settings)
    require_matplotlib()
    experiment.run(options)


def load(name: str) -> ModuleType:
    folder = "sequences." if name in SEQUENCES else ""
    return importlib.import_module(f"tabicl_train.lab.{folder}{name}")


def overview() -> str:
    """The experiments, and what each asks."""
    lines = ["usage: tabicl-lab EXPERIMENT folder=DIR key=value ...", "", "Experiments, each with --help of its own:"]
    return "\n".join([*lines, *(option_line(name, question) for name, question in EXPERIMENTS.items())])
