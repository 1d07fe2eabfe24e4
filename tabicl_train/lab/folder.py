"""What an experiment writes: figures, CSV files and the page of a folder, each of them complete or absent."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tabicl_train.console import markdown_table
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import make_folder, write_atomically
from tabicl_train.run_dir.provenance import git, versions
from tabicl_train.run_dir.records import Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "experiment.json"  # says that a folder is an experiment's, and of which
PAGE = "README.md"


class Folder:
    """The folder of an experiment, created if there is none.

    Raises ConfigError if it holds anything but this experiment.
    """

    def __init__(self, experiment: str, options: Any) -> None:
        self.path, self.experiment, self.options = Path(options.folder), experiment, dataclasses.asdict(options)
        make_folder("folder", self.path)
        if found := what_else(self.path, experiment):
            raise ConfigError([f"folder is {options.folder!r}; it holds {found}; choose another name"])
        self.text(MARK, json.dumps({"experiment": experiment, "options": self.options}, indent=2) + "\n")

    def text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, lambda file: file.write(text.encode()))

    def figure(self, name: str, figure: Figure) -> None:
        """Write NAME.png."""
        write_atomically(self.path / f"{name}.png", lambda file: figure.savefig(file, format="png", dpi=110))

    def csv(self, name: str, frame: pd.DataFrame) -> None:
        """Write NAME.csv."""
        self.text(f"{name}.csv", frame.to_csv(index=False))

    def page(self, title: str, question: str, findings: str) -> None:
        """Write README.md: what is asked, for readers who know no paper; what was found; and what was run."""
        version = versions()
        commit = git("rev-parse", "--short", "HEAD")
        code = f"tabicl-train {version['tabicl-train']}" + (f" (commit {commit})" if commit else "")
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        run = [
            "## What was run",
            f"    {command}",
            markdown(pd.DataFrame({"setting": self.options.keys(), "value": map(str, self.options.values())})),
            f"Ended on {time.strftime('%Y-%m-%d %H:%M')}, with {code}, Python {version['python']} and torch "
            f"{version['torch']}.",
        ]
        self.text(PAGE, "\n\n".join([f"# {title}", question.strip(), findings.strip(), *run]) + "\n")
        print(self.path / PAGE)


def what_else(path: Path, experiment: str) -> str | None:
    """What a folder holds that is not of this experiment; None if there is nothing."""
    found = Records(path).json(MARK)
    if found is not None:
        return None if found.get("experiment") == experiment else f"the experiment {found.get('experiment')}"
    return next((f"{other.name}, which is of no experiment" for other in sorted(path.iterdir())), None)


def markdown(frame: pd.DataFrame) -> str:
    """A table of a page; numbers have the form that the caller has given them."""
    return markdown_table(frame.columns, frame.astype(str).to_numpy())
