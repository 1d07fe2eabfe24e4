"""What tabicl-compare is given: words become arms, and arms get their scores.

A word is a network or several, which are scored first; a baseline, scored with the first of them; or a CSV file of an
earlier evaluation. Those of a sweep are in sweep/arms.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from glob import glob
from hashlib import blake2b
from pathlib import Path
from typing import Any

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
    name_of_checkpoint,
    score_checkpoint,
    stored_scores,
    unfinished,
    warn_of_version,
)
from tabicl_train.evaluation.identity import identity, identity_changes
from tabicl_train.evaluation.scores import TABICL_PACKAGE
from tabicl_train.evaluation.suites import STORED_SCORES, sources
from tabicl_train.outputs import make_folder
from tabicl_train.run.curves import OUTSIDE, THIS_MODEL
from tabicl_train.run.records import Records
from tabicl_train.weights import names as names_of_weights
from tabicl_train.weights.reader import read_weights

SCORES = "scores"  # folder in the output, with a CSV file for each network that was scored
PATTERN = "*?["  # a word with one of these stands for several runs


def arms_of(word: str, is_alone: bool = False) -> list[Arm]:
    """Return the arms that a word names: one, or those of all methods of a CSV file that is alone."""
    if re.search(r"\.csv(:.+)?$", word) is not None:
        return read_csv_arms(word, all_methods=is_alone)
    is_path = Path(word).exists()
    if word in baseline_names() and not is_path and word not in names_of_weights():
        return [Arm(word, is_trained=False)]
    if any(character in word for character in PATTERN) and not is_path:
        return [Arm(name_of_checkpoint(word), paths=runs_by_seed(word))]
    return [Arm(name_of_checkpoint(word), paths={None: word})]


@functools.cache
def baseline_names() -> frozenset[str]:
    """Return the names of the baselines, and of the other methods whose scores the package has."""
    methods = {*BASELINES, *NUMBER_BASELINES}
    for paths in STORED_SCORES.values():
        for path in paths:
            if path.is_file():
                methods |= set(pd.read_csv(path, comment="#")["method"])
    return frozenset(methods)


def runs_by_seed(pattern: str) -> dict[Hashable, str]:
    """Return the runs of a pattern such as 'runs/demo-*', which are one arm."""
    paths = sorted(path for path in glob(pattern) if Path(path, "config.yaml").is_file())
    if not paths:
        raise ConfigError([f"{pattern}: there is no such run directory"])
    seeds: list[Hashable] = []
    for path in paths:
        config = Records(Path(path)).config() or {}
        seeds.append(config.get("seed"))
    if None in seeds or len(set(seeds)) < len(seeds):
        raise ConfigError([f"{pattern} stands for runs with the seeds {seeds}; each must have a seed of its own"])
    return dict(zip(seeds, paths, strict=True))


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
        arm_name = name_of_checkpoint(str(path)) if each == THIS_MODEL else each
        arms.append(arm_of_method(results, each, arm_name))
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


def arm_of_method(results: pd.DataFrame, method: str, name: str) -> Arm:
    """Return the arm of a method in a table of scores."""
    return Arm(name, {None: scores_of(results, method)}, is_trained=method in (THIS_MODEL, TABICL_PACKAGE))


def scores_of(results: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the rows of a method in a table of scores, by task and split."""
    return results[results["method"] == method].set_index(["data", "split"])


def paths_of(arm: Arm) -> Iterator[str]:
    """Yield the networks of an arm and of its parts that are to be scored."""
    yield from arm.paths.values()
    for part in arm.parts:
        yield from paths_of(part)


def names_of_baselines(arms: Sequence[Arm]) -> list[str]:
    """Return the names of the baselines that have no scores yet."""
    return [arm.name for arm in arms if not (arm.scores or arm.paths or arm.parts)]


def with_scores(arms: Sequence[Arm], options: CompareOptions, output: Path) -> list[Arm]:
    """Find the scores of arms.

    Parameters
    ----------
    arms : sequence of Arm
        Networks, baselines and arms that have scores.
    options : CompareOptions
        The suite, and how networks are scored on it.
    output : Path
        The folder in which scores are kept, and where an earlier call may have written them.

    Returns
    -------
    list of Arm
        The same arms, with scores.
    """
    # Baselines see the same tasks and splits whatever the seed of a network is, so they are scored once.
    baselines = names_of_baselines(arms)
    found: dict[str, tuple[pd.DataFrame, list[str]]] = {}
    for arm in arms:
        for path in paths_of(arm):
            if path not in found:
                found[path] = results_of(options.evaluation_of(path), () if found else baselines, output)
    return [with_scores_of(arm, found) for arm in arms]


