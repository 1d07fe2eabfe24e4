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
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots

from tabicl_train.report.page import fill
from tabicl_train.run_dir.atomic import write_atomically
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
    study = finished(sweep)
    varied = [name for name in sweep.parameters.values() if len({str(t.params[name]) for t in study.trials}) > 1]
    drawn: dict[str, Callable] = {"Optimization history": plots.plot_optimization_history} if study.trials else {}
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


def finished(sweep: Sweep) -> optuna.Study:
    """A copy of the study with the points that have finished, under short names, and with numbers as numbers."""
    copy = optuna.create_study(direction=sweep.study.direction)
    for trial in (trial for trial, _ in sweep.points if trial.state == TrialState.COMPLETE):
        params = {name: trial.params[key] for key, name in sweep.parameters.items()}
        distributions = {name: as_range(trial.distributions[key]) for key, name in sweep.parameters.items()}
        copy.add_trial(optuna.create_trial(params=params, distributions=distributions, value=trial.value))
    return copy


def as_range(distribution: BaseDistribution) -> BaseDistribution:
    """Choices that are numbers as a range of them, logarithmic over a decade or more."""
    choices = getattr(distribution, "choices", ())
    if not choices or any(type(value) not in (int, float) for value in choices):
        return distribution
    low, high = min(choices), max(choices)
    return FloatDistribution(low, high, log=low > 0 and high >= 10 * low)
