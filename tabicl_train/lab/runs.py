"""The runs of an experiment, trained as a sweep: a stopped experiment goes on with the same command."""

from __future__ import annotations

from pathlib import Path

from tabicl_train.sweep.journal import SweepFailed
from tabicl_train.sweep.plan import make_plan
from tabicl_train.sweep.results import Job, read_sweep
from tabicl_train.sweep.run import run


class Stopped(Exception):
    """A signal has stopped an experiment; the same command continues it."""


def trained_runs(settings: list[str], folder: Path) -> list[Job]:
    """Train what is not trained yet of a sweep, `settings` as on the command line of tabicl-sweep; returns its runs.

    Raises Stopped, SweepFailed if any run has failed, ConfigError, and LostLock.
    """
    plan, jobs = make_plan([*settings, f"run_dir={folder}"])
    if run(plan, jobs) == "stopped":
        raise Stopped
    trained = read_sweep(folder).jobs
    if failed := [job for job in trained if job.status != "finished"]:
        raise SweepFailed(f"{len(failed)} of {len(trained)} runs have failed; the first is {failed[0].folder}")
    return trained