def with_scores_of(arm: Arm, found: Mapping[str, tuple[pd.DataFrame, list[str]]]) -> Arm:
    """Return an arm with its scores; found: what `results_of` returned for each network, the first with baselines."""
    if arm.parts:
        return mean_arm(arm.name, [with_scores_of(part, found) for part in arm.parts])
    if arm.scores:
        return arm
    if not arm.paths:
        results, _ = next(iter(found.values()))
        return arm_of_method(results, arm.name, arm.name)
    scores = {}
    tasks: list[str] = []  # the same for all seeds
    for seed, path in arm.paths.items():
        results, tasks = found[path]
        scores[seed] = scores_of(results, THIS_MODEL)
    return dataclasses.replace(arm, scores=scores, listed=tuple(tasks))


def mean_arm(name: str, arms: Sequence[Arm]) -> Arm:
    """Return the means of several arms over the seeds and tasks that all of them have."""
    first, *rest = arms
    scores = {}
    for seed in first.scores:
        if not all(seed in arm.scores for arm in rest):
            continue
        frames = [arm.scores[seed] for arm in arms]
        shared = frames[0].index
        for frame in frames[1:]:
            shared = shared[shared.isin(frame.index)]
        frames = [frame.loc[shared] for frame in frames]
        # nan stays nan: the mean over the other arms would not be paired with that of another mean.
        total = frames[0].select_dtypes("number")
        for frame in frames[1:]:
            total = total + frame.select_dtypes("number")
        means = total / len(frames)
        if "trained_range" in frames[0]:  # outside for the mean if outside for any arm
            ranges = pd.concat([frame["trained_range"] for frame in frames], axis=1)
            means["trained_range"] = ranges.iloc[:, 0].mask((ranges == OUTSIDE).any(axis=1), OUTSIDE)
        scores[seed] = means
    return Arm(name, scores, listed=first.listed)


def results_of(settings: EvaluateOptions, baselines: Collection[str], output: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the scores of a network, from the output folder if they are there, and all tasks, also those without."""
    checkpoint = settings.checkpoint
    # weights=ema is for the runs among the arms; others, such as mini, hold one set.
    pretrained = read_weights(checkpoint, settings.weights, accept_single_set=True)
    # The name of the file holds a digest of what decides its content, which a JSON file of the same name has in full.
    form = csv_format(settings.separator, settings.decimal, settings.missing_words)
    numbers = pretrained.config.is_regression
    tasks = sources(settings.suite, settings.folder, numbers, form, settings.tasks)
    check_baselines(baselines, settings, numbers)
    content = identity(settings, pretrained, tasks, baselines) | {"baselines": sorted(baselines)}
    digest = blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    folder = output / SCORES
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", name_of_checkpoint(checkpoint))
    path = folder / f"{name}-{digest}.csv"
    if not path.exists() or unfinished(path).exists():
        make_folder("output", folder)
        info(f"score     {checkpoint}{reason_to_score_again(folder, name, checkpoint, content)}")
        Records(folder).replace(f"{path.stem}.json", json.dumps({"checkpoint": checkpoint, **content}))
        score_checkpoint(dataclasses.replace(settings, output=str(path)), baselines, pretrained)
    return read_results(path), [task.name for task in tasks]


def reason_to_score_again(folder: Path, name: str, checkpoint: str, content: Mapping[str, Any]) -> str:
    """Say why the scores of a network that are in the folder are not used; an empty text if there are none."""
    reasons: list[list[str]] = []  # for each of them
    for path in sorted(folder.glob(f"{name}-*.csv")):
        if re.fullmatch("[0-9a-f]{8}", path.stem.removeprefix(f"{name}-")) is None:
            continue  # of a network with a longer name
        before = Records(folder).json(f"{path.stem}.json")
        if before is None:
            reasons.append([f"it is not known how {path.name} was made"])
        elif before.pop("checkpoint", None) == checkpoint:
            reasons.append(identity_changes(before, content))
    nearest = min(reasons, key=len, default=[])
    return f" again: {'; '.join(nearest)}" if nearest else ""


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
