"""A SLURM job that asks to be started again."""

from __future__ import annotations

import os
import re
import subprocess

from tabicl_train.config.schema import TrainerConfig
from tabicl_train.console import tell


def requeue(settings: TrainerConfig) -> None:
    """With `trainer.requeue`, have SLURM start this job again; one process of a run calls this, as its last act, since
    SLURM then ends the job.

    SLURM would also start a job again that a user has cancelled: it is ending by then, and no longer running.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not settings.requeue or job is None:
        return
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    state = re.search(r"JobState=(\w+)", shown.stdout)
    if state and state[1] != "RUNNING":
        tell(f"stop      SLURM job {job} is not requeued: it is {state[1]}")
        return
    result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    outcome = "requeued" if result.returncode == 0 else f"not requeued: {result.stderr.strip()}"
    tell(f"stop      SLURM job {job} is {outcome}")
