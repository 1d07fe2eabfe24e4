"""The results of a sweep, finished or running: its runs, results.csv, the ranked table, and an HTML page."""

from __future__ import annotations

import functools
import math
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import optuna
import pandas as pd
from matplotlib import pyplot
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as plots

from tabicl_train.config.compose import hydra_text
from tabicl_train.console import counted, one_line, text_table
from tabicl_train.doors import plugins
from tabicl_train.evaluation.statistics import mean_interval
from tabicl_train.outputs import write_atomically
from tabicl_train.report.comparison import save_figure
from tabicl_train.report.page import fill_template
from tabicl_train.run.records import Records
from tabicl_train.run.removed import words_as_of_now
from tabicl_train.run.status import written_status
from tabicl_train.sweep.comparable import INCOMPARABLE, warning_of
from tabicl_train.sweep.metric import DATA_SETS, SWEEP_METRICS, counted_data_sets, is_better_lower, last_value
from tabicl_train.sweep.space import MOST_RUNS, rounded_text, short_names
from tabicl_train.sweep.study import RUNS, load_study

RESULTS = "results.csv"
PAGE = "sweep.html"
FIGURES = "figures"  # folder of the PDF files
FIGURE = (5.4, 3.8)  # inches; text is readable at the 400 pixels of a narrow window
WIDE = (9.0, 5.0)  # inches, for parallel coordinates, which have an axis for each parameter
TEMPLATE = Path(__file__).with_name("sweep.html.j2")
PARALLEL = "Parallel coordinates"
INTERVAL = "95% interval"
STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.RUNNING: "unfinished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass
class SweepRun:
    """A run of a sweep."""

    folder: Path
    seed: int
    arguments: list[str]  # of tabicl-train, without run_dir
    status: str  # that of status.json, or pruned, or planned if the run has not begun
    value: float | None  # the metric so far
    step: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commands(self) -> tuple[str, str]:
        """The shell commands that train (or continue) the run and export its weights."""
        plugin_arguments = plugins.arguments(hashes=False)
        train = ["tabicl-train", *self.arguments, f"run_dir={hydra_text(str(self.folder))}", *plugin_arguments]
        output = f"output={self.folder}/model"
        export = ["tabicl-export", f"checkpoint={self.folder}", output, "format=hub", *plugin_arguments]
        return shlex.join(train), shlex.join(export)


class SweepPoint(NamedTuple):
    """A point of a sweep: its trial in the study, and a run for each seed."""

    trial: FrozenTrial
    runs: list[SweepRun]


