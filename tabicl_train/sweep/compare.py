"""tabicl-compare, and the comparison at the end of a sweep: from arguments to arms, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.options import CompareOptions
from tabicl_train.config.schema import judged_by
from tabicl_train.console import info
from tabicl_train.distributed.processes import STUDY
from tabicl_train.errors import ConfigError, install, is_installed, require_sweep_packages
from tabicl_train.evaluation.arms import distinct, evaluated, is_baseline, is_csv, networks_of, read_csv_arms
from tabicl_train.evaluation.compare import (
    NAMES,
    Arm,
    Comparison,
    Pair,
    Paired,
    all_warnings,
    as_text,
    compare,
    pair,
    write_tables,
)
from tabicl_train.outputs import make_folder

if TYPE_CHECKING:
    from tabicl_train.sweep.arms import Points
    from tabicl_train.sweep.results import Sweep

OUTPUT = "comparison"
DEFAULT_METRICS = {"roc_auc": ["roc_auc", "log_loss"], "r2": ["r2", "pinball"]}  # by default


class Difference(Pair):
    """Two arms whose scores may be of different objectives or tables, so that neither is called better."""

    @property
    def sentence(self) -> str:
        """How far the scores lie apart, in words."""
        lead = -self.lead if self.lead.mean < 0 else self.lead
        return f"{self.a} and {self.b} differ by {lead:.4f} of {NAMES.get(self.metric, self.metric)} {self.where}"


@dataclass
class Compared:
    """The result of a comparison."""

    paired: Paired
    comparisons: list[Comparison]
    shared: str | None = None  # which arms were trained on identical tables

    @property
    def text(self) -> str:
        """The tables and sentences for the terminal, without the warnings."""
        parts = [as_text(self.paired, self.comparisons)]
        if self.shared is not None:
            parts.append(self.shared)
        return "\n\n".join(parts)


def run_comparison(words: Sequence[str], options: CompareOptions) -> Compared:
    """Compare what the words name: print the tables, and write them and the figures."""
    if not words:
        raise ConfigError(["there is nothing to compare; name two or more, such as: tabicl-compare mini runs/mine"])
    is_sweep = [Path(word, STUDY).exists() for word in words]
    is_one_sweep = len(words) == 1 and is_sweep[0]
    if len(words) == 1 and not (is_one_sweep or is_csv(words[0]) or is_baseline(words[0])):  # before it is scored
        raise ConfigError([f"{words[0]} is one arm; name another one to compare it with"])
    if options.output is None:
        options.output = words[0] if is_one_sweep else OUTPUT
    make_folder("output", Path(options.output))
    if is_one_sweep and options.suite is None:
        if unused := options.of_scoring():
            raise ConfigError([f"{', '.join(unused)}: without suite= the points are compared by their validations"])
        compared = compare_validations(open_points(words[0], options.by), options)
    else:
        compared = compare_on_tasks(words, is_sweep, options)
    for warning in all_warnings(compared.comparisons):
        print(f"warning   {warning}")
    print(compared.text)
    info(write(Path(options.output), compared, overwrite=options.overwrite or is_one_sweep))
    return compared


def open_points(folder: str, by: str | None) -> Points:
    require_sweep_packages()
    from tabicl_train.sweep.arms import Points
    from tabicl_train.sweep.results import Sweep

    return Points(Sweep(Path(folder)), by)


def compare_validations(points: Points, options: CompareOptions) -> Compared:
    """Compare the points of a sweep by the last validations of their runs, paired by seed."""
    from tabicl_train.sweep.arms import shared_of_runs

    arms = points.merged(points.validations())
    metrics = chosen(options, [points.sweep.metric])
    paired, comparisons = compare_all(arms, metrics, options, by_seed=True)
    for number, comparison in enumerate(comparisons):
        warning = points.sweep.warning(comparison.metric)
        if warning is not None:
            differences: list[Pair] = [Difference(**vars(found)) for found in comparison.pairs]
            comparisons[number] = replace(comparison, pairs=differences, warnings=[warning, *comparison.warnings])
    return Compared(paired, comparisons, shared_of_runs(points))


def compare_on_tasks(words: Sequence[str], is_sweep: Sequence[bool], options: CompareOptions) -> Compared:
    """Compare arms of any kind by their scores on tasks."""
    baselines = [word for word in words if is_baseline(word)]
    networks = {}  # by word
    points = {}  # by word
    files = {}  # by word; read before anything is scored, which may take hours
    for word, names_sweep in zip(words, is_sweep, strict=True):
        if names_sweep:
            points[word] = open_points(word, options.by)
        elif is_csv(word):
            files[word] = read_csv_arms(word, all_methods=len(words) == 1)
        elif word not in baselines:
            networks[word] = networks_of(word)
    if options.by is not None and not points:
        raise ConfigError([f"by is {options.by!r}, which is for sweeps"])
    unused = [] if networks or points else options.of_scoring()
    if unused:
        raise ConfigError([f"{', '.join(unused)}: no network is to be scored, since files have their scores already"])

    # The arms of each word. Baselines are scored beside the first network, and are placeholders until then.
    arms: list[Arm] = []
    word_of_arm: list[str] = []
    unscored_baselines = list(baselines)
    scored_baselines: dict[str, Arm] = {}
    for word in words:
        if word in points:
            arms_of_points = []
            for runs in points[word].networks():
                arm, *_ = evaluated(runs, options)
                arms_of_points.append(arm)
            arms_of_word = points[word].merged(arms_of_points)
            if sum(is_sweep) > 1:
                arms_of_word = [replace(arm, name=f"{word}: {arm.name}") for arm in arms_of_word]
        elif word in networks:
            arm, *baseline_arms = evaluated(networks[word], options, unscored_baselines)
            for baseline_arm in baseline_arms:
                scored_baselines[baseline_arm.name] = baseline_arm
            unscored_baselines = []
            arms_of_word = [arm]
        elif word in baselines:
            arms_of_word = [Arm(word, {})]
        else:
            arms_of_word = files[word]
        arms += arms_of_word
        word_of_arm += [word] * len(arms_of_word)
    if unscored_baselines:
        first = unscored_baselines[0]
        raise ConfigError([f"{first} is a baseline, which is scored beside a network; name one, or FILE.csv:METHOD"])
    for number, word in enumerate(word_of_arm):
        if word in baselines:
            arms[number] = scored_baselines[word]

    if len(arms) < 2:
        raise ConfigError([f"{words[0]} is one arm; name another one to compare it with"])
    kinds = {}  # an arm of each kind: judged by ROC AUC, or by R2
    for arm in arms:
        first_seed = next(iter(arm.scores))
        kinds[judged_by(arm.frame(first_seed))] = arm.name
    if len(kinds) > 1:
        raise ConfigError([f"{kinds['roc_auc']} predicts classes and {kinds['r2']} numbers; compare those of one kind"])
    metrics = chosen(options, DEFAULT_METRICS[next(iter(kinds))])
    paired, comparisons = compare_all(distinct(arms, word_of_arm), metrics, options)
    shared = None
    if len(points) == 1 and len(words) == 1:
        from tabicl_train.sweep.arms import shared_of_runs

        shared = shared_of_runs(points[words[0]])
    return Compared(paired, comparisons, shared)


def chosen(options: CompareOptions, default: list[str]) -> list[str]:
    """Return the metrics to compare by."""
    if options.metric is None:
        return default
    if isinstance(options.metric, str):
        return [options.metric]
    return [str(name) for name in options.metric]


def compare_all(
    arms: Sequence[Arm], metrics: list[str], options: CompareOptions, by_seed: bool = False
) -> tuple[Paired, list[Comparison]]:
    """Pair the scores of the arms, and compare the arms by each metric."""
    paired = pair(arms, options.outside)
    comparisons = [compare(paired, metric, options.reference, by_seed) for metric in metrics]
    return paired, comparisons


def write(folder: Path, compared: Compared, overwrite: bool) -> str:
    """Write the tables and, with matplotlib, the figures of the first metric; returns lines that name the files."""
    write_tables(folder, compared.comparisons, overwrite)
    files = ["comparison.csv", "comparison.tex", "comparison_tasks.csv"]
    no_figures = ""
    if is_installed("matplotlib"):
        from tabicl_train.report.comparison import write_figures

        files += [f"{name}.pdf and .png" for name in write_figures(folder, compared.comparisons[0])]
    else:
        no_figures = f"figures   none, since they need matplotlib: {install('matplotlib', 'plots')}\n"
    return f"{no_figures}written   {', '.join(files)} in {folder}"


def compare_points(sweep: Sweep) -> Compared | None:
    """Compare the finished points of a grid by its metric; None for a search, and with fewer than two points."""
    # The points of a search are as many as it has trials, and none of them is the one to compare others with.
    from tabicl_train.sweep.arms import Points

    if sweep.study.user_attrs["identity"]["sampler"] != "grid" or len(sweep.ranked) < 2:
        return None
    return compare_validations(Points(sweep), CompareOptions())
