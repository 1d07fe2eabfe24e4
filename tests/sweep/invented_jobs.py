"""Jobs that train nothing: they write the files of runs, a few steps at each poll."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

from tabicl_train.callbacks.validation import COLUMNS
from tabicl_train.processes.signals import Stop
from tabicl_train.run_dir.records import Records
from tabicl_train.sweep.controller import Controller
from tabicl_train.sweep.executors.executor import log_file
from tabicl_train.sweep.journal import Journal
from tabicl_train.sweep.plan import Job, make_plan
from tabicl_train.sweep.search import Listed, Study

SETTINGS = ["experiment=smoke", "trainer.max_steps=16", "validation.every=2", "validation.rows=[]"]


class InventedJob:
    """A job of `Invented`; it validates every two steps, and saves every four."""

    def __init__(self, executor: "Invented", job: Job) -> None:
        self.executor, self.job = executor, job
        self.code: int | None = None
        checkpoints = sorted((job.folder / "checkpoints").glob("*.ckpt")) if job.folder.exists() else []
        self.step = int(checkpoints[-1].stem.removeprefix("step-")) if checkpoints else 0
        Records(job.folder).rewind("validation.csv", self.step)
        self.write("running")

    def write(self, status: str) -> None:
        Records(self.job.folder).replace("status.json", json.dumps({"status": status, "step": self.step}))

    def save(self) -> None:
        (self.job.folder / "checkpoints").mkdir(exist_ok=True)
        (self.job.folder / "checkpoints" / f"step-{self.step:08d}.ckpt").touch()

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.advance()
        if self.code is not None:
            self.executor.running.discard(self.job.name)
        return self.code

    def advance(self) -> int | None:
        if (ending := self.executor.accidents(self.job, self.step)) is not None:
            if isinstance(ending, str):
                with open(log_file(self.job), "a") as log:
                    log.write(f"run       here\nerror: {ending}\nmore\n")
                return 1
            return ending
        self.step += 2
        self.executor.steps += 2
        row = dict.fromkeys(COLUMNS) | {"step": self.step, "data": "iris", "rows": 9}
        Records(self.job.folder).append_rows("validation.csv", row | {"loss": self.executor.loss(self.job, self.step)})
        if self.step % 4 == 0:
            self.save()
        if self.step < self.job.config.total_steps:
            return None
        self.write("finished")
        return 0

    def stop(self) -> None:
        self.executor.stopped.append(self.job.name)
        self.save()
        self.write("preempted")
        self.code = 75


class Invented:
    """loss: of a job at a step; accidents: what ends a job at a step, an exit code or a line of error"""

    def __init__(self, loss: Callable = lambda job, step: 1.0, accidents: Callable = lambda job, step: None) -> None:
        self.loss, self.accidents, self.limit = loss, accidents, 2
        self.running: set[str] = set()
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.steps = 0  # of all jobs

    def has_room(self, job: Job) -> bool:
        return len(self.running) < self.limit

    def has(self, job: Job) -> bool:
        return False

    def start(self, job: Job) -> InventedJob:
        self.running.add(job.name)
        self.started.append(job.name)
        return InventedJob(self, job)

    def close(self) -> None:
        pass


def kill_once(step: int, words: str = ""):
    """An accident that happens to the first job whose name has these words."""
    killed = []

    def accident(job: Job, at: int) -> int | None:
        if words in job.name and at == step and not killed:
            killed.append(job.name)
            return -signal.SIGKILL
        return None

    return accident


def controller_of(folder: Path, executor: Invented, *overrides: str, stop: Stop | None = None) -> Controller:
    plan, jobs = make_plan([*SETTINGS, f"run_dir={folder}", *overrides])
    folder.mkdir(parents=True, exist_ok=True)
    listed = plan.points is not None and plan.sweep.pruner == "none"
    search = Listed(plan.points) if listed else Study(plan)
    journal = Journal(folder, lambda: None)
    journal.write_settings(plan.sweep)
    controller = Controller(plan, jobs, executor, search, journal, stop or Stop())
    controller.plan_all()
    return controller


def run(folder: Path, executor: Invented, *overrides: str, polls: int | None = None) -> Controller:
    """Run a sweep of such jobs to its end, or for some polls, after which it is gone."""
    controller = controller_of(folder, executor, *overrides)
    for number, _ in enumerate(controller.steps(), 1):
        controller.looked = 0.0  # at each poll
        if number == polls:
            break
    return controller


def statuses(controller: Controller) -> dict[str, str | None]:
    """By the names of jobs without their fingerprints."""
    return {name[:-9]: controller.journal.status(job) for name, job in controller.jobs.items()}
