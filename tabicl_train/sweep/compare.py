"""tabicl-compare, and the comparison at the end of a sweep: from arguments to arms, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.options import CompareOptions
from tabicl_train.config.schema import judged_by
from tabicl_train.console import info
from tabicl_train.distributed.processes import STUDY
from tabicl_train.errors import ConfigError, install, is_installed, require_sweep_packages
from tabicl_train.evaluation.arms import distinct, evaluated, is_baseline, is_csv, networks_of, read_csv_arms
from tabicl_train.evaluation.compare import Arm, Comparison, Paired, as_text, compare, pair, write_tables
from tabicl_train.outputs import make_folder

if TYPE_CHECKING:
    from tabicl_train.sweep.arms import Points
    from tabicl_train.sweep.results import Sweep

OUTPUT = "comparison"
METRICS = {"roc_auc": ["roc_auc", "log_loss"], "r2": ["r2", "pinball"]}  # by default


@dataclass
class Compared:
    """The result of a comparison."""

    paired: Paired
    comparisons: list[Comparison]
    shared: str | None = None  # which arms were trained on identical tables

    @property
    def text(self) -> str:
        """The tables and sentences for the terminal."""
        parts = [as_text(self.paired, self.comparisons)]
        if self.shared is not None:
            parts.append(self.shared)
        return "\n\n".join(parts)


def run(words: Sequence[str], options: CompareOptions) -> Compared:
    """Compare what the words name: print the tables, and write them and the figures."""
    if not words:
        raise ConfigError(["there is nothing to compare; name two or more, such as: tabicl-compare mini runs/mine"])
    is_sweep = [Path(word, STUDY).exists() for word in words]
    if options.output is None:
        options.output = words[0] if len(words) == 1 and is_sweep[0] else OUTPUT
    make_folder("output", Path(options.output))
    if len(words) == 1 and is_sweep[0] and options.suite is None:
        if unused := options.of_scoring():
            raise ConfigError([f"{', '.join(unused)}: without suite= the points are compared by their validations"])
        compared = of_validations(open_points(words[0], options.by), options)
    else:
        compared = of_tasks(words, is_sweep, options)
    print(compared.text)
    write(Path(options.output), compared, options.overwrite or (len(words) == 1 and is_sweep[0]))
    return compared


def open_points(folder: str, by: str | None) -> Points:
    require_sweep_packages()
    from tabicl_train.sweep.arms import Points
    from tabicl_train.sweep.results import Sweep

    return Points(Sweep(Path(folder)), by)


def of_validations(points: Points, options: CompareOptions) -> Compared:
    """Compare the points of a sweep by the last validations of their runs, paired by seed."""
    from tabicl_train.sweep.arms import shared_of_runs

    arms = points.merged(points.validations())
    metrics = chosen(options, [points.sweep.metric])
    return Compared(*compare_all(arms, metrics, options, by_seed=True), shared_of_runs(points))


def of_tasks(words: Sequence[str], is_sweep: Sequence[bool], options: CompareOptions) -> Compared:
    """Compare arms of any kind by their scores on tasks."""
    baselines = [word for word in words if is_baseline(word)]
    networks = {}  # by word
    points = {}
    files = {}  # read before anything is scored, which may take hours
    for word, is_one in zip(words, is_sweep, strict=True):
        if is_one:
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
    arms: list[Arm] = []
    given: list[str] = []  # the word of each arm
    wanted = list(baselines)  # which the first network is scored with
    found: dict[str, Arm] = {}
    for word in words:
        if word in points:
            own = points[word].merged([evaluated(runs, options)[0] for runs in points[word].networks()])
            if sum(is_sweep) > 1:
                own = [Arm(f"{word}: {arm.name}", arm.scores) for arm in own]
        elif word in networks:
            arm, *beside = evaluated(networks[word], options, wanted)
            found |= {each.name: each for each in beside}
            wanted = []
            own = [arm]
        elif word in baselines:
            own = [Arm(word, {})]  # until the first network has been scored
        else:
            own = files[word]
        arms += own
        given += [word] * len(own)
    if wanted:
        raise ConfigError(
            [f"{wanted[0]} is a baseline, which is scored beside a network; name one, or FILE.csv:METHOD"]
        )
    for number, word in enumerate(given):
        if word in baselines:
            arms[number] = found[word]
    if len(arms) < 2:
        raise ConfigError([f"{words[0]} is one arm; name another one to compare it with"])
    kinds = {judged_by(arm.frame(next(iter(arm.scores)))): arm.name for arm in arms}
    if len(kinds) > 1:
        raise ConfigError([f"{kinds['roc_auc']} predicts classes and {kinds['r2']} numbers; compare those of one kind"])
    metrics = chosen(options, METRICS[next(iter(kinds))])
    shared = None
    if len(points) == 1 and len(words) == 1:
        from tabicl_train.sweep.arms import shared_of_runs

        shared = shared_of_runs(points[words[0]])
    return Compared(*compare_all(distinct(arms, given), metrics, options), shared)


def chosen(options: CompareOptions, default: list[str]) -> list[str]:
    """Return the metrics to compare by."""
    if options.metric is None:
        return default
    return [options.metric] if isinstance(options.metric, str) else [str(name) for name in options.metric]


def compare_all(
    arms: Sequence[Arm], metrics: list[str], options: CompareOptions, by_seed: bool = False
) -> tuple[Paired, list[Comparison]]:
    paired = pair(arms, options.outside)
    return paired, [compare(paired, metric, options.reference, by_seed) for metric in metrics]


def write(folder: Path, compared: Compared, overwrite: bool) -> None:
    """Write the tables and, with matplotlib, the figures of the first metric."""
    write_tables(folder, compared.comparisons, overwrite)
    files = ["comparison.csv", "comparison.tex", "comparison_tasks.csv"]
    if is_installed("matplotlib"):
        from tabicl_train.report.comparison import write_figures

        files += [f"{name}.pdf and .png" for name in write_figures(folder, compared.comparisons[0])]
    else:
        info(f"figures   none, since they need matplotlib: {install('matplotlib', 'plots')}")
    info(f"written   {', '.join(files)} in {folder}")


def compare_points(sweep: Sweep) -> Compared | None:
    """Compare the finished points of a grid by its metric; None for a search, and with fewer than two points."""
    # The points of a search are as many as it has trials, and none of them is the one to compare others with.
    from tabicl_train.sweep.arms import Points

    if sweep.study.user_attrs["identity"]["sampler"] != "grid" or len(sweep.ranked) < 2:
        return None
    return of_validations(Points(sweep), CompareOptions())
