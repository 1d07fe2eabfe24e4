"""Settings of earlier versions that this one no longer has: the only list of them.

A command line or a file of settings that names one is refused in a line that says what to do instead. Checkpoints and
exports of earlier versions hold the values of all settings: they are read if a removed setting had no effect, and are
otherwise refused in such a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import yaml

from tabicl_train.errors import ConfigError
from tabicl_train.model.config import settings_of


@dataclass(frozen=True)
class Removed:
    """A setting that was removed.

    Parameters
    ----------
    advice : str
        What to do instead, as the end of a sentence.
    neutral : tuple, optional
        The values with which it had no effect. Default: files with any value are read, since the setting never changed
        what a run computes, or another removed setting says whether it did.
    owners : tuple of str, optional
        The names of the priors or optimizers that had it. Those of plug-ins may have an option of the same name.
    """

    advice: str
    neutral: tuple[Any, ...] | None = None
    owners: tuple[str, ...] = ()


# By dotted key, as on the command line of tabicl-train, with * for the name of a stage.
REMOVED: dict[str, Removed] = {
    "sweep.scaling_law": Removed("tests/benchmarks/scaling_law.py fits it to the runs of a sweep that have finished"),
    "sweep.forecast": Removed("tests/benchmarks/scaling_law.py forecasts losses from the runs of a sweep"),
    "trainer.triton": Removed("trainer.attention=auto, the default, uses Triton kernels on a GPU, and torch none"),
    "preflight": Removed("run tabicl-gpu-check checks=preflight with the settings of the run"),
    "preflight_steps": Removed("tabicl-gpu-check checks=preflight takes 50 steps, or as many as its minutes allow"),
    "validation.real_rows": Removed(
        "validation.suites=[] leaves real data out, as 0 did; otherwise at most 200 rows of each task are scored"
    ),
    "validation.probes": Removed("add them to the suites: validation.suites=[sklearn,probes]"),
    "averages.every": Removed("averages.ema=0.999 keeps an average of the weights of all steps"),
    "averages.last": Removed("averages.ema=0.999 keeps an average of the weights, which weights=ema takes"),
    "curriculum.stages.*.features_per_row": Removed(
        "features=[LOWEST,HIGHEST] draws the number of features; a run with such bands needs version 0.2.0", ([],)
    ),
    "curriculum.stages.*.small_rows": Removed("rows=[LOWEST,HIGHEST] is the one range of rows"),  # see small_share
    "curriculum.stages.*.small_share": Removed(
        "a prior or stage of its own can draw the short tables; a run with a share of them needs version 0.2.0", (0,)
    ),
    "curriculum.stages.*.uses": Removed(
        "store tables with tabicl-prior dump, and pass them again with prior=hdf5 prior.passes=2; a run that uses "
        "tables twice needs version 0.2.0",
        (1,),
    ),
    "model.residual_scalars": Removed(
        "a network without them computes the same functions; export those of a run with version 0.2.0, which folds "
        "them into the weights, and start from the export with init_weights",
        (False,),
    ),
    "model.missing_values": Removed(
        "missing values are filled with the mean of their column; a network that sees them needs version 0.2.0",
        (False,),
    ),
    "optimizer.cautious_weight_decay": Removed(
        "weight_decay of the stages decays all weights; a run with cautious weight decay needs version 0.2.0",
        (False,),
        owners=("muon", "muon_all", "adamw"),
    ),
    **{
        f"prior.realism.{name}": Removed(
            "no gain was shown, and prior.realism.missing stays; a run with it needs version 0.2.0", (0,)
        )
        for name in ("irrelevant", "levels", "tails", "rounding", "shift", "imbalance", "duplicates")
    },
    "prior.repeat": Removed(
        "prior.passes=N uses the tables of the file N times, each time permuted; a run that repeats a file needs "
        "version 0.2.0",
        (False,),
        owners=("hdf5",),
    ),
    "prior.folder": Removed(
        "tabicl-prior dump stores tables in HDF5 files, which prior=hdf5 prior.file=FOLDER reads; dump those again "
        "that an earlier version stored for prior=disk",
        ("",),
        owners=("disk",),
    ),
    "format": Removed(  # of tabicl-evaluate
        "the output has all scores, from which tabicl_train/evaluation/README.md makes the table for bencheval"
    ),
    "batch_size": Removed("the tables of a step are a batch: set curriculum.stages.NAME.tables"),  # of tabicl-prior
}

REMOVED_CHOICES = {"prior=disk": REMOVED["prior.folder"].advice}  # of files of settings


def removed_setting(key: str) -> Removed | None:
    """Return the entry of a dotted key; None if the setting was not removed."""
    stage_key = re.sub(r"^curriculum\.stages\.[^.]+\.", "curriculum.stages.*.", key)
    component_key = re.sub(r"^prior\.components\.[^.]+\.realism\.", "prior.realism.", key)
    return REMOVED.get(key) or REMOVED.get(stage_key) or REMOVED.get(component_key)


def removal(key: str) -> str | None:
    """Return the error about a setting that was removed; None if the key was not removed."""
    setting = removed_setting(key)
    return None if setting is None else f"{key}: removed in version 0.3.0; {setting.advice}"


def without_removed(source: Any, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings that a file of an earlier version holds, without those that were removed.

    Parameters
    ----------
    source : Any
        The file, which the error names.
    values : dict
        Nested plain values: a whole configuration, or a section of it.
    prefix : str, optional
        The key of the section with a dot at its end: "model."

    Returns
    -------
    dict
        A copy.

    Raises
    ------
    ConfigError
        If removed settings had an effect.
    """
    # Version 0.2.0 had two settings in place of validation.suites.
    kept: dict[str, Any] = {}
    if prefix == "validation." and "real_rows" in values:
        kept["suites"] = ["sklearn"] * bool(values["real_rows"]) + ["probes"] * bool(values.get("probes"))

    # Drop removed settings. Options of a plug-in's network, prior or optimizer stay even if they have the same name.
    problems = []
    own = options_of_network(values) if prefix == "model." else set()
    for name, value in values.items():
        key = f"{prefix}{name}"
        setting = removed_setting(key)
        if setting is not None and setting.owners and values.get("name") not in setting.owners:
            setting = None
        if name in own:
            setting = None
        if setting is None and isinstance(value, dict):  # a section, all problems of which are collected
            try:
                kept[name] = without_removed(source, value, f"{key}.")
            except ConfigError as error:
                problems += error.problems
        elif setting is None:
            kept[name] = value
        elif setting.neutral is not None and value not in setting.neutral:  # it had an effect
            problems.append(f"{source} has {key}={value}, which was removed in version 0.3.0; {setting.advice}")
    if problems:
        raise ConfigError(problems)
    return kept


