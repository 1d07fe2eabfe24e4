"""A SLURM job that asks to be started again."""

from __future__ import annotations

import os
import re
import subprocess

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import info


def requeue(settings: TrainerConfig) -> None:
    """With `trainer.requeue`, have SLURM start this job again; one process of a run calls this, as its last act, since
    SLURM then ends the job.

    SLURM would also start a job again that a user has canceled: it is ending by then, and no longer running.
    """
    job = job_of_this_process()
    if not settings.requeue or job is None:
        return
    try:
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
        state = re.search(r"JobState=(\w+)", shown.stdout)
        if state and state[1] != "RUNNING":
            outcome = f"not requeued: it is {state[1]}"
        else:
            result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
            outcome = "requeued" if result.returncode == 0 else f"not requeued: {result.stderr.strip()}"
    except OSError as error:  # such as in a container without SLURM's commands; the checkpoint is saved all the same
        outcome = f"not requeued: {error}"
    info(f"stop      SLURM job {job} is {outcome}")


def job_of_this_process() -> str | None:
    """The number of the SLURM job, as ARRAY_INDEX in an array, or None outside of SLURM.

    The number in SLURM_JOB_ID is that of the whole array in one of its jobs: to scontrol it means all of them.
    """
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")
