"""The experiments, and the command line of tabicl-lab.

An experiment is one file of this folder, with a dataclass `Options` and `run(options)`, and a line here.
"""

from __future__ import annotations

import importlib

from tabicl_train.config.compose import parse_options
from tabicl_train.config.documentation import help_text, option_line
from tabicl_train.errors import ConfigError, require_matplotlib, require_page_packages, require_sweep_packages

EXPERIMENTS = {
    "fading": "how much weight one relevant key keeps among more and more others",
    "entropy": "how even the attention of a network is on longer and longer tables",
    "attention": "one row of a table through one attention head, step by step",
    "needle": "which scoring rules still find one matching row among thousands of others",
    "curriculum": "what training on tables of growing lengths does for tables longer than any of them",
    "classes": "how a network of ten classes predicts a thousand, how well and how fast",
    "linear": "whether softmax or SSA still predicts linear functions that are larger than in training",
    "quantifiers": "whether softmax or SSA still tells if all numbers are positive in longer sequences",
}
TRAINED = ("needle", "curriculum", "linear", "quantifiers")  # those that train networks of their own, in a sweep


class Preempted(Exception):
    """A signal has stopped an experiment; the same command continues it."""


class Failed(Exception):
    """A run of an experiment has failed."""


def run(arguments: list[str]) -> None:
    """Run the experiment of a command line, or print help; raises ConfigError with everything wrong with it."""
    name, *settings = arguments or ["--help"]
    if name in ("-h", "--help"):
        lines = [
            "usage: tabicl-lab EXPERIMENT folder=DIR key=value ...",
            "",
            "Experiments, each with --help of its own:",
        ]
        print("\n".join([*lines, *(option_line(name, question) for name, question in EXPERIMENTS.items())]))
        return
    if name not in EXPERIMENTS:
        raise ConfigError([f"there is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}"])
    experiment = importlib.import_module(f"tabicl_train.lab.{name}")
    if {"-h", "--help"} & set(settings):
        print(help_text(experiment.Options))
        return
    options = parse_options(experiment.Options, settings)
    require_packages(name)  # before the folder of the experiment is made
    experiment.run(options)


def require_packages(name: str) -> None:
    """Raise ConfigError if a package that an experiment needs is not installed."""
    if name in TRAINED:
        require_sweep_packages()
    elif name == "attention":
        require_page_packages()
    require_matplotlib()
