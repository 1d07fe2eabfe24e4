"""What tabicl-compare is given: networks, which it scores first, baselines, and CSV files of earlier evaluations."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from glob import glob
from hashlib import blake2b
from pathlib import Path

import pandas as pd

from priors.real.csv_format import csv_format
from tabicl_train.config.options import CompareOptions, EvaluateOptions
from tabicl_train.config.schema import REAL_SCORES
from tabicl_train.console import first_line, info
from tabicl_train.errors import ConfigError
from tabicl_train.evaluation.baselines import BASELINES, NUMBER_BASELINES
from tabicl_train.evaluation.compare import Arm
from tabicl_train.evaluation.evaluate import (
    TEXTS,
    identity,
    scored,
    short_name,
    stored_scores,
    unfinished,
    warn_of_version,
)
from tabicl_train.evaluation.scores import TABICL_PACKAGE
from tabicl_train.evaluation.suites import STORED_SCORES, sources
from tabicl_train.outputs import make_folder
from tabicl_train.prediction.export import read_weights
from tabicl_train.run_dir.curves import THIS_MODEL
from tabicl_train.run_dir.records import Records
from tabicl_train.weights import names as names_of_weights

SCORES = "scores"  # folder in the output, with a CSV file for each network that was scored
PATTERN = "*?["  # a word with one of these stands for several runs


@dataclass(frozen=True)
class Networks:
    """Networks that are one arm: runs that differ in their seed, or one network without seeds."""

    name: str
    paths: dict[Hashable, str] = field(default_factory=dict)  # by seed; a single one has the seed None


def is_csv(word: str) -> bool:
    """Whether a word is FILE.csv or FILE.csv:METHOD."""
    return re.search(r"\.csv(:.+)?$", word) is not None


def is_baseline(word: str) -> bool:
    """Whether a word is the name of a baseline, and of nothing else."""
    if Path(word).exists() or word in names_of_weights():
        return False
    return word in baseline_names()


@functools.cache
def baseline_names() -> frozenset[str]:
    """Return the names of the baselines, and of the other methods of which the package has stored scores."""
    methods = {*BASELINES, *NUMBER_BASELINES}
    for paths in STORED_SCORES.values():
        for path in paths:
            if path.is_file():
                methods |= set(pd.read_csv(path, comment="#")["method"])
    return frozenset(methods)


def networks_of(word: str) -> Networks:
    """Return the networks of a word: a run, a file, a name of weights, or a pattern such as 'runs/demo-*'."""
    if Path(word).exists() or not any(character in word for character in PATTERN):
        return Networks(short_name(word), {None: word})
    paths = sorted(path for path in glob(word) if Path(path, "config.yaml").is_file())
    if not paths:
        raise ConfigError([f"{word}: there is no such run directory"])
    seeds: list[Hashable] = []
    for path in paths:
        config = Records(Path(path)).config() or {}
        seeds.append(config.get("seed"))
    if None in seeds or len(set(seeds)) < len(seeds):
        raise ConfigError([f"{word} stands for runs with the seeds {seeds}; each must have a seed of its own"])
    return Networks(short_name(word), dict(zip(seeds, paths, strict=True)))


def distinct(arms: Sequence[Arm], words: Sequence[str]) -> list[Arm]:
    """Give arms of the same name the words that they were given by; raises ConfigError if these are the same, too."""
    counts = Counter(arm.name for arm in arms)
    renamed = []
    for arm, word in zip(arms, words, strict=True):
        renamed.append(dataclasses.replace(arm, name=word) if counts[arm.name] > 1 else arm)
    for name, count in Counter(arm.name for arm in renamed).items():
        if count > 1:
            raise ConfigError([f"{count} arms are called {name}; name each once"])
    return renamed


def read_csv_arms(word: str, all_methods: bool = False) -> list[Arm]:
    """Read FILE.csv or FILE.csv:METHOD, as tabicl-evaluate writes it; by default only the network that it is about."""
    path = Path(word)
    method = None
    if ".csv:" in word:
        stem, _, method = word.partition(".csv:")
        path = Path(f"{stem}.csv")
    results = read_results(path)
    methods = list(dict.fromkeys(results["method"]))
    if method is not None and method not in methods:
        raise ConfigError([f"{path} has no scores of {method!r}; its methods are {', '.join(methods)}"])
    if method is not None:
        wanted = [method]
    elif all_methods:
        wanted = methods
    else:
        wanted = methods[:1]
    arms = []
    for each in wanted:
        arm_name = short_name(str(path)) if each == THIS_MODEL else each
        arms.append(arm_of(results, each, arm_name))
    return arms


def read_results(path: Path) -> pd.DataFrame:
    """Read a CSV file of scores; raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}"]) from None
    skipped = 1 if lines and lines[0].startswith("#") else 0  # stored scores of baselines begin with a comment
    try:
        results = pd.read_csv(path, skiprows=skipped, dtype=dict.fromkeys(TEXTS, str))
    except (ValueError, pd.errors.ParserError) as error:
        raise ConfigError([f"{path} cannot be read: {first_line(error)}"]) from None
    missing = [name for name in ("data", "split", "method") if name not in results]
    if missing or not REAL_SCORES.keys() & set(results) or results.empty:
        lacks = ", ".join(missing) or " or ".join(REAL_SCORES)
        raise ConfigError([f"{path} has no column {lacks}, which tabicl-evaluate output=FILE.csv writes"])
    if results.duplicated(["data", "split", "method"]).any():
        raise ConfigError([f"{path} has several rows for the same task, split and method"])
    return results


