"""Starts the ranks of a run on this machine with the elastic agent of torch, and reports how they ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.console import print_line
from tabicl_train.doors import plugins
from tabicl_train.run.records import Records
from tabicl_train.run.status import STATUS, read_status, written_status
from tabicl_train.signals import stop_signals
from tabicl_train.training.distributed.processes import OWN, PREEMPTED, SHUTDOWN, SHUTDOWN_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

CONNECTION = re.compile("connection|timed out|gloo|nccl|store", re.IGNORECASE)  # words in errors about another rank


def launch_ranks(devices: int, run_dir: Path) -> int:
    """Run this command as ranks on this machine.

    Parameters
    ----------
    devices : int
        The number of ranks.
    run_dir : Path
        The run directory.

    Returns
    -------
    int
        The exit code of the command: 0 finished, 1 failed, 2 wrong configuration, 75 preempted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from tabicl_train.training.distributed import loopback

    # The agent, which starts the ranks, and restarts none.
    loopback.register_rendezvous()
    signals = stop_signals()
    # Messages of the agent do not always name the first failure.
    logging.disable(logging.CRITICAL)
    run_id = OWN + uuid.uuid4().hex[:12]
    # A variable, since LaunchConfig takes this as an argument only from torch 2.12 on.
    os.environ.setdefault(SHUTDOWN_VARIABLE, str(SHUTDOWN))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=run_id,
        rdzv_backend=loopback.BACKEND,
        max_restarts=0,
        signals_to_handle=",".join(number.name for number in signals),
    )

    # Run them. The agent turns a signal into an exception, and leaves its handlers behind.
    signaled = False
    handlers = {number: signal.getsignal(number) for number in signals}
    try:
        elastic_launch(config, sys.executable)("-m", "tabicl_train", *sys.argv[1:], *plugins.arguments())
    except (SignalException, KeyboardInterrupt):
        signaled = True
    except ChildFailedError as error:
        # The reasons of a wrong configuration were printed by the rank.
        if any(failure.exitcode == 2 for failure in error.failures.values()):
            return 2
        cause = describe_cause(error.failures, run_dir, devices)
        print_line(f"error: {cause}")
        record_cause(cause, run_dir, run_id)
        return 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    # The status of the run says how the ranks ended, since a signal hides their exit codes.
    status = read_status(run_dir) or {}
    if status.get("launch") == run_id:
        if status["status"] == "finished":
            return 0
        if status["status"] == "preempted":
            return PREEMPTED
        if status["status"] == "failed":
            print_line(f"error: {status['cause']}")
            return 1
    if signaled:  # before the run began
        return PREEMPTED
    if status.get("status") == "finished":  # by an earlier launch
        return 0
    print_line("error: all ranks ended with exit code 0 before the end of the run")
    return 1


def record_cause(cause: str, run_dir: Path, run_id: str) -> None:
    """Write the cause of a failure to status.json, where rank 0 may have written that it lost another rank."""
    status = written_status(run_dir)
    if status is not None and status.get("launch") == run_id and status["status"] == "failed":
        with contextlib.suppress(OSError):
            Records(run_dir).replace(STATUS, json.dumps(status | {"cause": cause}) + "\n")


def describe_cause(failures: dict[int, ProcessFailure], run_dir: Path, size: int = 0) -> str:
    """Describe in one line which rank failed first, and how.

    Parameters
    ----------
    failures : dict
        The failures that the agent knows, by rank.
    run_dir : Path
        The run directory, with the stack traces of ranks.
    size : int
        The number of ranks.

    Returns
    -------
    str
        The line.
    """
    # When a rank is lost, others fail too, perhaps with an earlier time in their error files, and the agent sends the
    # rest SIGTERM. So a rank that was killed by another signal comes first, then one whose error is not about a lost
    # connection.
    start = min(failure.timestamp for failure in failures.values())

    def is_sequel(failure: ProcessFailure) -> bool:
        message = message_of(failure)
        return bool(CONNECTION.search(message)) or (failure.exitcode == -signal.SIGTERM and not message)

    def order(rank: int) -> tuple:
        failure = failures[rank]
        is_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        # Perhaps killed by the agent, 30 s after SIGTERM.
        is_late = failure.timestamp > start + 5
        return is_late, not is_killed, is_sequel(failure), failure.timestamp

    # The first rank. The agent knows of no failure of a rank that called os._exit(0).
    rank = min(failures, key=order)
    exited = [other for other in range(size) if other not in failures]
    if exited and is_sequel(failures[rank]):
        return f"rank {exited[0]} ended with exit code 0 before the end of the run"

    # How it failed.
    message = message_of(failures[rank])
    code = failures[rank].exitcode
    if not message and code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    if not message:
        return f"rank {rank} ended with exit code {code}"
    if "imed out" in message:
        message = f"another rank did not answer within trainer.timeout; {message}"
    trace = run_dir / f"rank-{rank}.log"
    if trace.exists():
        message += f"; its stack trace is in {trace}"
    return f"rank {rank} failed: {message}"


def message_of(failure: ProcessFailure) -> str:
    """Return the first line of the error that a rank recorded; empty if it recorded none."""
    if not isinstance(failure.message, dict):
        return ""
    lines = failure.message.get("message", "").splitlines()
    return lines[0] if lines else ""
