"""Runs a sweep: asks the study for points, runs them as jobs, and reports their results to it."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import Trial, TrialState
from tqdm import tqdm

from tabicl_train.config.compose import hydra_text
from tabicl_train.console import counted, first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import make_folder
from tabicl_train.run.status import RunLock, read_status
from tabicl_train.signals import Stop, watch_signals
from tabicl_train.sweep import jobs
from tabicl_train.sweep.comparable import shared_in_words, warning_of
from tabicl_train.sweep.compare import compare_points, write_comparison
from tabicl_train.sweep.metric import counted_data_sets, curve, last_value
from tabicl_train.sweep.plan import Plan
from tabicl_train.sweep.results import Sweep, write_page
from tabicl_train.sweep.space import rounded_text, short_names
from tabicl_train.sweep.study import RUNS, has_more, open_study, start_trial
from tabicl_train.training.distributed.processes import start_command

POLL = 0.5  # seconds between checks of the jobs
DRAW = 60.0  # seconds between pages while the sweep runs


@dataclass(eq=False)
class ActiveRun:
    """A run of a trial."""

    folder: Path
    arguments: list[str]
    job: jobs.Job | None = None  # while the run is in progress
    slot: str | None = None  # likewise
    began: float = 0.0  # seconds, when the job began in this call of the sweep
    was_killed: bool = False  # whether it was killed once already and started again
    value: float | None = None  # the metric at the end, nan if the run has failed
    reason: str = ""  # why the run has failed


class ActiveTrial:
    """A trial whose runs have not all ended."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial = trial
        self.reported = 0  # number of validations that the pruner knows
        self.pruned = ""  # why the pruner has stopped it
        self.runs = []
        for name, _seed, arguments in trial.user_attrs[RUNS]:
            run_dir = folder / name
            self.runs.append(ActiveRun(run_dir, [*arguments, f"run_dir={hydra_text(str(run_dir.absolute()))}"]))

    @property
    def running(self) -> list[tuple[ActiveRun, jobs.Job]]:
        """The runs that have a job, with their jobs."""
        return [(run, run.job) for run in self.runs if run.job is not None]


