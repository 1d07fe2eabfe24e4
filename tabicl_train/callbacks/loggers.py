"""What a run logs outside its own files: to Weights and Biases and to TensorBoard, see `Loggers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tabicl_train.config.monitoring import REAL, kind_of
from tabicl_train.console import first_line, info

Log = Callable[[dict[str, Any], int], None]  # logs values by name, after a number of steps


class Logger(Protocol):
    """Where values of a step are logged; the first ones open it."""

    name: str

    def log_metrics(self, values: dict[str, Any], step: int) -> None:
        """Log the values of a step.

        Parameters
        ----------
        values : dict
            Values by name; see the functions below for the names.
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


def training_values(row: dict[str, Any]) -> dict[str, Any]:
    """Values to log of a row of metrics.csv: its columns but the step, without empty cells.

    Parameters
    ----------
    row : dict
        Cells by column.

    Returns
    -------
    dict
        Values by name: loss, grad_norm, lr, tables_per_s and so on.
    """
    return {column: value for column, value in row.items() if column != "step" and value != ""}


def multiplier_values(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Values to log of a step's rows of scaling.csv: the multiplier of each layer at the largest n.

    Parameters
    ----------
    rows : iterable of dict
        A row for each layer, cells by column.

    Returns
    -------
    dict
        multiplier/LAYER.
    """
    return {f"multiplier/{row['layer']}": row["at_largest"] for row in rows}


def validation_values(rows: Iterable[dict[str, Any]], means: dict[str, float]) -> dict[str, Any]:
    """Values to log of a validation.

    Parameters
    ----------
    rows : iterable of dict
        The validation's rows of validation.csv, cells by column; None is an empty cell.
    means : dict
        Mean scores of the validation by kind of data: synthetic, own and real.

    Returns
    -------
    dict
        validation/DATA_ROWS/SCORE of held-out tables, validation/NAME/SCORE of real data, validation/mean/KIND.
    """
    values: dict[str, Any] = {}
    for row in rows:
        name = row["data"] if kind_of(row["data"]) == REAL else f"{row['data']}_{row['rows']}"
        scores = {score: value for score, value in row.items() if score not in ("step", "data", "rows")}
        values |= {f"validation/{name}/{score}": value for score, value in scores.items() if value is not None}
    return values | {f"validation/mean/{kind}": mean for kind, mean in means.items()}
