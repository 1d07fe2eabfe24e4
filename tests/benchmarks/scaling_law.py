"""Fits a scaling law to the runs of a folder, such as those of sweep=ladder, and forecasts the losses of longer ones.

    python tests/benchmarks/scaling_law.py FOLDER [NAME=PARAMETERS,TABLES ...] [figure=FILE.png]

    loss = E + A / parameters^a + B / tables^b

The loss is the mean of the last validation on synthetic tables. The law and its fit are approach 3 of Hoffmann et al.,
"Training Compute-Optimal Large Language Models", arXiv 2203.15556, section 3.3, with tables in place of tokens. All
runs must have the same prior and validation. Write a forecast down before you start the run that it forecasts.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import optimize, special

from tabicl_train import open_run
from tabicl_train.training.planning import count_parameters

FEWEST = 6  # runs, one more than the law has constants, with three sizes and three numbers of tables
DELTA = 1e-3  # of the Huber loss, as in the paper: an error of more than 0.1 % of the loss counts linearly
EXPONENTS = (0.2, 0.5, 1.0)  # at which fits start; the paper has 0.34 and 0.28 for text
SHARES = (0.05, 0.3)  # of each term in the loss at the center of the points, at which fits start
LOWEST_E = 1e-3  # least E relative to the lowest loss; below it, log E has no gradient, and a fit would not come back
DRAWS = 200  # samples of the bootstrap


def read_runs(folder: Path) -> pd.DataFrame:
    """Return a row for each finished run below a folder: run, parameters, tables and loss."""
    rows = []
    for path in sorted(folder.glob("**/config.yaml")):
        run = open_run(path.parent)
        if (run.status or {}).get("status") != "finished":
            continue
        validation = run.validation
        scores = validation[(validation.data == "synthetic") & (validation.trained_range != "outside")]
        last = scores[scores.step == scores.step.max()]
        tables = run.config.curriculum.tables_before(run.config.total_steps)
        size = count_parameters(run.config.model)
        rows.append({"run": path.parent.name, "parameters": size, "tables": tables, "loss": last.loss.mean()})
    return pd.DataFrame(rows)


def loss_of(law: np.ndarray, parameters, tables):
    """Return the loss of a law (E, A, a, B, b) for numbers of parameters and of tables."""
    E, A, a, B, b = law
    return E + A / np.power(parameters, a) + B / np.power(tables, b)


def fit_law(runs: pd.DataFrame, near: np.ndarray | None = None) -> np.ndarray:
    """Fit a law by L-BFGS, which minimizes the Huber loss of the errors of log(loss).

    Parameters
    ----------
    runs : DataFrame
        Columns parameters, tables and loss.
    near : ndarray of shape (5,), optional
        A law at which the fit starts. Default: a grid of 36 starts.

    Returns
    -------
    ndarray of shape (5,)
        E, A, a, B and b.
    """
    # The variables are the logarithms of both terms at the geometric means of parameters and tables. These depend less
    # on the exponents than log A and log B, so few starts are enough.
    log_N, log_D, log_losses = (np.log(runs[name].to_numpy(float)) for name in ("parameters", "tables", "loss"))
    middle_N, middle_D, lowest = log_N.mean(), log_D.mean(), log_losses.min()

    def objective(x: np.ndarray) -> float:
        e, size, a, data, b = x
        terms = [np.full_like(log_N, e), size - a * (log_N - middle_N), data - b * (log_D - middle_D)]
        errors = np.logaddexp.reduce(terms) - log_losses
        return special.huber(DELTA, errors).sum() / DELTA**2  # a unit that suits the tolerance of L-BFGS

    bounds = [(lowest + math.log(LOWEST_E), None), (None, None), (0, 3), (None, None), (0, 3)]

    # The best of the fits from all starts.
    starts = []
    for a, b, share_N, share_D in itertools.product(EXPONENTS, EXPONENTS, SHARES, SHARES):
        e, size, data = (lowest + math.log(share) for share in (1 - share_N - share_D, share_N, share_D))
        starts.append([e, size, a, data, b])
    if near is not None:
        E, A, a, B, b = near
        starts = [[math.log(E), math.log(A) - a * middle_N, a, math.log(B) - b * middle_D, b]]
    results = [optimize.minimize(objective, start, method="L-BFGS-B", bounds=bounds) for start in starts]
    e, size, a, data, b = min(results, key=lambda result: result.fun).x
    return np.array([math.exp(e), math.exp(size + a * middle_N), a, math.exp(data + b * middle_D), b])


def bootstrap(runs: pd.DataFrame, law: np.ndarray, draws: int = DRAWS) -> tuple[np.ndarray, np.ndarray]:
    """Return the laws of bootstrap samples, (draws, 5), and errors of log(loss) of further runs, (draws,)."""
    rng = np.random.default_rng(0)
    residuals = np.log(runs.loss / loss_of(law, runs.parameters, runs.tables)).to_numpy()
    # Residuals are smaller than the errors of further runs, since the law has five constants.
    residuals = residuals * math.sqrt(len(runs) / (len(runs) - len(law)))
    laws = []
    while len(laws) < draws:
        sample = runs.iloc[rng.integers(len(runs), size=len(runs))]
        if is_enough(sample):
            laws.append(fit_law(sample, near=law))
    return np.array(laws), rng.choice(residuals, draws)


def is_enough(runs: pd.DataFrame) -> bool:
    """Whether a law can be fitted: two sizes determine neither E nor an exponent, nor do two numbers of tables."""
    return len(runs) >= FEWEST and runs.parameters.nunique() >= 3 and runs.tables.nunique() >= 3


def draw(runs: pd.DataFrame, law: np.ndarray, forecasts: list[dict]) -> Figure:
    """Draw loss against tables: the runs and the law for each size, and the forecasts with their intervals."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    ax = figure.subplots()
    most = max([runs.tables.max(), *(row["tables"] for row in forecasts)])
    for number, (size, runs_of_size) in enumerate(runs.groupby("parameters")):
        tables = np.geomspace(runs_of_size.tables.min(), most, 100)
        ax.plot(tables, loss_of(law, size, tables), color=f"C{number}", linewidth=1)
        ax.plot(runs_of_size.tables, runs_of_size.loss, "o", color=f"C{number}", label=f"{size:,} parameters")
    for row in forecasts:
        errors = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
        ax.errorbar(row["tables"], row["loss"], errors, fmt="*", color="black", markersize=10, capsize=3)
        ax.annotate(row["run"], (row["tables"], row["high"]), (0, 4), textcoords="offset points", ha="center")
    ax.set_xscale("log")
    ax.set_xlabel("training tables")
    ax.set_ylabel("validation loss")
    ax.legend(fontsize=9)
    return figure


