"""What a run logs outside its own files: to Weights and Biases and to TensorBoard.

Logged are the columns of metrics.csv under their names, multiplier/LAYER of scaling.csv, and of validation.csv
validation/DATA_ROWS/SCORE, validation/NAME/SCORE of public real data and validation/mean/KIND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tabicl_train.console import first_line, info

__all__ = ["Logger", "Loggers"]

Log = Callable[[dict[str, Any], int], None]  # logs values by name, after a number of steps


class Logger(Protocol):
    """Where values are logged; the first ones open it."""

    name: str

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values.

        Parameters
        ----------
        values : dict
            Values by name; texts may be left out.
        step : int
            Optimizer steps done.
        """

    def close(self, exit_code: int = 0) -> None:
        """Write or upload what was logged, and close the logger if it was opened.

        Parameters
        ----------
        exit_code : int
            0 if the run has finished or was preempted; otherwise it is shown as failed where that is possible.
        """


class Loggers:
    """The loggers of a run, none of which can end it: one that raises an error is dropped, with one warning.

    Parameters
    ----------
    loggers : iterable of Logger
        None on all ranks but the first.
    """

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self.loggers = list(loggers)

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Call `Logger.log_metrics` of all loggers."""
        self._call("log_metrics", values, step)

    def close(self, exit_code: int = 0) -> None:
        """Call `Logger.close` of all loggers; a second call does nothing."""
        self._call("close", exit_code)
        self.loggers = []

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # wandb has many of its own, and a run is worth more than its log
                info(f"warning   {logger.name}: nothing more is logged: {first_line(error)}")
                self.loggers.remove(logger)