class Controller:
    """Runs the trials of a sweep until they have ended, or until a signal asks to stop.

    Parameters
    ----------
    plan : Plan
        The sweep. This process holds the lock of its folder.
    stop : Stop
        Whether a signal has asked to stop.
    """

    def __init__(self, plan: Plan, stop: Stop) -> None:
        assert plan.sweep.metric is not None
        self.plan = plan
        self.stop = stop
        self.metric = plan.sweep.metric
        self.study = open_study(plan)
        self.data_sets = counted_data_sets(self.study)
        self.free = jobs.slots(plan)  # slots without a run
        self.at_once = len(self.free)
        self.prunes = plan.sweep.pruner != "none"
        self.active: list[ActiveTrial] = []
        self.seconds: list[float] = []  # duration of each run that has ended in this call
        self.stopping = False  # whether the runs have been told to stop
        self.page_written = -math.inf  # seconds, when the page was last written

    @property
    def is_whole(self) -> bool:
        """Whether all trials have ended."""
        open_trials = self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        return not open_trials and not has_more(self.plan, self.study)

    def run(self) -> bool:
        """Run all trials; returns whether all of them have ended."""
        # Trials of an earlier call. Some of their runs may still be running, and are adopted.
        for frozen in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            active = ActiveTrial(start_trial(self.plan, self.study, frozen), self.plan.folder)
            self.active.append(active)
            for run in active.runs:
                job = jobs.running_job(run.folder, self.plan.sweep.submit.cluster)
                if job is not None:
                    info(f"adopt     {run.folder.name}, which an earlier call has started")
                    self.begin(run, job)

        # Watch the jobs and start others in free slots, until none is left. Once asked to stop, no others are started.
        while True:
            if self.stop.asked and not self.stopping:
                self.stopping = True
                for active in self.active:
                    self.stop_jobs(active)
            for active in list(self.active):
                self.look(active)
            if not self.stopping:
                self.start()
            if not any(active.running for active in self.active):
                return self.is_whole
            time.sleep(POLL)

    def start(self) -> None:
        """Start runs as long as there are free slots."""
        while self.free:
            next_run = self.next_run()
            if next_run is None:
                return
            active, run = next_run
            status = read_status(run.folder)
            if status is not None and status.get("status") == "finished":
                # An earlier call started the run and was killed before it could report it to the study.
                self.end(run)
                self.tell_if_ended(active)
                continue
            verb = "resume" if run.folder.exists() else "start"
            info(f"{verb:9} {run.folder.name}")
            self.begin(run, jobs.submit_run(self.plan, run.arguments, run.folder, self.free[0], self.at_once))

    def begin(self, run: ActiveRun, job: jobs.Job) -> None:
        """Mark a run as running. It takes the first free slot; for an adopted run there may be none."""
        run.job = job
        run.slot = self.free.pop(0) if self.free else None
        run.began = time.monotonic()

    def next_run(self) -> tuple[ActiveTrial, ActiveRun] | None:
        """Return a run that can start, perhaps of a new trial, or None.

        With a pruner, the other seeds of a trial wait until its first one has ended.
        """
        for active in self.active:
            if active.pruned:
                continue
            candidates = active.runs
            if self.prunes and candidates[0].value is None:
                candidates = candidates[:1]
            for run in candidates:
                if run.job is None and run.value is None:
                    return active, run
        if not has_more(self.plan, self.study):
            return None
        active = ActiveTrial(start_trial(self.plan, self.study), self.plan.folder)
        self.active.append(active)
        return active, active.runs[0]

    def look(self, active: ActiveTrial) -> None:
        """Check which jobs of a trial have ended, and whether the trial has ended or should be pruned."""
        for run, job in active.running:
            if job.has_ended():
                run.job = None
                if run.slot is not None:
                    self.free.append(run.slot)
                self.end(run, job.error(), was_asked=self.stopping or bool(active.pruned))
        if self.prunes and not active.pruned and active.runs[0].job is not None:
            self.prune(active)
        self.tell_if_ended(active)

    def tell_if_ended(self, active: ActiveTrial) -> None:
        """Report a trial to the study once all of its runs have ended. To be called after every `end`."""
        if active.pruned and not active.running:
            self.tell(active, TrialState.PRUNED, active.pruned)
        elif all(run.value is not None for run in active.runs):
            reasons = [f"{run.folder.name}: {run.reason}" for run in active.runs if run.reason]
            state = TrialState.FAIL if reasons else TrialState.COMPLETE
            self.tell(active, state, "; ".join(reasons))

    def end(self, run: ActiveRun, error: str = "", was_asked: bool = False) -> None:
        """Determine whether a run whose job has ended has finished, has failed, or will be continued.

        Parameters
        ----------
        run : ActiveRun
            The run.
        error : str, optional
            The first error in the output of its job.
        was_asked : bool, optional
            Whether the sweep told it to stop.
        """
        status = read_status(run.folder) or {"status": "killed"}

        # It has finished, and counts if its metric is finite.
        if status["status"] == "finished":
            value = last_value(run.folder, self.metric, self.data_sets)
            if value is None or not math.isfinite(value):
                run.value = math.nan
                run.reason = f"{self.metric} is {value}"
            else:
                run.value = value
                if run.began:
                    self.seconds.append(time.monotonic() - run.began)
                info(f"finished  {run.folder.name}: {self.metric} {value:.4f}{self.progress()}")

        # It was killed from outside for the first time, and starts again.
        elif status["status"] == "killed" and not (was_asked or error or run.was_killed):
            run.was_killed = True
            info(f"killed    {run.folder.name}; it is continued once")

        # It has failed. A run that was told to stop, or preempted, is continued without a message.
        elif not was_asked and (error or status["status"] != "preempted"):
            run.value = math.nan
            run.reason = error or status.get("cause") or "it was killed"

        if run.reason:
            info(f"failed    {run.folder.name}: {run.reason}")

    def progress(self) -> str:
        """Return how many runs are left and the estimated time for them, as the end of a line."""
        left = 0
        for active in self.active:
            left += sum(other.value is None for other in active.runs)
        # Runs of the trials that have not begun.
        left += (self.plan.total - len(self.study.get_trials(deepcopy=False))) * len(self.plan.sweep.seeds)
        if not left or not self.seconds:
            return ""
        time_left = statistics.fmean(self.seconds) * left / self.at_once
        return f"; {counted(left, 'run')} left, about {tqdm.format_interval(time_left)}"

    def prune(self, active: ActiveTrial) -> None:
        """Stop a trial if the pruner says so after the validations of its first seed so far."""
        validations = curve(active.runs[0].folder, self.metric, self.data_sets)
        for step, value in validations[active.reported :]:
            active.reported += 1
            active.trial.report(value, step)
            if active.trial.should_prune():
                active.pruned = f"{self.metric} {value:.4f} at step {step}"
                info(f"pruned    {active.runs[0].folder.name}: {active.pruned}")
                self.stop_jobs(active)
                return

    def stop_jobs(self, active: ActiveTrial) -> None:
        for _, job in active.running:
            job.stop()

    def tell(self, active: ActiveTrial, state: TrialState, reason: str) -> None:
        """Report to the study how a trial has ended, and update the results."""
        self.active.remove(active)
        if reason:
            active.trial.set_user_attr("reason", reason)
        mean = None
        if state == TrialState.COMPLETE:
            mean = statistics.fmean(run.value for run in active.runs if run.value is not None)
        self.study.tell(active.trial, mean, state)
        self.write(page=time.monotonic() - self.page_written >= DRAW)

    def write(self, page: bool = True) -> Sweep:
        """Update results.csv and the page. An error while drawing does not end the sweep."""
        sweep = Sweep(self.plan.folder)
        sweep.write_csv()
        if page:
            self.page_written = time.monotonic()
            try:
                write_page(sweep)
            except Exception as error:
                info(f"warning   the page of the sweep cannot be written: {first_line(error)}")
        return sweep


