"""The page of a sweep: one self-contained HTML file, also while the sweep is running."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import optuna
from matplotlib import pyplot
from matplotlib.figure import Figure
from optuna.visualization import matplotlib as plots

from tabicl_train.outputs import write_atomically
from tabicl_train.report.page import fill
from tabicl_train.sweep.results import Sweep

PAGE = "sweep.html"
TEMPLATE = Path(__file__).with_name("sweep.html.j2")


def write_page(sweep: Sweep) -> None:
    """Replace the page."""
    with pyplot.rc_context({"figure.figsize": (9.0, 5.0), "savefig.bbox": "tight"}):
        text = fill(TEMPLATE, sweep=sweep, figures=figures(sweep))
    write_atomically(sweep.folder / PAGE, lambda file: file.write(text.encode()))


def figures(sweep: Sweep) -> dict[str, Figure]:
    """Optuna's figures of the points that have finished, by their titles; those of parameters need two values."""
    study, found = sweep.study, [trial for trial, _ in sweep.ranked]
    varied = [key for key in sweep.parameters if len({str(trial.params[key]) for trial in found}) > 1]
    drawn: dict[str, Callable] = {"Optimization history": plots.plot_optimization_history} if found else {}
    if varied:
        drawn["Slices"] = partial(plots.plot_slice, params=varied)
        drawn["Parallel coordinates"] = partial(plots.plot_parallel_coordinate, params=varied)
    if len(varied) > 1:
        drawn["Importance of the parameters"] = partial(
            plots.plot_param_importances, params=varied, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        axes = {title: plot(study, target_name=sweep.metric) for title, plot in drawn.items()}
    pictures = {title: np.ravel(one)[0].figure for title, one in axes.items()}
    for figure in pictures.values():
        pyplot.close(figure)
    return pictures
