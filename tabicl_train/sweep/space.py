"""The space of a sweep: its axes, as distributions of Optuna, and the settings of tabicl-train for their values."""

from __future__ import annotations

import collections
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

Point = dict[str, Any]  # a value for each axis, by its key
MOST_RUNS = 10_000  # of a grid: its points are composed before the first run, at 11 ms each


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

    def overrides(self, value: Any) -> list[str]:
        return self.settings[self.choices.index(value)] if self.settings else [f"{self.prefix}{self.key}={value!r}"]

    def suggest(self, trial: optuna.Trial) -> Any:
        """Draw the value of a trial, which keeps it."""
        d = self.distribution
        if isinstance(d, IntDistribution):
            return trial.suggest_int(self.key, d.low, d.high, step=d.step, log=d.log)
        if isinstance(d, FloatDistribution):
            return trial.suggest_float(self.key, d.low, d.high, step=d.step, log=d.log)
        return trial.suggest_categorical(self.key, self.choices)


def choices(key: str, values: dict[str, Any], element: str = "") -> Axis:
    """Return an axis of values by their texts, which are its choices for lists, or if values are equal (1 and true)."""
    plain = all(isinstance(value, str | int | float | None) for value in values.values())
    named = list(values.values()) if plain and len(set(values.values())) == len(values) else list(values)
    return Axis(key, CategoricalDistribution(named), [[f"{element or key}={text}"] for text in values])


def interval(key: str, low: Any, high: Any, prefix: str = "", **options: Any) -> Axis:
    """Return the axis of a range, of whole numbers if both ends are; raises ValueError or TypeError."""
    if type(low) not in (int, float) or type(high) not in (int, float) or not -math.inf < low < high < math.inf:
        raise ValueError("low and high must be two finite numbers, low the smaller one")
    kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return Axis(key, kind(low, high, **options), [], prefix)


def axis_of_space(key: str, entry: Any) -> Axis:
    """Return the axis of an entry of a sweep's space; raises ValueError if it is invalid."""
    if isinstance(entry, list) and entry:
        return choices(key, {override_text(value): value for value in entry})
    if isinstance(entry, dict) and {"low", "high"} <= entry.keys():
        try:
            return interval(key, **entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{key} is not a range: {error}") from None
    if isinstance(entry, dict) and entry and all(map(is_texts, entry.values())):
        labels = CategoricalDistribution([str(label) for label in entry])
        return Axis(key, labels, [list(settings) for settings in entry.values()], has_labels=True)
    forms = "[VALUE, ...], {low: , high: , log: , step: } or {LABEL: [SETTING=VALUE, ...], ...}"
    raise ValueError(f"{key} is {entry!r}; it needs the form {forms}")


def is_texts(entry: Any) -> bool:
    return isinstance(entry, list) and all(isinstance(text, str) for text in entry)


def axis_of_override(override: Override) -> Axis | None:
    """Return the axis of an override with several values; None if it has one value."""
    if not override.is_sweep_override():
        return None
    element = override.get_key_element()
    key, prefix = element.lstrip("+"), element[: len(element) - len(element.lstrip("+"))]
    value = override.value()
    if isinstance(value, IntervalSweep):
        return interval(key, value.start, value.end, prefix, log="log" in value.tags)
    if isinstance(value, RangeSweep):
        check_range(value)
    parser = OverridesParser.create()
    texts = list(dict.fromkeys(override.sweep_string_iterator()))
    return choices(key, {text: parser.parse_override(f"x={text}").value() for text in texts}, element)


def check_range(value: RangeSweep) -> None:
    """Raise ValueError if range(START,STOP,STEP) has too many values, before it is expanded."""
    if not value.step:
        raise ValueError("the step of a range must not be 0")
    if (value.stop - value.start) / value.step > MOST_RUNS:
        raise ValueError(f"it has more than {MOST_RUNS:,} values; a sweep takes at most as many of a setting")


def grid(axes: list[Axis]) -> Iterator[Point]:
    """Return all combinations of the choices."""
    keys = [axis.key for axis in axes]
    return (dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.choices for axis in axes)))


def examples(axes: list[Axis]) -> list[Point]:
    """Return points that cover every choice of each axis, and both ends of each range."""
    first = {axis.key: axis.choices[0] for axis in axes}
    return [first] + [first | {axis.key: value} for axis in axes for value in axis.choices[1:]]


def override_text(value: Any) -> str:
    """Format a value in Hydra's grammar."""
    if isinstance(value, str):
        return hydra_text(value)
    if isinstance(value, list):
        return "[" + ",".join(map(override_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)


def hydra_text(text: str) -> str:
    """Quote a text for Hydra's grammar where needed: 'lr=0.1,width=2' would be several values."""
    if re.fullmatch(r"[A-Za-z0-9_./-]+", text):
        return text
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text)  # backslashes are escaped only before quotes and at the end
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def value_text(value: Any) -> str:
    """Format a value for people: 0.001 rather than 0.0010000000000000002."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def label(point: Point) -> str:
    """Format a point as part of a file name, which does not depend on the order of its axes."""
    names = short_names(list(point))
    text = "_".join(sorted(f"{names[key]}-{value_text(value).strip('[]{}')}" for key, value in point.items()))
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text)[:150]


def short_names(keys: list[str]) -> dict[str, str]:
    """Return the shortest unique suffix of each dotted key, such as lr for curriculum.stages.a.lr."""
    ends = {key: [key.split(".", i)[-1] for i in reversed(range(key.count(".") + 1))] for key in keys}
    counts = collections.Counter(end for several in ends.values() for end in several)
    return {key: next((end for end in ends[key] if counts[end] == 1), key) for key in keys}
