"""Runs the jobs of a sweep: starts, watches, resumes and stops them, until all have ended."""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tabicl_train.console import tell
from tabicl_train.distributed.launch import PREEMPTED, describe_exit
from tabicl_train.distributed.signals import Stop
from tabicl_train.run_dir.checkpoint import saved
from tabicl_train.run_dir.lock import FULL_DISK, owner_is_alive
from tabicl_train.run_dir.status import read_status
from tabicl_train.sweep.executors.executor import Executor, Handle, log_file
from tabicl_train.sweep.journal import Journal
from tabicl_train.sweep.metric import curve, last
from tabicl_train.sweep.plan import Job, Plan
from tabicl_train.sweep.search import Listed, Trial

POLL = 0.25  # seconds between looks at the running jobs
LOOK = 2.0  # seconds between looks at their files
RETRIES = 3  # resumes of a job in a row that brought no new checkpoint, after which it counts as failed
FINAL = ("finished", "failed", "pruned")  # a job that ended so has no more to do


@dataclass
class Running:
    """A job that was started.

    checkpoint: the newest one at its start
    log_size: bytes of its log at its start
    why: "pruned" or "stopped" once it was asked to end
    """

    job: Job
    handle: Handle
    checkpoint: str
    log_size: int
    started: float
    why: str = ""


