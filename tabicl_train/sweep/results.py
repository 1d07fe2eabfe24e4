"""The results of a sweep, also while it runs: its runs, results.csv, the ranked table, and an HTML page."""

from __future__ import annotations

import functools
import math
import shlex
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from matplotlib import pyplot
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization import matplotlib as plots

from tabicl_train import plugins
from tabicl_train.console import counted, first_line, info, text_table
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import write_atomically
from tabicl_train.report.comparison import save as save_figure
from tabicl_train.report.page import fill
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.status import written_status
from tabicl_train.statistics import mean_interval
from tabicl_train.sweep.ladder import TITLE, Ladder
from tabicl_train.sweep.metric import DATA_SETS, METRICS, counted_data_sets, is_better_lower, last
from tabicl_train.sweep.scaling_law import COLUMNS
from tabicl_train.sweep.space import MOST_RUNS, hydra_text, short_names, value_text
from tabicl_train.sweep.study import LADDER, RUNS, load_study

RESULTS, PAGE = "results.csv", "sweep.html"
FIGURES = "figures"  # folder of the PDF files
TEMPLATE = Path(__file__).with_name("sweep.html.j2")
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
    status: str  # that of status.json; pruned; or planned before it has begun
    value: float | None  # the metric so far
    step: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commands(self) -> tuple[str, str]:
        """The shell commands that train or continue it, and export it."""
        own = plugins.arguments(hashes=False)
        train = ["tabicl-train", *self.arguments, f"run_dir={hydra_text(str(self.folder))}", *own]
        export = ["tabicl-export", f"checkpoint={self.folder}", f"output={self.folder}/model", "format=hub", *own]
        return shlex.join(train), shlex.join(export)


