"""Lets SLURM restart the job of a preempted run."""

from __future__ import annotations

import os
import re
import subprocess

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import info


def requeue(settings: TrainerConfig) -> None:
    """With `trainer.requeue`, let SLURM restart this job. This comes last, since SLURM then ends the job."""
    job = os.environ.get("SLURM_JOB_ID")
    # In an array, scontrol takes SLURM_JOB_ID for the whole array.
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not settings.requeue or job is None:
        return
    # A job that the user has canceled is not running; SLURM would restart it all the same.
    try:
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
        state = re.search(r"JobState=(\w+)", shown.stdout)
        if state and state[1] != "RUNNING":
            outcome = f"not requeued: it is {state[1]}"
        else:
            result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
            outcome = "requeued" if result.returncode == 0 else f"not requeued: {result.stderr.strip()}"
    except OSError as error:
        # A container may lack SLURM's commands. The checkpoint is saved anyway.
        outcome = f"not requeued: {error}"
    info(f"stop      SLURM job {job} is {outcome}")