def arm_of(results: pd.DataFrame, method: str, name: str) -> Arm:
    """Return the arm of a method in a table of scores."""
    return Arm(name, {None: scores_of(results, method)}, is_trained=method in (THIS_MODEL, TABICL_PACKAGE))


def scores_of(results: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the rows of a method in a table of scores, by task and split."""
    return results[results["method"] == method].set_index(["data", "split"])


def evaluated(networks: Networks, options: CompareOptions, baselines: Collection[str] = ()) -> list[Arm]:
    """Score networks, and baselines on the same splits, or read what an earlier call has written."""
    # Baselines see the same tasks and splits whatever the seed of a network is, so they are scored once.
    first_seed = next(iter(networks.paths))
    arms_of_baselines: list[Arm] = []
    scores = {}  # of the networks, by seed
    tasks: list[str] = []  # the same for all seeds
    for seed, path in networks.paths.items():
        beside = baselines if seed == first_seed else ()
        results, tasks = results_of(path, options, beside)
        arms_of_baselines += [arm_of(results, name, name) for name in beside]
        scores[seed] = scores_of(results, THIS_MODEL)
    return [Arm(networks.name, scores, listed=tuple(tasks)), *arms_of_baselines]


def check_baselines(names: Collection[str], settings: EvaluateOptions, numbers: bool) -> None:
    """Raise ConfigError for a baseline that is neither fitted nor stored for these tasks, before hours of scoring."""
    available = set(NUMBER_BASELINES if numbers else BASELINES)
    stored = stored_scores(settings, numbers)
    if stored is not None:
        available |= set(stored["method"])
        if names:  # also if nothing is left to score
            warn_of_version(settings.suite, numbers)
    for name in names:
        if name not in available:
            raise ConfigError([f"there are no scores of {name} on such tasks of suite={settings.suite}"])


def results_of(checkpoint: str, options: CompareOptions, baselines: Collection[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return the scores of a network, from the output folder if they are there, and all tasks, also those without."""
    settings = EvaluateOptions(
        checkpoint=checkpoint,
        weights=options.weights,
        suite=options.suite or "sklearn",
        folder=options.folder,
        tasks=options.tasks,
        separator=options.separator,
        decimal=options.decimal,
        missing_words=options.missing_words,
        splits=options.splits,
        rows=options.rows,
        n_estimators=options.n_estimators,
    )
    # weights=ema is for the runs among the arms; others, such as mini, hold one set.
    pretrained = read_weights(checkpoint, options.weights, accept_single_set=True)
    # The name of the file holds a digest of what decides its content: weights, settings, code of plug-ins, data.
    form = csv_format(settings.separator, settings.decimal, settings.missing_words)
    numbers = pretrained.config.is_regression
    tasks = sources(settings.suite, settings.folder, numbers, form, settings.tasks)
    check_baselines(baselines, settings, numbers)
    content = identity(settings, pretrained.config, pretrained.tensors, tasks)
    content |= {"baselines": sorted(baselines)}
    digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    folder = Path(options.output or ".", SCORES)
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", short_name(checkpoint))
    path = folder / f"{name}-{digest}.csv"
    if not path.exists() or unfinished(path).exists():
        make_folder("output", folder)
        info(f"score     {checkpoint}")
        scored(dataclasses.replace(settings, output=str(path)), baselines, pretrained)
    return read_results(path), [task.name for task in tasks]