def options_of_network(values: dict[str, Any]) -> set[str]:
    """Return the options that a network has in this version; a network of a plug-in may have one that ours lost."""
    try:
        return {field.name for field in fields(settings_of(values))}
    except ConfigError:  # it is not registered, which is reported where it is built
        return set()


def as_of_now(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run in terms of this version, to be shown and compared.

    Parameters
    ----------
    values : dict
        The content of config.yaml, of this or an earlier version.

    Returns
    -------
    dict
        A copy without removed settings; the values themselves if a removed setting had an effect.
    """
    try:
        return without_removed("config.yaml", values)
    except ConfigError:
        return values


def words_as_of_now(words: Iterable[str]) -> list[str]:
    """Return settings of a command line, from the journal of a sweep, in terms of this version.

    Parameters
    ----------
    words : iterable of str
        KEY=VALUE, of this or an earlier version.

    Returns
    -------
    list of str
        The words without removed settings; those that had an effect stay. `validation.suites` stands at the end for
        the settings that it has replaced.
    """
    kept = []
    validation: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        setting = removed_setting(key)
        if setting is None or setting.owners:  # another word names the owner
            kept.append(word)
        elif key in ("validation.real_rows", "validation.probes"):
            validation[key.removeprefix("validation.")] = yaml.safe_load(text)
        elif setting.neutral is not None and yaml.safe_load(text) not in setting.neutral:
            kept.append(word)
    suites = without_removed("", {"real_rows": True} | validation, "validation.")["suites"]
    if suites != ["sklearn"]:  # the default
        kept.append(f"validation.suites=[{','.join(suites)}]")
    return kept
