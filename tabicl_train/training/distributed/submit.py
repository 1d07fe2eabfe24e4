"""Runs as submitit jobs, on SLURM or on this machine; a job saves a checkpoint at its time limit and is restarted.

A job imports this file before it starts the run, so slow imports are inside functions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabicl_train.errors import ConfigError
from tabicl_train.outputs import naming
from tabicl_train.signals import SIGNALS
from tabicl_train.training.distributed.processes import PREEMPTED, SHUTDOWN, SHUTDOWN_VARIABLE

WARNING = 300  # seconds before the time limit at which the run is asked to stop: enough for a step and a checkpoint
ALWAYS = 1_000_000  # number of times that submitit may restart a job; its own limit is 3
FOREVER = 10 * 365 * 24 * 60  # minutes; by default, submitit ends a local job after two
GPU_WORKERS = 8  # workers per GPU of a job, with a core for each, unless stream.num_workers is set
PROGRAM = ("-m", "tabicl_train")


class Training:
    """What a job runs on each of its machines: `tabicl-train ARGUMENTS`, with torchrun if there are several.

    submitit calls `checkpoint` on the first machine before the time limit, and starts the job again afterward.

    Parameters
    ----------
    arguments : list of str
        The arguments of tabicl-train.
    nodes : int
        The number of machines.
    processes : int
        The number of ranks on each machine.
    variables : dict, optional
        Environment variables to set.
    """

    def __init__(self, arguments: list[str], nodes: int = 1, processes: int = 1, variables: dict | None = None) -> None:
        self.arguments = arguments
        self.nodes = nodes
        self.processes = processes
        self.variables = variables or {}
        self.program = PROGRAM
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def __call__(self) -> None:
        """Run the command until it ends; raises RuntimeError if it fails."""
        # SLURM signals all processes of a job, and submitit's signal, SIGUSR2, would kill the run: it must ignore it.
        submitit_signal = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        # Start it in its own process group: ctrl-C together with the stop signal of a sweep would kill it.
        variables = {SHUTDOWN_VARIABLE: str(SHUTDOWN)} | os.environ | self.variables
        self.process = subprocess.Popen(self.command(), env=variables, stdin=subprocess.DEVNULL, process_group=0)
        signal.signal(signal.SIGUSR2, submitit_signal)
        if self.stopped:  # before there was a process
            self.process.send_signal(signal.SIGTERM)

        # Wait for its end.
        self.wait()
        code = self.process.wait()
        # Torchrun ends with 1 after a signal.
        if code not in (0, PREEMPTED) and not self.stopped:
            raise RuntimeError(f"tabicl-train ended with exit code {code}, see above")

    def command(self) -> list[str]:
        """Return the command for this machine."""
        run = [*self.program, *self.arguments]
        if self.nodes == 1:
            if self.processes > 1:
                run.append(f"trainer.devices={self.processes}")
            return [sys.executable, *run]
        # The elastic agents of several machines meet at the first one.
        import submitit

        job = submitit.JobEnvironment()
        job_number, _, _ = job.job_id.partition("_")
        # Jobs that share a machine have different ports, below the ephemeral ones.
        port = 15_000 + int(job_number) % 15_000
        agent = [
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.processes}",
            f"--rdzv-id={job.job_id}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={job.hostnames[0]}:{port}",
            f"--signals-to-handle={','.join(number.name for number in SIGNALS)}",
        ]
        return [sys.executable, "-m", "torch.distributed.run", *agent, *run]

    def checkpoint(self) -> Any:
        """Stop the run, which saves a checkpoint; returns the job to submit next."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        self.wait()
        return DelayedSubmission(Training(self.arguments, self.nodes, self.processes, self.variables))

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the process. Unlike Popen.wait, this can be called in a signal handler that interrupts it."""
        if self.process is not None:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


def submit_job(arguments: list[str], options: Any, folder: Path, cpus: int = 1, **variables: str) -> Any:
    """Submit `tabicl-train ARGUMENTS` as a job.

    Parameters
    ----------
    arguments : list of str
        The arguments of tabicl-train.
    options : SubmitOptions
        The options of the job.
    folder : Path
        Where submitit keeps the files of the job.
    cpus : int
        Cores for each rank.
    **variables : str
        Environment variables to set.

    Returns
    -------
    submitit.Job
        The job.

    Raises
    ------
    ConfigError
        If it cannot be submitted.
    """
    import submitit

    # What the job asks for.
    processes = max(1, options.gpus)
    is_local = options.cluster == "local"
    minutes = FOREVER if is_local else max(1, round(60 * options.hours))
    parameters = {
        "name": "tabicl",
        "nodes": options.nodes,
        "tasks_per_node": 1,  # the elastic agent starts the ranks
        "gpus_per_node": options.gpus,
        "cpus_per_task": cpus * processes,
        "timeout_min": minutes,
        "stderr_to_stdout": True,
        "slurm_signal_delay_s": min(WARNING, 30 * minutes),
        "slurm_additional_parameters": dict(options.sbatch or {}),
    }
    if options.partition is not None:
        parameters["slurm_partition"] = options.partition

    # Submit it. A local job inherits that SIGINT is ignored; otherwise submitit would kill the run within a second of
    # ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_local else None
    try:
        executor = submitit.AutoExecutor(folder, cluster=options.cluster, slurm_max_num_timeout=ALWAYS)
        executor.update_parameters(**parameters)
        with naming(folder):
            return executor.submit(Training(arguments, options.nodes, processes, variables))
    except (RuntimeError, OSError, ValueError, submitit.core.utils.FailedSubmissionError) as error:
        raise ConfigError([f"the job cannot be submitted: {error}"]) from None
    finally:
        if is_local:
            signal.signal(signal.SIGINT, handler)
