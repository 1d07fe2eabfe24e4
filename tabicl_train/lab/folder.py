"""The folder of an experiment: figures, CSV files and a page, each of them complete or absent.

Experiments that train networks have their runs as a sweep in `runs/`, and keep scores as soon as they are computed.
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

from priors.options import check
from tabicl_train import plugins
from tabicl_train.console import markdown_table
from tabicl_train.errors import ConfigError, require_sweep_packages
from tabicl_train.evaluation.statistics import Estimate, mean_interval
from tabicl_train.lab.experiments import Failed, Preempted
from tabicl_train.outputs import make_folder, write_atomically
from tabicl_train.run.provenance import git, versions
from tabicl_train.run.records import Records
from tabicl_train.signals import watch_signals
from tabicl_train.weights.reader import load_network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARK = "experiment.json"  # marks the folder of an experiment, and names it
PAGE = "README.md"
HELD_OUT = -1  # replaces the seed in the addresses of test tables; those of runs are at least 0
FEWEST_SEEDS = 3  # that a claim needs
NO_CLAIM = f"No claim is made with fewer than {FEWEST_SEEDS} seeds."
SMALL_FORM = "**Small form** (small=true): it shows that the experiment works, and decides nothing."

Row = dict[str, object]
Runs = dict[str, tuple[Row, Path]]  # by name: the columns that rows of scores have about a run, and its folder


class Folder:
    """The folder of an experiment, which is created if it is missing.

    Parameters
    ----------
    experiment : str
        The name of the experiment.
    options : dataclass
        Its options, one of which is `folder`.

    Raises
    ------
    ConfigError
        If the folder holds anything other than this experiment, or if the options, made in Python, are wrong.
    """

    def __init__(self, experiment: str, options: Any) -> None:
        if problems := check(options):
            raise ConfigError(problems)
        self.path = Path(options.folder)
        self.experiment = experiment
        self.options = dataclasses.asdict(options)
        make_folder("folder", self.path)
        other_content = what_else(self.path, experiment)
        if other_content:
            raise ConfigError([f"folder is {options.folder!r}; it holds {other_content}; choose another name"])
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
        """Write README.md: the question, for readers who know no paper; the findings; and what was run."""
        # The code that was run, with a mark if its configurations or priors were changed.
        version = versions()
        code = f"tabicl-train {version['tabicl-train']}"
        commit = git("rev-parse", "--short", "HEAD")
        if commit:
            changed = git("status", "--porcelain", "--", ".", ":/configs", ":/priors")
            code += f" (commit {commit}{', with changes that are not committed' if changed else ''})"

        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:], *plugins.arguments(hashes=False)])
        settings = pd.DataFrame({"setting": self.options.keys(), "value": map(str, self.options.values())})
        paragraphs = [
            f"# {title}",
            question.strip(),
            *([SMALL_FORM] if self.options.get("small") else []),
            findings.strip(),
            "## What was run",
            f"    {command}",
            markdown(settings),
            f"Ended on {time.strftime('%Y-%m-%d %H:%M')}, with {code}, Python {version['python']} and torch "
            f"{version['torch']}.",
        ]
        self.text(PAGE, "\n\n".join(paragraphs) + "\n")
        print(self.path / PAGE)


def what_else(path: Path, experiment: str) -> str | None:
    """Return what a folder holds that does not belong to an experiment; None if there is nothing."""
    mark = Records(path).json(MARK)
    if mark is not None and mark.get("experiment") == experiment:
        return None
    if mark is not None:
        return f"the experiment {mark.get('experiment')}"
    for file in sorted(path.iterdir()):
        return f"{file.name}, which does not belong to an experiment"
    return None


def markdown(frame: pd.DataFrame, form: str = ".3f") -> str:
    """Format a table for a page. `form` is the format of Estimates; other cells are converted to text."""
    header = [name if isinstance(name, str) else f"{name:,}" for name in frame]
    cells = frame.map(lambda cell: format(cell, form) if isinstance(cell, Estimate) else str(cell))
    return markdown_table(header, cells.to_numpy())


def share(values: pd.Series) -> Estimate:
    """Return the mean of shares in [0, 1] with its interval."""
    return mean_interval(values.to_numpy(), 0.0, 1.0)


def plot_estimates(axes: Axes, estimates: pd.Series, **style: Any) -> None:
    """Draw Estimates against their index as a line, with their intervals as a band."""
    means = [estimate.mean for estimate in estimates]
    lows = [estimate.low for estimate in estimates]
    highs = [estimate.high for estimate in estimates]
    (line,) = axes.plot(estimates.index, means, "o-", **style)
    axes.fill_between(estimates.index, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)


def setting_of_labels(key: str, labels: list[str]) -> str:
    """Return the setting that restricts a sweep to some labels, in quotes since a label may have spaces."""
    return f"{key}=" + ",".join(f'"{label}"' for label in labels)


def trained_runs(settings: list[str], folder: Path) -> Runs:
    """Train the runs of a grid, unless they are trained already.

    Parameters
    ----------
    settings : list of str
        As on the command line of tabicl-sweep.
    folder : Path
        The folder of the sweep.

    Returns
    -------
    dict
        The runs in the order of the grid, in which the seed varies fastest, and then the last parameter.

    Raises
    ------
    Preempted
        After a signal.
    Failed
        If any run has failed.
    """
    require_sweep_packages()
    from tabicl_train.sweep.plan import make_plan
    from tabicl_train.sweep.results import Sweep
    from tabicl_train.sweep.run import run_sweep

    plan = make_plan([*settings, f"run_dir={folder}"])
    if run_sweep(plan) == "preempted":
        raise Preempted
    points = sorted(Sweep(folder).points, key=lambda point: plan.points.index(point.trial.params))
    runs: Runs = {}
    failed = []
    for point in points:
        for run in sorted(point.runs, key=lambda run: run.seed):
            runs[run.name] = {**point.trial.params, "seed": run.seed}, run.folder
            if run.status != "finished":
                failed.append(run)
    if failed:
        raise Failed(f"{len(failed)} of {len(runs)} runs have failed; the first is {failed[0].folder}")
    return runs


def score_all(
    folder: Folder, runs: Runs, keys: list[str], tests: Iterable[tuple[Hashable, ...]], score: Callable[..., list[Row]]
) -> pd.DataFrame:
    """Score all runs in all tests, and keep the scores in EXPERIMENT.csv. Scores that it already holds are reused.

    Parameters
    ----------
    folder : Folder
        The folder of the experiment.
    runs : dict
        The runs.
    keys : list of str
        Names of what tests differ in.
    tests : iterable of tuple
        For each test, the values of `keys`.
    score : callable
        `score(network, facts, *values)` returns the rows of a network in a test, given what is known about its run and
        the values of `keys`. The rows also get the column run, the facts and the values.

    Returns
    -------
    DataFrame
        The rows of these runs and tests only.

    Raises
    ------
    Preempted
        After a signal; the scores until then are kept.
    """
    # What is left to do.
    path = folder.path / f"{folder.experiment}.csv"
    keys = ["run", *keys]
    scores = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=keys)
    done = set(scores[keys].itertuples(index=False, name=None))
    wanted = [(name, *test) for name, test in itertools.product(runs, tests)]  # values of `keys`
    left = [values for values in wanted if values not in done]

    # Score and write after each test. All tests of a run are together, so one network is in memory at a time.
    network = functools.lru_cache(maxsize=1)(load_network)
    with watch_signals() as stop:
        for name, *test in tqdm(left, initial=len(wanted) - len(left), total=len(wanted), unit="table"):
            if stop.asked:
                raise Preempted
            facts, run_dir = runs[name]
            head = {**dict(zip(keys, (name, *test), strict=True)), **facts}
            rows = pd.DataFrame([head | row for row in score(network(str(run_dir)), facts, *test)])
            scores = pd.concat([scores, rows], ignore_index=True) if len(scores) else rows
            folder.csv(folder.experiment, scores)

    # Leave out rows of earlier calls with other settings.
    is_wanted = pd.MultiIndex.from_frame(scores[keys]).isin(pd.MultiIndex.from_tuples(wanted, names=keys))
    return scores[is_wanted].reset_index(drop=True)


def by_seed_and_table(rows: pd.DataFrame, column: str, table: str = "table") -> np.ndarray:
    """Return a column of the scores of one kind of network, (seeds, tables).

    Parameters
    ----------
    rows : DataFrame
        Its rows.
    column : str
        The column.
    table : str, optional
        The column that tells tables apart.

    Returns
    -------
    ndarray of shape (seeds, tables)
    """
    return rows.pivot_table(index="seed", columns=table, values=column).to_numpy(float)
