"""The page of a sweep: one self-contained HTML file, also while the sweep is running."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
from matplotlib import pyplot
from matplotlib.figure import Figure
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots

from tabicl_train.report.page import fill
from tabicl_train.run_dir.atomic import write_atomically
from tabicl_train.sweep.results import Sweep

PAGE = "sweep.html"
TEMPLATE = Path(__file__).with_name("sweep.html.j2")


def write_page(sweep: Sweep) -> None:
    """Replace the page."""
    text = fill(TEMPLATE, sweep=sweep, figures=figures(sweep))
    write_atomically(sweep.folder / PAGE, lambda file: file.write(text.encode()))


def figures(sweep: Sweep) -> dict[str, Figure]:
    """Optuna's figures of the points that have finished, by their titles; those of parameters need two values."""
    done = sweep.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    varied = [key for key in sweep.parameters if len({str(trial.params[key]) for trial in done}) > 1]
    drawn = {"Optimization history": plots.plot_optimization_history} if done else {}
    if varied:
        drawn |= {"Slices": lambda study, **kw: plots.plot_slice(study, varied, **kw)}
        drawn |= {"Parallel coordinates": lambda study, **kw: plots.plot_parallel_coordinate(study, varied, **kw)}
    if len(varied) > 1:
        drawn |= {"Importance of the parameters": plots.plot_param_importances}
    return {title: draw(sweep, plot) for title, plot in drawn.items()}


def draw(sweep: Sweep, plot) -> Figure:
    with warnings.catch_warnings(), pyplot.rc_context({"figure.autolayout": False}):
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        axes = plot(sweep.study, target_name=sweep.metric)
    figure = (axes if not hasattr(axes, "flat") else axes.flat[0]).figure
    pyplot.close(figure)
    return figure
