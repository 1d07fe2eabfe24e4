"""The scaling law of a sweep over sizes and budgets: its fit, the compute-optimal size for a budget, and forecasts.

    loss = E + A / N^a + B / D^b

N are the parameters and D the training tables of a run. The law and its fit are approach 3 of Hoffmann et al.,
"Training Compute-Optimal Large Language Models", arXiv 2203.15556, section 3.3, with tables in place of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special

from tabicl_train.errors import ConfigError
from tabicl_train.statistics import CONFIDENCE

__all__ = ["Law", "ScalingFit", "fit_law", "fit_scaling", "too_few"]

COLUMNS = ["parameters", "tables", "flops", "loss"]
CONSTANTS = ("E", "A", "a", "B", "b")
FEWEST_POINTS = 6  # one more than the constants of the law
FEWEST_SIZES = 3  # two sizes fix neither E nor an exponent, and likewise two numbers of tables
DELTA = 1e-3  # of the Huber loss, as in the paper: an error of more than 0.1 % of the loss counts linearly
EXPONENTS = (0.2, 0.5, 1.0)  # where the fit starts; the paper has 0.34 and 0.28 for text
SHARES = (0.05, 0.3)  # of the loss at the center of the points: what either term is at a start
HIGHEST_EXPONENT = 3.0
LOWEST_E = 1e-3  # of the lowest loss: below it, log E would have no gradient, and a fit that came there would stay
DRAWS = 200  # of the bootstrap


@dataclass(frozen=True)
class Law:
    """The loss of a network with N parameters after D tables: E + A / N^a + B / D^b."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def loss(self, parameters: Any, tables: Any) -> Any:
        """Return the loss for a number of parameters and of tables, or for arrays of them."""
        return self.E + self.A / np.power(parameters, self.a) + self.B / np.power(tables, self.b)


def too_few(parameters: Any, tables: Any) -> str | None:
    """Return why a law cannot be fitted to points with these parameters and tables, or None."""
    points = len(parameters)
    sizes = len(set(parameters))
    budgets = len(set(tables))
    if points >= FEWEST_POINTS and sizes >= FEWEST_SIZES and budgets >= FEWEST_SIZES:
        return None
    need = f"at least {FEWEST_POINTS} points, {FEWEST_SIZES} sizes and {FEWEST_SIZES} numbers of tables"
    return f"a scaling law needs {need}; there are {points}, {sizes} and {budgets}"


def fit_law(parameters: Any, tables: Any, losses: Any, starts: tuple[Law, ...] = ()) -> Law:
    """Fit the law to points by L-BFGS from a grid of starts; the Huber loss of errors of log(loss) is minimized.

    Parameters
    ----------
    parameters, tables, losses : array-like of shape (points,)
        All positive.
    starts : tuple of Law, optional
        Where to start instead of the grid.

    Returns
    -------
    Law
        The best of all starts. Its exponents lie in 0..3.

    Raises
    ------
    ConfigError
        If there are too few points.

    Notes
    -----
    The logarithms of both terms are variables at the geometric means of parameters and tables. There they depend less
    on the exponents than log A and log B do, so that few starts are enough.
    """
    if (problem := too_few(parameters, tables)) is not None:
        raise ConfigError([problem])
    log_N = np.log(np.asarray(parameters, dtype=float))
    log_D = np.log(np.asarray(tables, dtype=float))
    log_losses = np.log(np.asarray(losses, dtype=float))
    middle_N = log_N.mean()
    middle_D = log_D.mean()
    lowest = log_losses.min()

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        e, size, a, data, b = x
        ones = np.ones_like(log_N)
        terms = np.stack([e * ones, size - a * (log_N - middle_N), data - b * (log_D - middle_D)])
        predicted = np.logaddexp.reduce(terms)
        errors = predicted - log_losses
        slopes = np.clip(errors, -DELTA, DELTA)  # of the Huber loss
        of_E, of_N, of_D = np.exp(terms - predicted) * slopes
        gradient = [of_E.sum(), of_N.sum(), -of_N @ (log_N - middle_N), of_D.sum(), -of_D @ (log_D - middle_D)]
        # In units of DELTA squared: the sum would be below L-BFGS's tolerance otherwise.
        return special.huber(DELTA, errors).sum() / DELTA**2, np.array(gradient) / DELTA**2

    if starts:
        first = [variables_of(law, middle_N, middle_D) for law in starts]
        for start in first:
            start[0] = max(start[0], lowest + math.log(SHARES[0]))  # where it has a gradient
    else:
        first = []
        for a, b, of_N, of_D in itertools.product(EXPONENTS, EXPONENTS, SHARES, SHARES):
            first.append([lowest + math.log(1 - of_N - of_D), lowest + math.log(of_N), a, lowest + math.log(of_D), b])
    exponent = (0.0, HIGHEST_EXPONENT)
    constant = (lowest + math.log(LOWEST_E), None)
    free = (None, None)
    results = []
    for start in first:
        result = optimize.minimize(
            objective,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[constant, free, exponent, free, exponent],
            options={"maxiter": 500, "ftol": 1e-10, "gtol": 1e-6},
        )
        results.append(result)
    e, size, a, data, b = min(results, key=lambda result: result.fun).x
    return Law(math.exp(e), math.exp(size + a * middle_N), float(a), math.exp(data + b * middle_D), float(b))


