"""all: every experiment, each in a folder of its own; those that look at a network take one of the curriculum's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from tabicl_train.lab import EXPERIMENTS
from tabicl_train.lab.curriculum import GROWING
from tabicl_train.lab.experiments import load
from tabicl_train.lab.folder import PAGE, Folder

NETWORKS = ("entropy", "attention", "classes")  # experiments that look at a network
OTHERS = tuple(name for name in EXPERIMENTS if name not in (*NETWORKS, "all"))


@dataclass
class Options:
    """tabicl-lab all folder=DIR [small=true]

    All experiments, one after another. It takes four hours on two CPU cores; when it is stopped, the same command
    continues it.
    """

    folder: str = MISSING
    """Folder to write; each experiment writes a folder inside."""
    small: bool = False
    """Everything at its smallest size, within four CPU minutes."""


def run(options: Options) -> None:
    folder = Folder("all", options)
    for name in (*OTHERS, *NETWORKS):
        experiment = load(name)
        settings: dict[str, Any] = {"folder": str(folder.path / name), "small": options.small}
        if name in NETWORKS:
            settings["checkpoint"] = str(network(folder.path))
        if name == "attention":
            settings |= {"table": "0", "step": 0}
        experiment.run(experiment.Options(**settings))
    pages = "\n".join(f"- [{name}]({name}/{PAGE}): {EXPERIMENTS[name]}" for name in (*OTHERS, *NETWORKS))
    folder.page("The attention laboratory", "Each experiment has a page of its own, which says what it asks.", pages)


def network(folder: Path) -> Path:
    """The run of the curriculum experiment that has the rule and the curriculum of TabICLv2."""
    from tabicl_train.sweep.results import Sweep

    runs = Sweep(folder / "curriculum" / "runs").runs
    wanted = {"curriculum": GROWING, "rule": "QASSMax"}
    return next(run.folder for run in runs if run.params == wanted)
