"""tabicl-compare, and the comparison at the end of a sweep: from words to arms, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tabicl_train.config.options import CompareOptions
from tabicl_train.console import info, one_line
from tabicl_train.errors import ConfigError, install, is_installed, require_sweep_packages
from tabicl_train.evaluation.arms import arms_of, distinct, names_of_baselines, paths_of, with_scores
from tabicl_train.evaluation.compare import (
    Arm,
    Comparison,
    Paired,
    all_warnings,
    compare_arms,
    comparisons_as_text,
    default_metrics,
    pair,
    write_tables,
)
from tabicl_train.outputs import STUDY, make_folder

if TYPE_CHECKING:
    from tabicl_train.sweep.results import Sweep

OUTPUT = "comparison"


@dataclass
class Compared:
    """The result of a comparison."""

    paired: Paired
    comparisons: list[Comparison]
    shared: str | None = None  # which arms were trained on identical tables

    @property
    def text(self) -> str:
        """The tables and sentences for the terminal, without the warnings."""
        parts = [comparisons_as_text(self.paired, self.comparisons)]
        if self.shared is not None:
            parts.append(one_line(self.shared))
        return "\n\n".join(parts)


def run_comparison(words: Sequence[str], options: CompareOptions) -> Compared:
    """Compare what the words name, print the tables, and write tables and figures.

    Parameters
    ----------
    words : sequence of str
        What to compare, as on the command line of tabicl-compare.
    options : CompareOptions
        Its options.

    Returns
    -------
    Compared

    Raises
    ------
    ConfigError
        If there is nothing to compare, or an option does not apply to what is compared.
    """
    if not words:
        raise ConfigError(["there is nothing to compare; name two or more, such as: tabicl-compare mini runs/mine"])
    sweeps = {word: open_sweep(word) for word in words if Path(word, STUDY).exists()}
    is_one_sweep = len(words) == 1 and bool(sweeps)
    output = Path(options.output or (words[0] if is_one_sweep else OUTPUT))
    if options.by is not None and not sweeps:
        raise ConfigError([f"by is {options.by!r}; it applies to sweeps only"])
    if is_one_sweep and options.suite is None:
        if unused := options.given_for_scoring():
            raise ConfigError([f"{', '.join(unused)}: without suite= the points are compared by their validations"])
        compared = compare_validations(sweeps[words[0]], options)
    else:
        compared = compare_on_tasks(words, sweeps, options, output)
    for warning in all_warnings(compared.comparisons):
        print(one_line(f"warning   {warning}"))
    print(compared.text)
    for line in write_comparison(output, compared, overwrite=options.overwrite or is_one_sweep):
        info(line)
    return compared


def open_sweep(folder: str) -> Sweep:
    require_sweep_packages()
    from tabicl_train.sweep.results import Sweep

    return Sweep(Path(folder))


def compare_validations(sweep: Sweep, options: CompareOptions) -> Compared:
    """Compare the points of a sweep by the last validations of their runs, paired by seed."""
    from tabicl_train.sweep.arms import arms_of_sweep, shared_of_runs

    arms = arms_of_sweep(sweep, options.by, validated=True)
    paired, comparisons = compare_all(arms, chosen_metrics(options) or [sweep.metric], options, by_seed=True)
    for number, comparison in enumerate(comparisons):
        warning = sweep.warning(comparison.metric)
        if warning is not None:
            pairs = [replace(found, is_comparable=False) for found in comparison.pairs]
            comparisons[number] = replace(comparison, pairs=pairs, warnings=[warning, *comparison.warnings])
    return Compared(paired, comparisons, shared_of_runs(sweep))


def compare_on_tasks(
    words: Sequence[str], sweeps: Mapping[str, Sweep], options: CompareOptions, output: Path
) -> Compared:
    """Compare arms of any kind by their scores on tasks.

    Parameters
    ----------
    words : sequence of str
        What to compare, as on the command line: networks, runs, sweeps, baselines and CSV files of scores.
    sweeps : mapping
        The sweeps among the words.
    options : CompareOptions
        The suite, and how networks are scored on it.
    output : Path
        The folder in which scores are kept. Networks that have none there are scored, which may take hours.

    Returns
    -------
    Compared

    Raises
    ------
    ConfigError
        Before anything is scored, if a word names nothing, or the arms cannot be compared.
    """
    arms, word_of_arm = find_arms(words, sweeps, options.by)
    check_arms(arms, options)
    arms = with_scores(distinct(arms, word_of_arm), options, output)

    metrics = chosen_metrics(options) or default_metrics(arms)
    paired, comparisons = compare_all(arms, metrics, options)

    # Only for the points of one sweep, whose configurations are known.
    shared = None
    if len(words) == 1 and sweeps:
        from tabicl_train.sweep.arms import shared_of_runs

        shared = shared_of_runs(sweeps[words[0]])
    return Compared(paired, comparisons, shared)


def find_arms(words: Sequence[str], sweeps: Mapping[str, Sweep], by: str | None) -> tuple[list[Arm], list[str]]:
    """Return the arms that the words name, without their scores, and the word of each arm.

    With several sweeps, the name of each point begins with the word of its sweep, since two sweeps may have points of
    the same name.
    """
    arms: list[Arm] = []
    word_of_arm: list[str] = []
    for word in words:
        if word in sweeps:
            from tabicl_train.sweep.arms import arms_of_sweep

            arms_of_word = arms_of_sweep(sweeps[word], by)
            if len(sweeps) > 1:
                arms_of_word = [replace(arm, name=f"{word}: {arm.name}") for arm in arms_of_word]
        else:
            arms_of_word = arms_of(word, is_alone=len(words) == 1)
        arms += arms_of_word
        word_of_arm += [word] * len(arms_of_word)
    return arms, word_of_arm


def check_arms(arms: Sequence[Arm], options: CompareOptions) -> None:
    """Raise ConfigError if the arms cannot be compared, or if options of scoring are given but nothing is scored."""
    if len(arms) < 2:
        raise ConfigError([f"{arms[0].name} is one arm; name another one to compare it with"])
    if any(path for arm in arms for path in paths_of(arm)):
        return

    # Nothing is scored. Then options of scoring have no effect, and there is no network to score baselines with.
    unused = options.given_for_scoring()
    if unused:
        raise ConfigError([f"{', '.join(unused)}: no network is scored, since files hold their scores already"])
    baselines = names_of_baselines(arms)
    if baselines:
        scored = "a baseline, which is scored together with a network"
        raise ConfigError([f"{baselines[0]} is {scored}; name one, or FILE.csv:METHOD"])


def chosen_metrics(options: CompareOptions) -> list[str]:
    """Return the metrics that the options name; empty if they name none, which means the default ones."""
    if options.metric is None:
        return []
    if isinstance(options.metric, str):
        return [options.metric]
    return [str(name) for name in options.metric]


def compare_all(
    arms: Sequence[Arm], metrics: list[str], options: CompareOptions, by_seed: bool = False
) -> tuple[Paired, list[Comparison]]:
    """Pair the scores of the arms, and compare the arms by each metric."""
    paired = pair(arms, options.outside)
    comparisons = [compare_arms(paired, metric, options.reference, by_seed) for metric in metrics]
    return paired, comparisons


def write_comparison(folder: Path, compared: Compared, overwrite: bool) -> list[str]:
    """Write the tables and, if matplotlib is installed, the figures of the first metric.

    Parameters
    ----------
    folder : Path
        The folder, which is made if it is missing.
    compared : Compared
        The result of a comparison.
    overwrite : bool
        Whether to replace tables that are there already.

    Returns
    -------
    list of str
        Lines for the user that name the files.
    """
    make_folder("output", folder)
    write_tables(folder, compared.comparisons, overwrite)
    files = ["comparison.csv", "comparison.tex", "comparison_tasks.csv"]
    no_figures = []
    if is_installed("matplotlib"):
        from tabicl_train.report.comparison import write_figures

        files += [f"{name}.pdf and .png" for name in write_figures(folder, compared.comparisons[0])]
    else:
        no_figures = [f"figures   not drawn; they need matplotlib: {install('matplotlib', 'plots')}"]
    return [*no_figures, f"written   {', '.join(files)} in {folder}"]


def compare_points(sweep: Sweep) -> Compared | None:
    """Compare the finished points of a grid by its metric; None for fewer than two points, and for a search.

    A search has as many points as trials, none of which is a reference for the others.
    """
    if sweep.study.user_attrs["identity"]["sampler"] != "grid" or len(sweep.ranked) < 2:
        return None
    return compare_validations(sweep, CompareOptions())