def run_sweep(plan: Plan) -> str:
    """Start or continue a sweep, and print its table.

    Returns
    -------
    str
        finished, failed (no point has finished) or preempted.

    Raises
    ------
    ConfigError
        If another process runs the sweep, its folder belongs to another sweep, or a job cannot be submitted.
    """
    make_folder("run_dir", plan.folder)
    lock = RunLock(plan.folder)
    lock.acquire()
    try:
        with watch_signals() as stop:
            controller = Controller(plan, stop)
            was_whole = controller.is_whole

            # What the user should know before hours of training; not when only the results are shown again.
            if plan.sweep.sampler == "grid" and not was_whole:
                shared = shared_of_plan(plan)
                if shared is not None:
                    info(f"tables    {shared}")
            warning = warning_of(controller.metric, plan.incomparable, plan.folder)
            if warning is not None and not was_whole:
                info(f"warning   {warning}")

            is_whole = controller.run()
            sweep = controller.write()
    finally:
        lock.release()
    print(sweep.text())
    show_comparison(sweep, announce=not was_whole)
    if not is_whole:
        info(f"sweep     preempted; the same command continues it{start_command()}")
        return "preempted"
    return "finished" if sweep.ranked else "failed"


def shared_of_plan(plan: Plan) -> str | None:
    """Return a sentence about which points of a grid are trained on identical tables; None for a single point."""
    short = short_names([axis.key for axis in plan.axes])
    names = []
    for point in plan.points:
        settings = [f"{short[key]}={rounded_text(value)}" for key, value in point.items()]
        names.append(", ".join(settings))
    return shared_in_words(names, [dataclasses.asdict(config) for config in plan.configs])


def show_comparison(sweep: Sweep, announce: bool) -> None:
    """Print and write the comparison of the points of a grid. An error in it does not change how the sweep ends.

    Parameters
    ----------
    sweep : Sweep
        The sweep.
    announce : bool
        Whether to name the files.
    """
    try:
        compared = compare_points(sweep)
        if compared is not None:
            print(f"\n{compared.text}")
            written = write_comparison(sweep.folder, compared, overwrite=True)
            if announce:
                for line in written:
                    info(line)
    except ConfigError as error:
        info(f"warning   the points cannot be compared: {first_line(error)}")
