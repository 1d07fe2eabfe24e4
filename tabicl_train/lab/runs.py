"""The runs of an experiment, trained as a sweep: a stopped experiment goes on with the same command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.sweep import require_sweep_packages

if TYPE_CHECKING:
    from tabicl_train.sweep.results import Run


class Stopped(Exception):
    """A signal has stopped an experiment; the same command continues it."""


class Failed(Exception):
    """A run of an experiment has failed."""


def trained_runs(settings: list[str], folder: Path) -> list[Run]:
    """Train what is not trained yet of a grid.

    Parameters
    ----------
    settings : list of str
        As on the command line of tabicl-sweep.
    folder : Path
        The folder of the sweep.

    Returns
    -------
    list of Run
        In the order of the grid, the last parameter and then the seed varying fastest.

    Raises
    ------
    Stopped
    Failed
        If any run has failed.
    ConfigError
        If the settings are wrong, or the folder is in use.
    """
    require_sweep_packages()
    from tabicl_train.sweep.plan import make_plan
    from tabicl_train.sweep.results import Sweep
    from tabicl_train.sweep.run import run_sweep

    plan = make_plan([*settings, f"run_dir={folder}"])
    if run_sweep(plan) == "stopped":
        raise Stopped
    points = plan.points
    runs = sorted(Sweep(folder).runs, key=lambda run: (points.index(run.params), run.seed))
    if failed := [run for run in runs if run.status != "finished"]:
        raise Failed(f"{len(failed)} of {len(runs)} runs have failed; the first is {failed[0].folder}")
    return runs
