"""A sweep from start to end."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from pathlib import Path

from tabicl_train.console import first_line, tell
from tabicl_train.distributed.signals import Stop, watch_signals
from tabicl_train.errors import ConfigError, is_installed
from tabicl_train.run_dir.checkpoint import sweep as remove_temporary_files
from tabicl_train.run_dir.lock import RunLock
from tabicl_train.run_dir.outputs import make_folder
from tabicl_train.sweep.controller import POLL, Controller
from tabicl_train.sweep.executors.executor import Executor
from tabicl_train.sweep.executors.local import Local
from tabicl_train.sweep.journal import Journal, SweepFailed
from tabicl_train.sweep.plan import Job, Plan
from tabicl_train.sweep.progress import Progress
from tabicl_train.sweep.ranking import rank, table, value_text
from tabicl_train.sweep.results import read_sweep, write_csv
from tabicl_train.sweep.search import Listed, Study

PAGE = "sweep.html"


def run(plan: Plan, jobs: list[Job]) -> str:
    """Run the jobs of a sweep, or what is left of them, and print the table.

    Returns finished; failed if no job has finished; or stopped if a signal or the time limit came before the end.
    Raises ConfigError if another process runs the sweep, and SweepFailed if it cannot go on.
    """
    make_folder("run_dir", plan.folder)
    lock = RunLock(plan.folder)
    lock.acquire()
    try:
        with watch_signals() as stop:
            if plan.sweep.max_hours is not None:
                stop.limit = 3600 * plan.sweep.max_hours
            return run_locked(plan, jobs, lock, stop)
    finally:
        lock.release()


def run_locked(plan: Plan, jobs: list[Job], lock: RunLock, stop: Stop) -> str:
    remove_temporary_files(plan.folder)
    journal = Journal(plan.folder, lock.check)
    with contextlib.closing(make_executor(plan, jobs)) as executor:  # reports the last mistakes in the settings
        try:
            journal.write_settings(plan.sweep)
            listed = plan.points is not None and plan.sweep.pruner == "none"
            search = Listed(plan.points or []) if listed else Study(plan)
            controller = Controller(plan, jobs, executor, search, journal, stop)
            try:
                controller.plan_all()
                follow(controller)
            finally:
                controller.end_all()
        except OSError as error:
            raise SweepFailed(f"{error}; the same command continues the sweep") from None
    if controller.failure:
        raise SweepFailed(f"{controller.failure}; the same command continues the sweep")
    ended = [journal.status(job) for job in controller.jobs.values() if controller.is_done(job)]
    if len(ended) < len(controller.jobs) or controller.search_goes_on():
        tell(f"sweep     stopped with {len(ended)} of {len(controller.jobs)} jobs done; the same command continues it:")
        tell("          " + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
        return "stopped"
    return "finished" if "finished" in ended else "failed"


def make_executor(plan: Plan, jobs: list[Job]) -> Executor:
    if plan.sweep.executor == "slurm":
        from tabicl_train.sweep.executors.slurm import Slurm

        return Slurm(plan.sweep, plan.folder)
    if plan.sweep.executor == "ray":
        from tabicl_train.sweep.executors.ray import Ray

        return Ray(plan.sweep)
    local = Local(plan.sweep.jobs)
    if problems := {problem for job in jobs if (problem := local.problem(job))}:
        raise ConfigError(sorted(problems))
    return local


def follow(controller: Controller) -> None:
    """Run all jobs; after the end of each, and of all, renew results.csv and the page. Prints the table at the end."""
    folder = controller.plan.folder
    progress, ended, best = Progress(controller), 0, ""
    try:
        for _ in controller.steps():
            if controller.ended > ended:
                ended = controller.ended
                best = renew(folder)
            progress.show(best)
            time.sleep(POLL)
    finally:
        progress.close()
    renew(folder)  # also if no job has run: their metric, or which of them count, may have changed since the last call
    print(table(read_sweep(folder)))


def renew(folder: Path) -> str:
    """Write results.csv and the page; returns the best point in words. What fails here does not end the sweep."""
    sweep = read_sweep(folder)
    try:
        write_csv(sweep)
        if is_installed("matplotlib") and is_installed("jinja2"):
            from tabicl_train.sweep.page import write_page

            write_page(sweep, folder / PAGE)
    except Exception as error:  # whatever is wrong with a picture, jobs are running
        tell(f"warning   {folder / PAGE} cannot be written: {first_line(error)}")
    point = next(iter(rank(sweep)), None)
    if point is None or not math.isfinite(point.mean):
        return ""
    where = ", ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in point.params.items())
    return f"{point.mean:.4f} ({where})" if where else f"{point.mean:.4f}"