class Sweep:
    """The state of a sweep, which may be running.

    Parameters
    ----------
    folder : Path
        The folder of the sweep.

    Attributes
    ----------
    points : list of SweepPoint
        All points that have begun, in the order of their trials.
    parameters : dict of str to str
        Short names of the settings that vary, by their keys.
    data_sets : list of str or None
        Public data sets over which the metric is a mean; None for a metric without public data.

    Raises
    ------
    ConfigError
        If there is no sweep in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.study = load_study(folder)
        self.metric: str = self.study.user_attrs["identity"]["metric"]
        self.name: str = self.study.user_attrs["name"]
        self.data_sets = counted_data_sets(self.study)
        self.points: list[SweepPoint] = []
        keys: list[str] = []
        for trial in self.study.get_trials(deepcopy=False):
            if RUNS in trial.user_attrs:
                runs = [self.read_run(trial, *run) for run in trial.user_attrs[RUNS]]
                self.points.append(SweepPoint(trial, runs))
                keys += trial.params
        self.parameters = short_names(list(dict.fromkeys(keys)))

    def read_run(self, trial: FrozenTrial, name: str, seed: int, arguments: list[str]) -> SweepRun:
        """Return the state of a run, whose name, seed and arguments the trial keeps in its attribute RUNS."""
        folder = self.folder / name
        state = written_status(folder) or {"status": "planned", "step": 0}
        is_pruned = trial.state == TrialState.PRUNED and state["status"] != "finished"
        return SweepRun(
            folder=folder,
            seed=seed,
            arguments=words_as_of_now(arguments),
            status="pruned" if is_pruned else state["status"],
            value=last_value(folder, self.metric, self.data_sets),
            step=state["step"],
        )

    @property
    def runs(self) -> list[SweepRun]:
        return [run for point in self.points for run in point.runs]

    @property
    def ranked(self) -> list[SweepPoint]:
        """The points that have finished, best first."""
        finished = [point for point in self.points if point.trial.state == TrialState.COMPLETE]
        return sorted(finished, key=lambda point: point.trial.value, reverse=not is_better_lower(self.metric))

    @property
    def best_run(self) -> SweepRun | None:
        """The best run of the best point, or None."""
        if not self.ranked:
            return None
        choose = min if is_better_lower(self.metric) else max
        return choose(self.ranked[0].runs, key=lambda run: run.value)

    def params(self, trial: FrozenTrial) -> dict[str, str]:
        """Return the formatted values of a trial by their short names."""
        return {name: rounded_text(trial.params[key]) for key, name in self.parameters.items()}

    def table_of_runs(self) -> pd.DataFrame:
        """Return a row for each run, with the latest value of the metric."""
        rows = []
        for trial, runs in self.points:
            for run in runs:
                row = {"run": run.name, **self.params(trial), "seed": run.seed, "status": run.status}
                rows.append({**row, self.metric: run.value, "step": run.step})
        return pd.DataFrame(rows).set_index("run") if rows else pd.DataFrame()

    def ranking(self) -> pd.DataFrame:
        """Return a row for each finished point, best first: the mean over its seeds with Student's 95 % interval."""
        rows = []
        for rank, (trial, runs) in enumerate(self.ranked, start=1):
            row = {"rank": rank, **self.params(trial), self.metric: f"{trial.value:.4f}"}
            if len(runs) > 1:
                mean = mean_interval([run.value for run in runs])
                row[INTERVAL] = f"[{mean.low:.4f}, {mean.high:.4f}]"
            row["seeds"] = len(runs)
            rows.append(row)
        return pd.DataFrame(rows).set_index("rank") if rows else pd.DataFrame()

    def without_result(self) -> pd.DataFrame:
        """Return a row for each point that has not finished."""
        rows = []
        for trial, _ in self.points:
            if trial.state != TrialState.COMPLETE:
                reason = trial.user_attrs.get("reason", "")
                row = {"trial": trial.number, **self.params(trial), "status": STATES[trial.state], "reason": reason}
                rows.append(row)
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()

    @property
    def summary(self) -> str:
        """One sentence about the points, and one about the metric."""
        states = [STATES[trial.state] for trial, _ in self.points]
        counts = []
        for state in STATES.values():
            if state in states:
                counts.append(f"{states.count(state)} {state}")
        direction = "lower" if is_better_lower(self.metric) else "higher"
        return (
            f"{counted(len(states), 'point')}: {', '.join(counts) or 'none has begun'}. "
            f"Metric: {self.metric} ({direction} is better){self.data_sets_in_words}."
        )

    def warning(self, metric: str) -> str | None:
        """Return why a metric cannot be compared between the points, and what to use instead; None if it can."""
        return warning_of(metric, self.study.user_attrs.get(INCOMPARABLE, {}), self.folder)

    @property
    def data_sets_in_words(self) -> str:
        """The public data sets over which the metric is a mean, as the end of a sentence; "" for another metric."""
        if self.data_sets is None:
            return ""
        names = ", ".join(self.data_sets)
        scored = self.study.user_attrs[DATA_SETS]
        if len(self.data_sets) == len(scored):
            return f", the mean over {names}"
        total = counted(len(scored), "data set")
        return f", the mean over {len(self.data_sets)} of {total}, those inside the trained range of all runs: {names}"

    def text(self) -> str:
        """Format the results for the terminal."""
        parts = [one_line(f"{self.name}: {self.summary}")]
        if (warning := self.warning(self.metric)) is not None:
            parts.append(one_line(f"warning   {warning}"))
        for table in (self.ranking(), self.without_result()):
            if len(table):
                shown = table.reset_index()
                parts.append(text_table(shown.columns, shown.to_numpy()))
        best = self.best_run
        if best is not None:
            train, export = best.commands
            title = f"best run of the best point: {best.name} ({best.value:.4f})"
            parts.append("\n".join(map(one_line, [title, f"  {train}", "export it with", f"  {export}"])))
        return "\n\n".join(parts)

    def write_csv(self) -> None:
        """Replace results.csv: the table of runs, with a column for each metric that any of them has."""
        table = self.table_of_runs()  # it has the metric of the sweep already
        data_sets = None if self.data_sets is None else tuple(self.data_sets)  # `latest` is cached by its arguments
        metrics_of_runs = [latest_metrics(str(run.folder), change_times(run.folder), data_sets) for run in self.runs]
        for metric in SWEEP_METRICS:
            column = [metrics.get(metric) for metrics in metrics_of_runs]
            is_empty = all(value is None for value in column)
            if metric != self.metric and not is_empty:
                table[metric] = column
        Records(self.folder).replace(RESULTS, table.to_csv())


