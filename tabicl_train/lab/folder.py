"""The folder of an experiment: figures, CSV files and a page, each of them complete or absent; and the runs of an
experiment that trains networks, as a sweep in `runs/`, with their scores, which are kept while they are made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from tabicl_train import plugins
from tabicl_train.console import markdown_table
from tabicl_train.distributed.processes import watch_signals
from tabicl_train.errors import ConfigError, require_sweep_packages
from tabicl_train.lab.experiments import Failed, Preempted
from tabicl_train.outputs import make_folder, write_atomically
from tabicl_train.prediction.export import load_network
from tabicl_train.run_dir.provenance import git, versions
from tabicl_train.run_dir.records import Records
from tabicl_train.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARK = "experiment.json"  # says that a folder is an experiment's, and of which
PAGE = "README.md"
HELD_OUT = -1  # in place of a run's seed, which is at least 0, in the addresses of test tables
FEWEST_SEEDS = 3  # for a claim
NO_CLAIM = f"No claim is made with fewer than {FEWEST_SEEDS} seeds."

Row = dict[str, object]
Runs = dict[str, tuple[Row, Path]]  # by name: what rows of scores say of a run, and its folder


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
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:], *plugins.arguments(hashes=False)])
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


def markdown(frame: pd.DataFrame, form: str = ".3f") -> str:
    """A table of a page; Estimates have this form, other numbers that which the caller has given them."""
    header = [name if isinstance(name, str) else f"{name:,}" for name in frame]
    cells = frame.map(lambda cell: format(cell, form) if isinstance(cell, Estimate) else str(cell))
    return markdown_table(header, cells.to_numpy())


def plot_estimates(axes: Axes, estimates: pd.Series, **style: Any) -> None:
    """Draw a line of Estimates over their index, with a band of their intervals."""
    (line,) = axes.plot(estimates.index, [mean.mean for mean in estimates], "o-", **style)
    low, high = ([getattr(mean, end) for mean in estimates] for end in ("low", "high"))
    axes.fill_between(estimates.index, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def trained_runs(settings: list[str], folder: Path) -> Runs:
    """The runs of a grid, trained unless they are, in its order, the last parameter and then the seed varying fastest.

    settings: as on the command line of tabicl-sweep; folder: of the sweep
    Raises Preempted after a signal, and Failed if any run has failed.
    """
    require_sweep_packages()
    from tabicl_train.sweep.plan import make_plan
    from tabicl_train.sweep.results import Sweep
    from tabicl_train.sweep.run import run_sweep

    plan = make_plan([*settings, f"run_dir={folder}"])
    if run_sweep(plan) == "preempted":
        raise Preempted
    runs = [(trial.params, run) for trial, own in Sweep(folder).points for run in own]
    runs.sort(key=lambda found: (plan.points.index(found[0]), found[1].seed))
    if failed := [run for _, run in runs if run.status != "finished"]:
        raise Failed(f"{len(failed)} of {len(runs)} runs have failed; the first is {failed[0].folder}")
    return {run.name: ({**params, "seed": run.seed}, run.folder) for params, run in runs}


def score_all(
    folder: Folder, runs: Runs, keys: list[str], tests: Iterable[tuple[Hashable, ...]], score: Callable[..., list[Row]]
) -> pd.DataFrame:
    """EXPERIMENT.csv with the scores of all runs in all tests; those that it already holds are not made again.

    tests: for each, the values of `keys`
    score: rows of a network, what is known of its run, and the values of a test; they get the column run and all these
    Raises Preempted after a signal; the scores until then are kept.
    """
    path, keys = folder.path / f"{folder.experiment}.csv", ["run", *keys]
    found = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=keys)
    done, units = set(found[keys].itertuples(index=False, name=None)), list(itertools.product(runs, tests))
    left = [(name, test) for name, test in units if (name, *test) not in done]
    network = functools.lru_cache(maxsize=1)(load_network)
    with watch_signals() as stop:
        for name, test in tqdm(left, initial=len(units) - len(left), total=len(units), unit="table"):
            if stop.asked:
                raise Preempted
            known, place = runs[name]
            of_unit = dict(zip(keys, (name, *test), strict=True)) | known
            rows = [of_unit | row for row in score(network(str(place)), known, *test)]
            found = pd.concat([found, pd.DataFrame(rows)], ignore_index=True) if len(found) else pd.DataFrame(rows)
            folder.csv(folder.experiment, found)
    wanted = pd.MultiIndex.from_tuples([(name, *test) for name, test in units], names=keys)
    return found[pd.MultiIndex.from_frame(found[keys]).isin(wanted)].reset_index(drop=True)


def by_seed_and_table(rows: pd.DataFrame, column: str, table: str = "table") -> np.ndarray:
    """A column of the scores of one kind of network, (seeds, tables); `table` is the column that tells tables apart."""
    return rows.pivot_table(index="seed", columns=table, values=column).to_numpy(float)