class Sweep:
    """The state of a sweep, which may be running; raises ConfigError if there is none in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.study = folder, load_study(folder)
        self.metric: str = self.study.user_attrs["identity"]["metric"]
        self.name: str = self.study.user_attrs["name"]
        self.data_sets = counted_data_sets(self.study)
        trials = [trial for trial in self.study.get_trials(deepcopy=False) if RUNS in trial.user_attrs]
        self.points = [(trial, [self.read_run(trial, *run) for run in trial.user_attrs[RUNS]]) for trial in trials]
        self.parameters = short_names(list(dict.fromkeys(key for trial in trials for key in trial.params)))

    def read_run(self, trial: FrozenTrial, name: str, seed: int, arguments: list[str]) -> SweepRun:
        folder = self.folder / name
        state = written_status(folder) or {"status": "planned", "step": 0}
        is_pruned = trial.state == TrialState.PRUNED and state["status"] != "finished"
        status = "pruned" if is_pruned else state["status"]
        return SweepRun(folder, seed, arguments, status, last(folder, self.metric, self.data_sets), state["step"])

    @property
    def runs(self) -> list[SweepRun]:
        return [run for _, runs in self.points for run in runs]

    @property
    def ranked(self) -> list[tuple[optuna.trial.FrozenTrial, list[SweepRun]]]:
        """The points that have finished, best first."""
        finished = [point for point in self.points if point[0].state == TrialState.COMPLETE]
        return sorted(finished, key=lambda point: point[0].value, reverse=not is_better_lower(self.metric))

    @property
    def best_run(self) -> SweepRun | None:
        """The best run of the best point, or None."""
        choose = min if is_better_lower(self.metric) else max
        return choose(self.ranked[0][1], key=lambda run: run.value) if self.ranked else None

    def params(self, trial: FrozenTrial) -> dict[str, str]:
        """Return the formatted values of a trial by their short names."""
        return {name: value_text(trial.params[key]) for key, name in self.parameters.items()}

    def table_of_runs(self) -> pd.DataFrame:
        """Return a row for each run, with the latest value of the metric."""
        rows = [
            {"run": run.name, **self.params(trial), "seed": run.seed, "status": run.status, self.metric: run.value}
            | {"step": run.step, **self.size(trial)}
            for trial, runs in self.points
            for run in runs
        ]
        return pd.DataFrame(rows).set_index("run") if rows else pd.DataFrame()

    def ranking(self) -> pd.DataFrame:
        """Return a row for each finished point, best first: the mean over its seeds with Student's 95 % interval."""
        rows = []
        for rank, (trial, runs) in enumerate(self.ranked, start=1):
            row = {"rank": rank, **self.params(trial), self.metric: f"{trial.value:.4f}"}
            if len(runs) > 1:
                found = mean_interval([run.value for run in runs])
                row[INTERVAL] = f"[{found.low:.4f}, {found.high:.4f}]"
            rows.append(row | {"seeds": len(runs)})
        return pd.DataFrame(rows).set_index("rank") if rows else pd.DataFrame()

    def without_result(self) -> pd.DataFrame:
        """Return a row for each point that has not finished."""
        rows = [
            {"trial": t.number, **self.params(t), "status": STATES[t.state], "reason": t.user_attrs.get("reason", "")}
            for t, _ in self.points
            if t.state != TrialState.COMPLETE
        ]
        return pd.DataFrame(rows).set_index("trial") if rows else pd.DataFrame()

    @functools.cached_property
    def ladder(self) -> Ladder | None:
        """The scaling law, once all points have ended; None without one, and if too few of them have finished."""
        found = self.study.user_attrs.get(LADDER)
        ended = [trial for trial, _ in self.points if trial.state.is_finished()]
        if found is None or len(ended) < len(found["sizes"]):
            return None
        rows = []
        for trial, runs in self.ranked:
            rows += [{**self.size(trial), "loss": run.value} for run in runs]
        try:
            return Ladder(self.metric, pd.DataFrame(rows, columns=COLUMNS), found)
        except ConfigError as error:
            info(f"warning   there is no scaling law: {first_line(error)}")
            return None

    def size(self, trial: FrozenTrial) -> dict[str, float]:
        """Return the parameters, tables and flops of the runs of a point; empty without `sweep.scaling_law=true`."""
        found = self.study.user_attrs.get(LADDER, {"sizes": []})
        return next((size for point, size in found["sizes"] if point == trial.params), {})

    @property
    def summary(self) -> str:
        states = [STATES[trial.state] for trial, _ in self.points]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(STATES.values()) if state in states]
        direction = "lower" if is_better_lower(self.metric) else "higher"
        return (
            f"{counted(len(states), 'point')}: {', '.join(counts) or 'none has begun'}. "
            f"Metric: {self.metric} ({direction} is better){self.means_of}."
        )

    @property
    def means_of(self) -> str:
        """Say over which public data sets the metric is a mean, if it is one."""
        if self.data_sets is None:
            return ""
        known = self.study.user_attrs[DATA_SETS]
        if len(self.data_sets) == len(known):
            return f", the mean over {', '.join(known)}"
        names, total = ", ".join(self.data_sets), counted(len(known), "data set")
        return f", the mean over {len(self.data_sets)} of {total}, which all runs have in their trained range: {names}"

    def text(self) -> str:
        """Format the results for the terminal."""
        tables = [table.reset_index() for table in (self.ranking(), self.without_result()) if len(table)]
        parts = [f"{self.name}: {self.summary}", *(text_table(table.columns, table.to_numpy()) for table in tables)]
        if best := self.best_run:
            train, export = best.commands
            title = f"best run of the best point: {best.name} ({best.value:.4f})"
            parts.append(f"{title}\n  {train}\nexport it with\n  {export}")
        if self.ladder is not None:
            parts.append(self.ladder.text())
        return "\n\n".join(parts)

    def write_csv(self) -> None:
        """Replace results.csv: the table of runs, and a column for each metric that any of them has."""
        table = self.table_of_runs()
        for metric in [name for name in METRICS if name != self.metric]:
            values = [latest(str(run.folder), stamp(run.folder), self.counted).get(metric) for run in self.runs]
            if any(value is not None for value in values):
                table[metric] = values
        Records(self.folder).replace(RESULTS, table.to_csv())

    @property
    def counted(self) -> tuple[str, ...] | None:
        """The public data sets that count, if the metric is a mean over such."""
        return None if self.data_sets is None else tuple(self.data_sets)


def stamp(run_dir: Path) -> tuple[int, ...]:
    """Return the times of the last changes of the files with a run's metrics."""
    times = []
    for name in ("metrics.csv", "validation.csv"):
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


@functools.lru_cache(maxsize=MOST_RUNS)
def latest(run_dir: str, changed: tuple[int, ...], data_sets: tuple[str, ...] | None) -> dict[str, float]:
    """Return the last value of each metric that a run has; its files are read again only after a change."""
    found = {}
    for metric in METRICS:
        value = last(Path(run_dir), metric, data_sets)
        if value is not None and math.isfinite(value):
            found[metric] = value
    return found


def write_page(sweep: Sweep) -> None:
    """Replace the page, and its figures as PDF files in the folder `figures`."""
    with pyplot.rc_context({"figure.figsize": (9.0, 5.0), "savefig.bbox": "tight"}):
        drawn = figures(sweep)
        text = fill(TEMPLATE, sweep=sweep, figures=drawn)
        folder = sweep.folder / FIGURES
        for title, figure in drawn.items():
            folder.mkdir(exist_ok=True)
            name = title.lower().replace(" ", "_")
            save_figure(figure, folder / f"{name}.pdf")
            if title == TITLE:
                save_figure(figure, folder / f"{name}.png")
    write_atomically(sweep.folder / PAGE, lambda file: file.write(text.encode()))


def figures(sweep: Sweep) -> dict[str, Figure]:
    """Draw the scaling law, and Optuna's figures of finished points, by title; those of a parameter need two values."""
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
    if sweep.ladder is not None:
        pictures = {TITLE: sweep.ladder.draw(), **pictures}
    return pictures
