"""A sweep with `sweep.scaling_law=true`: sizes of networks at several budgets, whose losses give a scaling law."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.figure import Figure

from tabicl_train.console import counted, text_table
from tabicl_train.sweep.scaling_law import DRAWS, fit_scaling

TITLE = "Scaling law"
LAW = "E + A / parameters^a + B / tables^b"


class Ladder:
    """The scaling law of runs; raises ConfigError if there are too few of them.

    Parameters
    ----------
    metric : str
        What the losses are.
    points : pandas.DataFrame
        See `fit_scaling`.
    stored : mapping
        What a study keeps as its attribute LADDER.
    """

    def __init__(self, metric: str, points: pd.DataFrame, stored: Mapping[str, Any]) -> None:
        self.metric = metric
        self.fit = fit_scaling(points, DRAWS)
        self.forecast = self.fit.forecast(stored["forecast"])
        self.notes = [
            f"{name}: tables of other sizes than those of the runs, which the law does not take into account"
            for name in stored["other_tables"]
        ]

    @property
    def points(self) -> pd.DataFrame:
        """The runs: parameters, tables, flops and loss."""
        return self.fit.points

    @functools.cached_property
    def constants(self) -> pd.DataFrame:
        """The constants of the law, as text."""
        rows = []
        for row in self.fit.constants().itertuples():
            interval = f"[{row.low:.4g}, {row.high:.4g}]"
            rows.append({"constant": row.constant, "value": f"{row.value:.4g}", "95% interval": interval})
        return pd.DataFrame(rows).set_index("constant")

    @functools.cached_property
    def optima(self) -> pd.DataFrame:
        """The compute-optimal sizes, as text: for the budgets of the runs, as powers of ten, and of the forecasts."""
        rows = []
        for row in self.fit.optima(self.budgets()).itertuples():
            rows.append(
                {
                    "FLOPs": f"{row.flops:.2g}",
                    "parameters": f"{row.parameters:,.0f}",
                    "95% interval": f"[{row.low:,.0f}, {row.high:,.0f}]",
                    "tables": f"{row.tables:,.0f}",
                    self.metric: f"{row.loss:.4f}",
                    "size": "extrapolated" if row.extrapolated else "within the sizes of the runs",
                }
            )
        return pd.DataFrame(rows).set_index("FLOPs")

    def budgets(self) -> list[float]:
        """Return the powers of ten among the FLOPs of the runs, and the FLOPs of the forecasts."""
        low = math.ceil(math.log10(self.points.flops.min()))
        high = math.floor(math.log10(self.points.flops.max()))
        budgets = {10.0**power for power in range(low, high + 1)}
        return sorted(budgets | {float(flops) for flops in self.forecast.get("flops", ())})

    @functools.cached_property
    def forecasts(self) -> pd.DataFrame:
        """The forecasts, as text; empty without any."""
        rows = []
        for row in self.forecast.itertuples():
            has_size = math.isfinite(row.no_change)
            rows.append(
                {
                    "run": row.name,
                    "parameters": f"{row.parameters:,.0f}",
                    "tables": f"{row.tables:,.0f}",
                    "FLOPs": f"{row.flops:.2g}",
                    self.metric: f"{row.loss:.4f}",
                    "95% interval": f"[{row.low:.4f}, {row.high:.4f}]",
                    "longest run of this size": f"{row.no_change:.4f}" if has_size else "none",
                }
            )
        return pd.DataFrame(rows).set_index("run") if rows else pd.DataFrame()

    @property
    def summary(self) -> str:
        """One sentence about the law and how well it fits."""
        predicted = self.fit.law.loss(self.points.parameters, self.points.tables)
        error = float(np.mean(np.abs(self.points.loss - predicted)))
        runs = counted(len(self.points), "run")
        return f"scaling law of {runs}: {self.metric} = {LAW}, with a mean error of {error:.4f} on these runs"

    def text(self) -> str:
        """Format the law, the compute-optimal sizes and the forecasts for the terminal."""
        titles = {
            self.summary: self.constants,
            "compute-optimal sizes": self.optima,
            "forecasts (intervals for a single run)": self.forecasts,
        }
        parts = []
        for title, table in titles.items():
            if len(table):
                shown = table.reset_index()
                parts.append(f"{title}\n{text_table(shown.columns, shown.to_numpy())}")
        return "\n\n".join([*parts, *self.notes])

    def draw(self) -> Figure:
        """Draw loss against FLOPs: the runs and the law for each size, the lowest loss of any size, the forecasts."""
        with style.context("default"):  # Optuna's figures change the style of the process
            figure = Figure(figsize=(7.5, 4.6), layout="constrained")
            ax = figure.subplots()
        fit = self.fit
        lowest = self.points.flops.min()
        highest = max([self.points.flops.max(), *self.forecast.get("flops", ())])
        for number, (size, runs) in enumerate(self.points.groupby("parameters")):
            color = f"C{number}"
            flops = np.geomspace(runs.flops.min(), highest, 100)
            ax.plot(flops, fit.law.loss(size, fit.tables_for(flops, size)), color=color, linewidth=1)
            ax.plot(runs.flops, runs.loss, "o", color=color, label=f"{size:,.0f} parameters")
        budgets = np.geomspace(lowest, highest, 40)
        frontier = []
        for budget in budgets:
            size = fit.optimal_size(budget)
            frontier.append(fit.law.loss(size, fit.tables_for(budget, size)))
        ax.plot(budgets, frontier, "k--", linewidth=1, label="compute-optimal size")
        for row in self.forecast.itertuples():
            errors = [[max(row.loss - row.low, 0)], [max(row.high - row.loss, 0)]]
            ax.errorbar(row.flops, row.loss, errors, fmt="*", color="black", markersize=10, capsize=3)
            ax.annotate(
                f"forecast of {row.name}", (row.flops, row.high), (4, 4), textcoords="offset points", ha="right"
            )
        ax.set_xscale("log")
        ax.set_xlabel("FLOPs of training")
        ax.set_ylabel(self.metric)
        ax.legend(fontsize=9)
        return figure
