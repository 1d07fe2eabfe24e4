"""An error that ends one process of several becomes one line, known to all of them."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path

from tabicl_train.console import first_line, say
from tabicl_train.errors import ConfigError
from tabicl_train.processes.processes import Processes
from tabicl_train.processes.watch import Failure, ProcessLost
from tabicl_train.run_dir.lock import LostLock


class Stopped(Exception):
    """A stop signal came before the processes had joined: nothing has begun."""


def report(processes: Processes, error: BaseException) -> BaseException:
    """Make an error that ends this process known to the others. Returns what to raise in its place: an exception of one
    line, since the whole stack trace is in a file."""
    watch, rank = processes.watch, processes.rank
    watch.ending_since = time.monotonic()
    if error is processes.common_error and isinstance(error, ConfigError):
        with contextlib.suppress(ProcessLost):
            processes.leave()
        return error
    if error is processes.common_error and rank > 0:
        return ProcessLost(watch.ends_with(Failure(0, "failed")))
    what = "was stopped" if isinstance(error, Stopped) else "failed"
    failure = watch.find_lost(processes.timeout) or Failure(rank, what)
    if not isinstance(error, (ProcessLost, ConfigError, Stopped, LostLock)):
        where = save_trace(processes.log, error)
        if lost := watch.find_cause(error):
            failure, error = lost, ProcessLost(watch.ends_with(lost))
        else:
            message = "; ".join([first_line(error), *getattr(error, "__notes__", [])])
            line = f"{watch.name(rank)} failed: {type(error).__name__}: {message}; the whole trace is in {where}"
            error = ProcessLost(line)
    watch.announce(failure)
    return error


def save_trace(log: Path, error: BaseException) -> Path | str:
    """Append the stack trace of an error to a file, or print it where that cannot be written; returns where it is."""
    trace = "".join(traceback.format_exception(error))
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{trace}\n")
    except OSError:
        say(trace)
        return "the lines above"
    return log
