"""Runs as SLURM jobs, submitted from Python by submitit; a job saves a checkpoint at its time limit and starts anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabicl_train.config.arguments import parse
from tabicl_train.config.compose import compose
from tabicl_train.config.options import SubmitOptions
from tabicl_train.config.schema import RunConfig
from tabicl_train.distributed.launch import PREEMPTED
from tabicl_train.distributed.signals import PARENT
from tabicl_train.errors import ConfigError

WARNING = 300  # seconds before the time limit at which the run is asked to stop: enough for a step and a checkpoint
GPU_WORKERS = 8  # that a job has for each GPU, and cores for them, if stream.num_workers does not say
ALWAYS = 1_000_000  # times that submitit starts a job again; its own limit is 3


class Training:
    """What each task of a job does: `tabicl-train ARGUMENTS`, as a rank of the run.

    submitit calls `checkpoint` on the first task before the time limit, and has SLURM start the job again after it.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.process: subprocess.Popen | None = None

    def __call__(self) -> None:
        """Raises RuntimeError if the run fails."""
        # SLURM signals all processes of a task. submitit's signal, SIGUSR2, would end the run at once.
        submitit_signal = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tabicl_train", *self.arguments], env=os.environ | {PARENT: str(os.getpid())}
        )
        signal.signal(signal.SIGUSR2, submitit_signal)
        signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop())  # on scancel
        self.wait()
        code = self.process.wait()
        if code not in (0, PREEMPTED):
            raise RuntimeError(f"tabicl-train ended with exit code {code}, see above")

    def checkpoint(self) -> Any:
        """Have the run save its state and end; returns what to do when the job starts again."""
        from submitit.helpers import DelayedSubmission

        self.ask_to_stop()
        self.wait()
        return DelayedSubmission(Training(self.arguments))

    def ask_to_stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Unlike Popen.wait, it can be called by a signal handler that interrupts it."""
        if self.process is not None:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


def check_submission(own: list[str], settings: list[str]) -> tuple[SubmitOptions, RunConfig]:
    """The options of a job, from arguments of the form submit.KEY=VALUE, and the configuration of its run.

    Raises ConfigError with the problems of both.
    """
    problems, options, config = [], None, None
    try:
        options = parse(SubmitOptions, [text.removeprefix("submit.") for text in own])
        problems += [f"submit.{problem}" for problem in options.problems()]
    except ConfigError as error:
        problems += [f"submit.{problem}" for problem in error.problems]
    try:
        config = compose(settings)
        problems += config.too_few_tables(options.nodes * max(1, options.gpus)) if options else []
        problems += [
            f"trainer.{name} is {value}; leave it out, submit.{option} decides"
            for name, option in (("nodes", "nodes"), ("devices", "gpus"))
            if (value := getattr(config.trainer, name)) is not None and options
        ]
    except ConfigError as error:
        problems += error.problems
    if problems or options is None or config is None:
        raise ConfigError(problems)
    return options, config


def submit(arguments: list[str], options: SubmitOptions, folder: Path, cpus: int = 1) -> Any:
    """Submit `tabicl-train ARGUMENTS` as a job; returns submitit's job. Its messages go to files in `folder`.

    cpus: processor cores for each process
    Raises ConfigError if the job cannot be submitted.
    """
    import submitit

    minutes = max(1, round(60 * options.hours))
    parameters = {
        "name": "tabicl",
        "nodes": options.nodes,
        "tasks_per_node": max(1, options.gpus),
        "gpus_per_node": options.gpus,
        "cpus_per_task": cpus,
        "timeout_min": minutes,
        "stderr_to_stdout": True,
        "slurm_signal_delay_s": min(WARNING, 30 * minutes),
        "slurm_additional_parameters": dict(options.sbatch or {}),
    }
    if options.partition is not None:
        parameters["slurm_partition"] = options.partition
    try:
        executor = submitit.AutoExecutor(folder, cluster=options.cluster, slurm_max_num_timeout=ALWAYS)
        executor.update_parameters(**parameters)
        return executor.submit(Training(arguments))
    except (RuntimeError, OSError, submitit.core.utils.FailedSubmissionError) as error:
        raise ConfigError([f"the job cannot be submitted: {error}"]) from None
