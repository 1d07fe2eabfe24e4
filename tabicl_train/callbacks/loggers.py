"""What a run logs outside its own files: to Weights and Biases and to TensorBoard.

Logged are the columns of metrics.csv under their names, multiplier/LAYER of scaling.csv, and of validation.csv
validation/DATA_ROWS/SCORE, validation/NAME/SCORE of public real data and validation/mean/KIND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tabicl_train.console import first_line, info

Log = Callable[[dict[str, Any], int], None]  # logs values by name, after a number of steps


class Loggers:
    """Log to several loggers, none of which can end a run: one that raises an error is dropped, with one warning.

    Each has a `name` and the two methods of this class. The first values open them, when all workers are forked.
    """

    def __init__(self, loggers: Iterable[Any] = ()) -> None:
        self.loggers = list(loggers)

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log values by name, after so many optimizer steps: numbers, and texts, which a logger may leave out."""
        self._call("log_metrics", values, step)

    def close(self, exit_code: int = 0) -> None:
        """Write or upload what was logged, as that of a failed run if the exit code is not 0."""
        self._call("close", exit_code)
        self.loggers = []

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # wandb has many of its own, and a run is worth more than its log
                info(f"warning   {logger.name}: nothing more is logged: {first_line(error)}")
                self.loggers.remove(logger)