def variables_of(law: Law, middle_N: float, middle_D: float) -> list[float]:
    """Return the variables of the fit for a law."""
    size = math.log(law.A) - law.a * middle_N
    data = math.log(law.B) - law.b * middle_D
    return [math.log(law.E), size, law.a, data, law.b]


class ScalingFit:
    """A scaling law fitted to runs, with laws of bootstrap samples, which give all intervals.

    Attributes
    ----------
    points : pandas.DataFrame
        A row for each run: parameters, tables, flops, loss.
    law : Law
        The law of all points.
    laws : list of Law
        The laws of the bootstrap samples.
    """

    def __init__(self, points: pd.DataFrame, draws: int = DRAWS, seed: int = 0) -> None:
        self.points = points.reset_index(drop=True)
        self.law = fit_law(self.points.parameters, self.points.tables, self.points.loss)
        residuals = np.log(self.points.loss / self.law.loss(self.points.parameters, self.points.tables))
        # The law has five constants, so its residuals are smaller than the errors of other runs.
        self.residuals = residuals.to_numpy() * math.sqrt(len(points) / (len(points) - len(CONSTANTS)))
        # FLOPs of a table, as a power of the parameters: log(FLOPs) = slope * log(parameters) + intercept.
        of_table = np.log(self.points.flops / self.points.tables)
        self.slope, self.intercept = np.polyfit(np.log(self.points.parameters), of_table, 1)
        rng = np.random.default_rng(seed)
        self.laws: list[Law] = []
        self.noise: list[float] = []  # for each law, the error of another run, on the scale of log(loss)
        while len(self.laws) < draws:
            sample = self.points.iloc[rng.integers(len(points), size=len(points))]
            if too_few(sample.parameters, sample.tables) is None:
                self.laws.append(fit_law(sample.parameters, sample.tables, sample.loss, self.starts()))
                self.noise.append(float(rng.choice(self.residuals)))

    def starts(self) -> tuple[Law, Law]:
        """Return the law, and one with half of its exponents and the same terms at the center of the points."""
        a = self.law.a / 2
        b = self.law.b / 2
        A = self.law.A * math.exp((a - self.law.a) * np.log(self.points.parameters).mean())
        B = self.law.B * math.exp((b - self.law.b) * np.log(self.points.tables).mean())
        return self.law, Law(self.law.E, A, a, B, b)

    def tables_for(self, flops: Any, parameters: Any) -> Any:
        """Return the tables that a budget of FLOPs pays for, with this number of parameters."""
        return flops / np.exp(self.slope * np.log(parameters) + self.intercept)

    def optimal_size(self, flops: float, law: Law | None = None) -> float:
        """Return the number of parameters with the lowest loss for a budget of FLOPs."""
        # Between a hundredth of the smallest and a hundred times the largest size: a law with an exponent of 0 has its
        # optimum at an end.
        chosen = self.law if law is None else law

        def loss(log_size: float) -> float:
            parameters = math.exp(log_size)
            return float(chosen.loss(parameters, self.tables_for(flops, parameters)))

        log_sizes = np.log(self.points.parameters)
        bounds = (log_sizes.min() - math.log(100), log_sizes.max() + math.log(100))
        return math.exp(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").x)

    def constants(self) -> pd.DataFrame:
        """Return the constants of the law, a row for each with the ends of its 95 % interval."""
        rows = []
        for name in CONSTANTS:
            low, high = interval([getattr(law, name) for law in self.laws])
            rows.append({"constant": name, "value": getattr(self.law, name), "low": low, "high": high})
        return pd.DataFrame(rows)

    def optima(self, budgets: list[float]) -> pd.DataFrame:
        """Return the compute-optimal size for each budget of FLOPs, its tables and its loss."""
        rows = []
        smallest = self.points.parameters.min()
        largest = self.points.parameters.max()
        for flops in budgets:
            size = self.optimal_size(flops)
            low, high = interval([self.optimal_size(flops, law) for law in self.laws])
            tables = self.tables_for(flops, size)
            rows.append(
                {
                    "flops": flops,
                    "parameters": size,
                    "low": low,
                    "high": high,
                    "tables": tables,
                    "loss": float(self.law.loss(size, tables)),
                    "extrapolated": not smallest <= size <= largest,
                }
            )
        return pd.DataFrame(rows)

    def forecast(self, runs: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
        """Forecast the losses of other runs.

        Parameters
        ----------
        runs : mapping
            For the name of each, its `parameters`, `tables` and `flops`.

        Returns
        -------
        pandas.DataFrame
            A row for each: the loss with the ends of an interval for a single run, and `no_change`, the loss after the
            most tables of those points that have the same size (nan without any).
        """
        rows = []
        for name, run in runs.items():
            parameters = run["parameters"]
            tables = run["tables"]
            possible = []
            for law, noise in zip(self.laws, self.noise, strict=True):
                possible.append(float(law.loss(parameters, tables)) * math.exp(noise))
            low, high = interval(possible)
            of_size = self.points[self.points.parameters == parameters]
            longest = of_size[of_size.tables == of_size.tables.max()]
            rows.append(
                {
                    "name": name,
                    **{key: run[key] for key in ("parameters", "tables", "flops")},
                    "loss": float(self.law.loss(parameters, tables)),
                    "low": low,
                    "high": high,
                    "no_change": float(longest.loss.mean()),
                }
            )
        return pd.DataFrame(rows)


def fit_scaling(points: pd.DataFrame, draws: int = DRAWS, seed: int = 0) -> ScalingFit:
    """Fit the law to runs, and to bootstrap samples of them.

    Parameters
    ----------
    points : pandas.DataFrame
        A row for each run with the columns parameters, tables, flops and loss, such as results.csv of a sweep with
        `sweep.scaling_law=true` whose column of the metric is renamed. All must have the same prior and validation.
    draws : int, default=200
        Bootstrap samples. Those with too few points for a law are drawn again.
    seed : int, default=0
        Of the samples.

    Returns
    -------
    ScalingFit
        The law, and what follows from it.

    Raises
    ------
    ConfigError
        If there are too few points, or a column is missing.
    """
    missing = [name for name in COLUMNS if name not in points]
    if missing:
        raise ConfigError([f"the points of a scaling law need the column {missing[0]}"])
    return ScalingFit(points[COLUMNS].astype(float), draws, seed)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval."""
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
