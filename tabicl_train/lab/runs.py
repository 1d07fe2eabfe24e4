"""The runs of an experiment, trained as a sweep: a stopped experiment goes on with the same command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.sweep import require_sweep_packages

if TYPE_CHECKING:
    from tabicl_train.sweep.results import SweepRun


class Preempted(Exception):
    """A signal has stopped an experiment; the same command continues it."""


class Failed(Exception):
    """A run of an experiment has failed."""


def trained_runs(settings: list[str], folder: Path) -> list[SweepRun]:
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
    points = plan.points
    runs = sorted(Sweep(folder).runs, key=lambda run: (points.index(run.params), run.seed))
    if failed := [run for run in runs if run.status != "finished"]:
        raise Failed(f"{len(failed)} of {len(runs)} runs have failed; the first is {failed[0].folder}")
    return runs
