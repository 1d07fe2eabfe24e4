"""The command line of tabicl-lab, for experiments in this folder and in plug-ins.

An experiment is a function that takes a dataclass of options, registered by `register.experiment`; README.md shows one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_type_hints

from tabicl_train import register
from tabicl_train.config.compose import parse_options
from tabicl_train.config.documentation import help_text, option_line
from tabicl_train.errors import ConfigError, install, is_installed, require_sweep_packages


class Preempted(Exception):
    """A signal has stopped an experiment; the same command continues it."""


class Failed(Exception):
    """A run of an experiment has failed."""


def run_experiment(arguments: list[str]) -> None:
    """Run the experiment of a command line, or print help.

    Parameters
    ----------
    arguments : list of str
        The name of the experiment and its options.

    Raises
    ------
    ConfigError
        With all problems of the command line.
    """
    # Without a name, the help lists all experiments.
    name, *settings = arguments or ["--help"]
    if name in ("-h", "--help"):
        lines = [
            "usage: tabicl-lab EXPERIMENT folder=DIR KEY=VALUE ...",
            "",
            "Experiments, each with --help of its own:",
        ]
        lines += [option_line(name, experiment.question) for name, experiment in register.experiment.items()]
        print("\n".join(lines))
        return

    # The annotation of the experiment's function says which options it takes.
    experiment = register.experiment[name]
    function = experiment.function
    options = options_class(name, function)
    if {"-h", "--help"} & set(settings):
        print(help_text(options))
        return
    parsed = parse_options(options, settings)
    require_packages(name)  # before the folder of the experiment is made
    function(parsed)


def options_class(name: str, function: Callable[[Any], None]) -> type:
    """Return the dataclass of an experiment's options, the annotation of its only parameter."""
    hints = get_type_hints(function)
    kinds = [kind for parameter, kind in hints.items() if parameter != "return"]
    if len(kinds) != 1 or not dataclasses.is_dataclass(kinds[0]):
        form = "def run(options: Options), where Options is a dataclass"
        raise ConfigError([f"the experiment {name} is not a function of its options; write it as {form}"])
    return kinds[0]


def require_packages(name: str) -> None:
    """Raise ConfigError if a package that an experiment needs is not installed."""
    experiment = register.experiment[name]
    if experiment.trains:
        require_sweep_packages()
    missing = [package for package in experiment.packages if not is_installed(package)]
    if missing:
        words = " ".join(missing)
        how = install(words, "plots") if missing == ["matplotlib"] else f"pip install {words}"
        raise ConfigError([f"{name} needs {', '.join(missing)}: {how}"])
