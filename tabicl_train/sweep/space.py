"""The space of a sweep: its axes, as distributions of Optuna, and the settings of tabicl-train for their values."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from tabicl_train.config.compose import hydra_text

Point = dict[str, Any]  # a value for each axis, by its key
MOST_RUNS = 10_000  # of a grid, whose points are composed before the first run, at 11 ms each


@dataclass
class Axis:
    """A setting, or several settings together, that varies."""

    key: str
    distribution: BaseDistribution
    settings: list[list[str]]  # of each choice, in their order; empty for a range
    prefix: str = ""  # "+" or "++" of a range that adds its setting
    has_labels: bool = False  # whether the choices are labels of settings that change together

    @property
    def choices(self) -> list[Any]:
        """All choices, or the ends of a range."""
        if isinstance(self.distribution, CategoricalDistribution):
            return list(self.distribution.choices)
        return [self.distribution.low, self.distribution.high]

    def only(self, labels: list[Any]) -> Axis:
        """Return the axis with some of its choices, in its own order."""
        kept = [label for label in self.choices if label in labels]
        settings = [self.overrides(label) for label in kept]
        return dataclasses.replace(self, distribution=CategoricalDistribution(kept), settings=settings)

    def overrides(self, value: Any) -> list[str]:
        """Return the settings of tabicl-train for a value."""
        if not self.settings:  # a range
            return [f"{self.prefix}{self.key}={value!r}"]
        return self.settings[self.choices.index(value)]

    def suggest(self, trial: optuna.Trial) -> Any:
        """Draw the value of a trial, which keeps it."""
        distribution = self.distribution
        if isinstance(distribution, CategoricalDistribution):
            return trial.suggest_categorical(self.key, self.choices)
        suggest = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
        return suggest(self.key, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def choices_axis(key: str, values: dict[str, Any], element: str = "") -> Axis:
    """Return an axis of several values.

    Parameters
    ----------
    key : str
        The key of the setting.
    values : dict
        The values by their texts in Hydra's grammar.
    element : str, optional
        The key as the command line has it, with pluses in front. Default: `key`.

    Returns
    -------
    Axis
        The choices are the values. Optuna accepts no lists as choices and considers 1 and true equal; in these cases
        the choices are the texts.
    """
    are_plain = all(isinstance(value, str | int | float | None) for value in values.values())
    if are_plain and len(set(values.values())) == len(values):
        distribution = CategoricalDistribution(list(values.values()))
    else:
        distribution = CategoricalDistribution(list(values))
    return Axis(key, distribution, settings=[[f"{element or key}={text}"] for text in values])


def range_axis(key: str, low: Any, high: Any, prefix: str = "", **options: Any) -> Axis:
    """Return the axis of a range.

    Parameters
    ----------
    key : str
        The key of the setting.
    low, high : int or float
        The ends of the range. If both are of type int, the range consists of whole numbers.
    prefix : str, optional
        "+" or "++" of a setting that is added.
    **options
        Options of Optuna's distribution, `log` and `step`.

    Returns
    -------
    Axis

    Raises
    ------
    ValueError, TypeError
        If the ends or the options are invalid.
    """
    are_numbers = type(low) in (int, float) and type(high) in (int, float)
    if not are_numbers or not -math.inf < low < high < math.inf:
        raise ValueError("low and high must be finite numbers, and low must be below high")
    are_whole = isinstance(low, int) and isinstance(high, int)
    kind = IntDistribution if are_whole else FloatDistribution
    return Axis(key, kind(low, high, **options), settings=[], prefix=prefix)


def axis_of_space(key: str, entry: Any) -> Axis:
    """Return the axis of an entry of a sweep's space; raises ValueError if it is invalid."""
    # A list of values.
    if isinstance(entry, list) and entry:
        return choices_axis(key, {override_text(value): value for value in entry})

    # A range.
    if isinstance(entry, dict) and {"low", "high"} <= entry.keys():
        try:
            return range_axis(key, **entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} is not a range: {error}") from None

    # Labels of settings that change together.
    if isinstance(entry, dict) and entry and all(map(is_texts, entry.values())):
        labels = CategoricalDistribution([str(label) for label in entry])
        return Axis(key, labels, [list(settings) for settings in entry.values()], has_labels=True)

    forms = "[VALUE, ...], {low: , high: , log: , step: } or {LABEL: [SETTING=VALUE, ...], ...}"
    raise ValueError(f"{key} is {entry!r}; it must have the form {forms}")


def is_texts(entry: Any) -> bool:
    return isinstance(entry, list) and all(isinstance(text, str) for text in entry)


def axis_of_override(override: Override) -> Axis | None:
    """Return the axis of an override with several values; None if it has one value."""
    if not override.is_sweep_override():
        return None
    element = override.get_key_element()
    key = element.lstrip("+")
    value = override.value()
    if isinstance(value, IntervalSweep):
        prefix = element.removesuffix(key)
        return range_axis(key, value.start, value.end, prefix, log="log" in value.tags)
    if isinstance(value, RangeSweep):
        check_range(value)
    parser = OverridesParser.create()
    values = {}
    for text in override.sweep_string_iterator():
        values[text] = parser.parse_override(f"x={text}").value()
    return choices_axis(key, values, element)


def check_range(value: RangeSweep) -> None:
    """Raise ValueError if range(START,STOP,STEP) has too many values, before it is expanded."""
    if not value.step:
        raise ValueError("the step of a range must not be 0")
    if (value.stop - value.start) / value.step > MOST_RUNS:
        raise ValueError(f"it has more than {MOST_RUNS:,} values, the most that a sweep tries of a setting")


def grid(axes: list[Axis]) -> Iterator[Point]:
    """Yield all combinations of the choices."""
    keys = [axis.key for axis in axes]
    for values in itertools.product(*[axis.choices for axis in axes]):
        yield dict(zip(keys, values, strict=True))


def examples(axes: list[Axis]) -> list[Point]:
    """Return points that cover every choice of each axis, and both ends of each range."""
    first = {axis.key: axis.choices[0] for axis in axes}
    points = [first]
    for axis in axes:
        for value in axis.choices[1:]:
            points.append(first | {axis.key: value})
    return points


def override_text(value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if isinstance(value, str):
        return hydra_text(value)
    if isinstance(value, list):
        return "[" + ",".join(map(override_text, value)) + "]"
    if isinstance(value, dict):
        pairs = [f"{key}:{override_text(inner)}" for key, inner in value.items()]
        return "{" + ",".join(pairs) + "}"
    return json.dumps(value)


def rounded_text(value: Any) -> str:
    """Format a value for people: 0.001 rather than 0.0010000000000000002."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def label(point: Point) -> str:
    """Format a point as part of a file name, independent of the order of its axes."""
    names = short_names(list(point))
    parts = [f"{names[key]}-{rounded_text(value).strip('[]{}')}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(sorted(parts)))[:150]


def short_names(keys: list[str]) -> dict[str, str]:
    """Return the shortest unique suffix of each dotted key, such as lr for curriculum.stages.a.lr."""
    counts = collections.Counter()  # number of keys that end with a suffix
    for key in keys:
        counts.update(suffixes(key))
    names = {}
    for key in keys:
        unique = [suffix for suffix in suffixes(key) if counts[suffix] == 1]
        names[key] = unique[0] if unique else key
    return names


def suffixes(key: str) -> list[str]:
    """Return the ends of a dotted key, the shortest first: c, b.c and a.b.c for a.b.c."""
    words = key.split(".")
    return [".".join(words[first:]) for first in reversed(range(len(words)))]