class Controller:
    """jobs: those of the listed points; empty for a search. stop: says when the sweep is to stop

    tell: prints a line; a progress bar puts a function of its own in its place
    """

    def __init__(self, plan: Plan, jobs: list[Job], executor: Executor, search: Listed, journal: Journal, stop: Stop):
        self.plan, self.executor, self.search, self.journal, self.stop = plan, executor, search, journal, stop
        assert plan.sweep.metric is not None
        self.metric = plan.sweep.metric
        self.prunes = plan.sweep.pruner != "none"
        self.composed = jobs
        self.tell = tell
        self.trials: list[Trial] = []
        self.jobs: dict[str, Job] = {}  # all planned ones, by name
        self.waiting: list[Job] = []
        self.running: dict[str, Running] = {}
        self.stalls: dict[str, int] = {}  # starts in a row without a new checkpoint, by job
        self.failure = ""  # why the sweep cannot go on
        self.looked = 0.0
        self.ended = 0  # ends of jobs in this call

    def plan_all(self) -> None:
        """Note all jobs that are known, and those among them that have ended."""
        composed, seeds = iter(self.composed), len(self.plan.sweep.seeds)
        for trial in self.search.known():
            jobs = list(itertools.islice(composed, seeds)) if self.composed else self.plan.jobs_of(trial.point)
            self.add(trial, jobs)
        self.journal.begin([(job, number) for number, trial in enumerate(self.trials) for job in trial.jobs])
        self.waiting = [job for job in self.jobs.values() if not self.has_ended(job)]

    def add(self, trial: Trial, jobs: list[Job]) -> list[Job]:
        """Returns the new ones among its jobs: two points may have equal jobs."""
        new = [job for job in jobs if job.name not in self.jobs]
        self.jobs |= {job.name: job for job in new}
        trial.jobs = [self.jobs[job.name] for job in jobs]
        self.trials.append(trial)
        return new

    def add_later(self, trial: Trial) -> None:
        """A point that the search has proposed."""
        for job in self.add(trial, self.plan.jobs_of(trial.point)):
            self.journal.planned(job, len(self.trials) - 1)
            if not self.has_ended(job):
                self.waiting.append(job)

    def is_done(self, job: Job) -> bool:
        """Whether the job will not run any more."""
        return job not in self.waiting and job.name not in self.running and self.journal.status(job) in FINAL

    def has_ended(self, job: Job) -> bool:
        """Whether the job is done with, from its own folder and the journal."""
        status = self.journal.status(job)
        again = (status == "failed" and self.plan.sweep.retry_failed) or (status == "pruned" and not self.prunes)
        if status in FINAL and not again:
            return True
        if job.problem:
            self.journal.ended(job, "failed", job.problem)
            return True
        if (read_status(job.folder) or {}).get("status") == "finished" and not owner_is_alive(job.folder):
            self.journal.ended(job, "finished")
            return True
        return False

    def steps(self) -> Iterator[None]:
        """Yields whenever there is time to do something else, until all jobs have ended or stopped."""
        while True:
            stopping = self.stop.asked or bool(self.failure)
            if stopping:
                self.stop_all()
            self.collect()
            if self.prunes and time.monotonic() - self.looked >= LOOK:
                self.looked = time.monotonic()
                self.prune()
            self.tell_trials()
            if not stopping:
                self.start_jobs()
            if not self.running and (stopping or not self.waiting):
                return
            yield

    def start_jobs(self) -> None:
        while not (self.stop.asked or self.failure):
            job = next((job for job in self.waiting if not self.is_busy(job)), None)
            if job is None:
                if self.waiting or (self.running and not self.has_room_for_more()):
                    return
                trial = self.search.next()
                if trial is None:
                    return
                self.add_later(trial)
                self.tell_trials()
                continue
            if not self.executor.has_room(job):
                return
            self.waiting.remove(job)
            self.start(job)

    def search_goes_on(self) -> bool:
        """Whether the search would propose more points."""
        return self.plan.points is None and len(self.trials) < self.plan.sweep.trials

    def has_room_for_more(self) -> bool:
        """Whether a further job like those that run could start."""
        return self.executor.has_room(next(iter(self.running.values())).job)

    def is_busy(self, job: Job) -> bool:
        """Whether another process trains it, one that is ending or was started by hand."""
        return owner_is_alive(job.folder) and not self.executor.has(job)

    def start(self, job: Job) -> None:
        if self.has_ended(job):  # in the meantime, in another process
            return
        job.folder.mkdir(parents=True, exist_ok=True)
        newest = newest_checkpoint(job)
        log_size = log_file(job).stat().st_size if log_file(job).exists() else 0
        handle = self.executor.start(job)
        self.running[job.name] = Running(job, handle, newest, log_size, time.monotonic())
        self.journal.started(job)
        self.tell(f"resume    {job.name} ({newest})" if newest else f"start     {job.name}")

    def stop_all(self) -> None:
        for running in self.running.values():
            if not running.why:
                running.why = "stopped"
                running.handle.stop()

    def end_all(self) -> None:
        """Stop all jobs and wait for them, without a note: what prevents the sweep from going on may prevent that."""
        self.stop_all()
        while self.running:
            self.running = {name: running for name, running in self.running.items() if running.handle.poll() is None}
            time.sleep(POLL)

    def collect(self) -> None:
        """Note the ends of jobs."""
        for name, running in list(self.running.items()):
            code = running.handle.poll()
            if code is not None:
                del self.running[name]
                self.end(running, code)
                self.ended += 1

    def end(self, running: Running, code: int) -> None:
        job = running.job
        if running.why == "pruned":
            return  # its end is noted already
        status = (read_status(job.folder) or {}).get("status")
        if code == 0 and status == "finished":
            self.journal.ended(job, "finished")
            value = last(job.folder, self.metric)
            seconds = time.monotonic() - running.started
            shown = "" if value is None else f"{self.metric} {value:.4f}, "
            self.tell(f"finished  {job.name}: {shown}{seconds:.0f} s")
            return
        killed = code <= 0 or 128 < code < 128 + signal.NSIG
        if code == PREEMPTED or killed:
            self.resume_later(running, code)
            return
        reason = reason_of(job, running.log_size) or f"exit code {code}"
        # On a full disk the next jobs would fail as well, and this one is not to blame.
        if any(os.strerror(number) in reason for number in FULL_DISK):
            self.failure = f"{job.name}: {reason}"
            self.journal.ended(job, "interrupted", reason)
            self.waiting.insert(0, job)
            return
        self.journal.ended(job, "failed", reason)
        self.tell(f"failed    {job.name}: {reason}")

    def resume_later(self, running: Running, code: int) -> None:
        """A job has ended before its last step, because it was asked to or killed."""
        job = running.job
        how = "stopped" if code == PREEMPTED else describe_exit(code if code < 128 else 128 - code)
        if not running.why:
            stalled = newest_checkpoint(job) == running.checkpoint
            self.stalls[job.name] = self.stalls.get(job.name, 0) + 1 if stalled else 0
            if self.stalls[job.name] > RETRIES:
                reason = f"{how}, and {RETRIES} times more without a new checkpoint"
                self.journal.ended(job, "failed", reason)
                self.tell(f"failed    {job.name}: {reason}")
                return
        self.journal.ended(job, "interrupted", how)
        self.waiting.insert(0, job)
        self.tell(f"stopped   {job.name}: {how}" + ("" if running.why else "; it goes on"))

    def prune(self) -> None:
        """Stop trials that do worse than others. They are judged by their first seed, so that equal ones are compared,
        and so that the other seeds of a poor point need not start."""
        for trial in self.trials:
            first = trial.jobs[0]
            if trial.told or first.config is None or self.is_done(first):
                continue
            values = [(step, v) for step, v in curve(first.folder, self.metric) if step < first.config.total_steps]
            if self.search.should_stop(trial, values):
                self.prune_trial(trial, values[-1])

    def prune_trial(self, trial: Trial, point: tuple[int, float]) -> None:
        reason = f"{self.metric} {point[1]:.4f} at step {point[0]}"
        for job in trial.jobs:
            if any(job in other.jobs for other in self.trials if other is not trial and not other.told):
                continue
            if self.is_done(job):
                continue
            self.journal.ended(job, "pruned", reason)
            if job in self.waiting:
                self.waiting.remove(job)
            if job.name in self.running:
                self.running[job.name].why = "pruned"
                self.running[job.name].handle.stop()
        self.tell(f"pruned    {trial.jobs[0].name}: {reason}")
        self.search.tell(trial, "pruned", math.nan)

    def tell_trials(self) -> None:
        """Tell the search about trials whose jobs have all ended."""
        for trial in self.trials:
            if trial.told or not all(map(self.is_done, trial.jobs)):
                continue
            statuses = [self.journal.status(job) for job in trial.jobs]
            values = [value for job in trial.jobs if (value := last(job.folder, self.metric)) is not None]
            whole = statuses == ["finished"] * len(statuses) and len(values) == len(statuses)
            status = "finished" if whole else "pruned" if "pruned" in statuses else "failed"
            self.search.tell(trial, status, statistics.fmean(values) if whole else math.nan)


def newest_checkpoint(job: Job) -> str:
    """The name of the newest checkpoint, empty without any."""
    files = saved(job.folder / "checkpoints")
    return files[-1].name if files else ""


def reason_of(job: Job, log_size: int) -> str:
    """Why a job has failed: its first line of error since its start, else its last line."""
    try:
        with open(log_file(job), "rb") as file:
            file.seek(log_size)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines[-1:] or [""])[0]