def change_times(run_dir: Path) -> tuple[int, ...]:
    """Return the times of the last changes of the files with a run's metrics."""
    times = []
    for name in ("metrics.csv", "validation.csv"):
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


@functools.lru_cache(maxsize=MOST_RUNS)
def latest_metrics(run_dir: str, changed: tuple[int, ...], data_sets: tuple[str, ...] | None) -> dict[str, float]:
    """Return the last value of each metric that a run has; its files are read again only after a change."""
    values = {}
    for metric in SWEEP_METRICS:
        value = last_value(Path(run_dir), metric, data_sets)
        if value is not None and math.isfinite(value):
            values[metric] = value
    return values


def write_page(sweep: Sweep) -> None:
    """Replace the page, and its figures as PDF files in the folder `figures`."""
    with pyplot.rc_context({"savefig.bbox": "tight"}):
        drawn = figures(sweep)
        text = fill_template(TEMPLATE, sweep=sweep, figures=drawn, wide=PARALLEL)
        folder = sweep.folder / FIGURES
        for title, panels in drawn.items():
            folder.mkdir(exist_ok=True)
            name = title.lower().replace(" ", "_")
            for number, figure in enumerate(panels, start=1):
                place = f"_{number}" if len(panels) > 1 else ""
                save_figure(figure, folder / f"{name}{place}.pdf")
    write_atomically(sweep.folder / PAGE, lambda file: file.write(text.encode()))


def figures(sweep: Sweep) -> dict[str, list[Figure]]:
    """Draw Optuna's figures of finished points, by title, with one panel for each figure so that a page stacks them."""
    # Most figures need a parameter of which at least two values have finished.
    finished = [trial for trial, _ in sweep.ranked]
    varied = []
    for key in sweep.parameters:
        if len({str(trial.params[key]) for trial in finished}) > 1:
            varied.append(key)

    # Which figures are possible, by title. The importance is random, so it has a seed.
    plotters: dict[str, list[Callable]] = {}
    if finished:
        plotters["Optimization history"] = [plots.plot_optimization_history]
    if varied:
        plotters["Slices"] = [partial(plots.plot_slice, params=[key]) for key in varied]
        plotters[PARALLEL] = [partial(plots.plot_parallel_coordinate, params=varied)]
    if len(varied) > 1:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        plotters["Importance of the parameters"] = [
            partial(plots.plot_param_importances, params=varied, evaluator=evaluator)
        ]

    # Draw them. pyplot keeps every figure open, so each is closed at once.
    drawn: dict[str, list[Figure]] = {}
    for title, plots_of_title in plotters.items():
        drawn[title] = []
        for plot in plots_of_title:
            size = WIDE if title == PARALLEL else FIGURE
            with warnings.catch_warnings(), pyplot.rc_context({"figure.figsize": size}):
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                figure = plot(sweep.study, target_name=sweep.metric).figure
            drawn[title].append(figure)
            pyplot.close(figure)
    return drawn
