"""all: every experiment that needs no settings, each in a folder of its own inside the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from tabicl_train.lab.experiments import load
from tabicl_train.lab.folder import Folder

SELF_CONTAINED = ("fading",)


@dataclass
class Options:
    """tabicl-lab all folder=DIR [small=true]

    All experiments that need no settings, one after another.
    """

    folder: str = MISSING
    """Folder to write; each experiment writes a folder inside."""
    small: bool = False
    """Everything at its smallest size, within three CPU minutes."""


def run(options: Options) -> None:
    folder = Folder("all", options)
    for name in SELF_CONTAINED:
        experiment = load(name)
        experiment.run(experiment.Options(folder=str(Path(options.folder, name)), small=options.small))
    pages = "\n".join(f"- [{name}]({name}/README.md)" for name in SELF_CONTAINED)
    folder.page("The attention laboratory", "Each experiment has a page of its own, which says what it asks.", pages)
