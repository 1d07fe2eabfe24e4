"""Settings of earlier versions that this one no longer has: the only list of them.

A command line or a file of settings that names one is refused in a line that says what to do instead. Checkpoints and
exports of earlier versions hold the values of all settings: they are read if a removed setting had no effect, and are
otherwise refused in such a line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tabicl_train.errors import ConfigError


@dataclass(frozen=True)
class Removed:
    """A setting that was removed.

    Parameters
    ----------
    advice : str
        What to do instead, as the end of a sentence.
    neutral : tuple, optional
        The values with which it had no effect. None: it never changed what a run computes, so files with any value are
        read.
    """

    advice: str
    neutral: tuple[Any, ...] | None = None


# By dotted key, as on the command line of tabicl-train; the name of a stage is *.
REMOVED: dict[str, Removed] = {
    "sweep.scaling_law": Removed("tests/benchmarks/scaling_law.py fits it to the runs of a sweep that have finished"),
    "sweep.forecast": Removed("tests/benchmarks/scaling_law.py forecasts losses from the runs of a sweep"),
    "preflight": Removed("run tabicl-gpu-check checks=preflight with the settings of the run"),
    "preflight_steps": Removed("tabicl-gpu-check checks=preflight takes 50 steps, or as many as its minutes allow"),
    "validation.real_rows": Removed("set validation.suites=[] instead of 0, and leave it out instead of other numbers"),
    "validation.probes": Removed("add them to the suites: validation.suites=[sklearn,probes]"),
}


def removed_setting(key: str) -> Removed | None:
    """Return the entry of a dotted key of this or an earlier version; None if it was not removed."""
    return REMOVED.get(key) or REMOVED.get(re.sub(r"^curriculum\.stages\.[^.]+\.", "curriculum.stages.*.", key))


def removal(key: str) -> str | None:
    """Return the line about a key that is no setting any more; None if it never was one."""
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
    kept: dict[str, Any] = {}
    problems = []
    if prefix == "validation." and "real_rows" in values:  # of version 0.2.0, which had two settings instead
        kept["suites"] = ["sklearn"] * bool(values["real_rows"]) + ["probes"] * bool(values.get("probes"))
    for name, value in values.items():
        key = f"{prefix}{name}"
        setting = removed_setting(key)
        if setting is None and isinstance(value, dict):
            try:
                kept[name] = without_removed(source, value, f"{key}.")
            except ConfigError as error:
                problems += error.problems
        elif setting is None:
            kept[name] = value
        elif setting.neutral is not None and value not in setting.neutral:
            problems.append(f"{source} has {key}={value}, which was removed in version 0.3.0; {setting.advice}")
    if problems:
        raise ConfigError(problems)
    return kept