def main(folder: str, *words: str) -> None:
    runs = read_runs(Path(folder))
    if not len(runs) or not is_enough(runs):
        sys.exit(f"{folder}: a law needs {FEWEST} finished runs of three sizes and three numbers of tables")

    # The law of all runs, with intervals.
    law = fit_law(runs)
    laws, noise = bootstrap(runs, law)
    error = np.abs(runs.loss - loss_of(law, runs.parameters, runs.tables)).mean()
    print(runs.to_string(index=False))
    print(f"\nloss = E + A / parameters^a + B / tables^b, mean error {error:.4f}; 95 % intervals of a bootstrap:")
    for name, value, low, high in zip("EAaBb", law, *np.quantile(laws, [0.025, 0.975], axis=0), strict=True):
        print(f"{name}  {value:.4g} [{low:.4g}, {high:.4g}]")

    # Forecasts, whose intervals include the error of a single run.
    figure_path = None
    forecasts = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "figure":
            figure_path = value
            continue
        parameters, tables = map(float, value.split(","))
        possible = [float(loss_of(each, parameters, tables)) for each in laws] * np.exp(noise)
        low, high = np.quantile(possible, [0.025, 0.975])
        loss = float(loss_of(law, parameters, tables))
        forecasts.append({"run": name, "tables": tables, "loss": loss, "low": low, "high": high})
        print(f"forecast of {name}: {loss:.4f} [{low:.4f}, {high:.4f}], for a single run")
    if figure_path is not None:
        draw(runs, law, forecasts).savefig(figure_path, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
