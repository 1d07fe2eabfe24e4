"""What a run logs outside its own files: to Weights and Biases and to TensorBoard.

Logged are the columns of metrics.csv under their names, multiplier/LAYER of scaling.csv, and of validation.csv
validation/DATA_ROWS/SCORE, validation/NAME/SCORE of public real data and validation/mean/KIND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tabicl_train.console import first_line, info

__all__ = ["Loggers"]

Log = Callable[[dict[str, Any], int], None]  # logs values by name, after a number of steps


class Loggers:
    """Log to several loggers, none of which can end a run: one that raises an error is dropped, with one warning.

    Parameters
    ----------
    loggers : iterable
        Objects with a `name` and the two methods of this class; none on all ranks but the first. The first values open
        them, when all workers are forked.
    """

    def __init__(self, loggers: Iterable[Any] = ()) -> None:
        self.loggers = list(loggers)

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values by name, after so many optimizer steps.

        Parameters
        ----------
        values : dict
            Numbers, and texts, which a logger may leave out.
        step : int
            Optimizer steps done.
        """
        self._call("log_metrics", values, step)

    def close(self, exit_code: int = 0) -> None:
        """Write or upload what was logged; a second call does nothing.

        Parameters
        ----------
        exit_code : int
            0 if the run has finished or was preempted; otherwise it is shown as failed where that is possible.
        """
        self._call("close", exit_code)
        self.loggers = []

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # wandb has many of its own, and a run is worth more than its log
                info(f"warning   {logger.name}: nothing more is logged: {first_line(error)}")
                self.loggers.remove(logger)
