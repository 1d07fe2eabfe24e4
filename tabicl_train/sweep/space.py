"""What a sweep varies: its axes, and the points on them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

from tabicl_train.sweep.ranking import hydra_text

Point = dict[str, Any]  # a value for each axis, by its key

RANGE_KEYS = {"low", "high", "log", "integer"}


@dataclass
class Choices:
    """An axis of separate values.

    values: by their texts
    overrides: the settings that each of them stands for, by the same texts
    has_labels: whether the values are labels of settings that change together
    """

    key: str
    values: dict[str, Any]
    overrides: dict[str, list[str]]
    has_labels: bool = False

    def settings(self, value: Any) -> list[str]:
        same = (text for text, known in self.values.items() if known == value and type(known) is type(value))
        return self.overrides[next(same)]

    def draw(self, rng: np.random.Generator) -> Any:
        return list(self.values.values())[rng.integers(len(self.values))]

    @property
    def examples(self) -> list[Any]:
        return list(self.values.values())

    def problems(self) -> list[str]:
        return [] if self.values else [f"{self.key} has no values"]


@dataclass
class Range:
    """An axis of numbers between two bounds, both of them included.

    prefix: "+" or "++" where the setting is added
    """

    key: str
    low: float
    high: float
    log: bool = False
    integer: bool = False
    prefix: str = ""

    def settings(self, value: Any) -> list[str]:
        return [f"{self.prefix}{self.key}={value!r}"]

    def draw(self, rng: np.random.Generator) -> float | int:
        extra = 0.5 if self.integer else 0.0  # each integer takes an interval of length 1, the bounds as well
        low, high = self.low - extra, self.high + extra
        value = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        value = min(max(value, self.low), self.high)
        return round(value) if self.integer else float(value)

    @property
    def examples(self) -> list[Any]:
        return [self.low, self.high]

    def problems(self) -> list[str]:
        if not all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (self.low, self.high)):
            return [f"{self.key} needs low and high, two numbers"]
        if not self.low < self.high:
            return [f"{self.key} has low {self.low} and high {self.high}; low must be smaller"]
        if self.log and not self.low > 0:
            return [f"{self.key} has low {self.low}; with log it must be positive"]
        if self.integer and not all(float(bound).is_integer() for bound in (self.low, self.high)):
            return [f"{self.key} has low {self.low} and high {self.high}; with integer both must be whole numbers"]
        return []


Axis = Choices | Range


def axis_of_space(key: str, entry: Any) -> Axis | str:
    """An entry of a sweep's space as an axis, or what is wrong with it."""
    if isinstance(entry, list):
        texts = [override_text(value) for value in entry]
        return Choices(key, dict(zip(texts, entry, strict=True)), {text: [f"{key}={text}"] for text in texts})
    if isinstance(entry, dict) and entry.keys() <= RANGE_KEYS and {"low", "high"} <= entry.keys():
        low, high = (
            int(v) if entry.get("integer") and isinstance(v, float) and v.is_integer() else v
            for v in (entry["low"], entry["high"])
        )
        return Range(key, low, high, bool(entry.get("log")), bool(entry.get("integer")))
    if isinstance(entry, dict) and entry and all(is_texts(settings) for settings in entry.values()):
        labels = {str(label): str(label) for label in entry}
        return Choices(key, labels, {str(label): list(settings) for label, settings in entry.items()}, True)
    return (
        f"{key} is {entry!r}; it must be a list of values, {{low: , high: }} with log: or integer: if wanted, or "
        "{LABEL: [SETTING=VALUE, ...], ...}"
    )


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and "=" in text for text in value)


def axis_of_override(override: Override) -> Axis | None:
    """The axis that a setting with several values on the command line stands for; None if it has one value."""
    if not override.is_sweep_override():
        return None
    element = override.get_key_element()
    key, prefix = element.lstrip("+"), element[: len(element) - len(element.lstrip("+"))]
    interval = override.value()
    if isinstance(interval, IntervalSweep):
        integer = isinstance(interval.start, int) and isinstance(interval.end, int)
        return Range(key, interval.start, interval.end, "log" in interval.tags, integer, prefix)
    parser = OverridesParser.create()
    texts = list(dict.fromkeys(override.sweep_string_iterator()))
    values = {text: parser.parse_override(f"x={text}").value() for text in texts}
    return Choices(key, values, {text: [f"{element}={text}"] for text in texts})


def override_text(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if isinstance(value, str):
        return hydra_text(value)
    if isinstance(value, list):
        return "[" + ",".join(map(override_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_text(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)


def grid(axes: list[Axis]) -> Iterator[Point]:
    """All combinations; the last axis varies fastest."""
    keys = [axis.key for axis in axes]
    return (dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.examples for axis in axes)))


def random_point(axes: list[Axis], index: int) -> Point:
    """A point that depends on its number alone; the value on an axis does not depend on the other axes."""
    return {axis.key: axis.draw(np.random.default_rng([index, *axis.key.encode()])) for axis in axes}


def example_points(axes: list[Axis]) -> list[Point]:
    """Points that have every value of each axis, and both ends of each range, at least once."""
    first = {axis.key: axis.examples[0] for axis in axes}
    return [first] + [first | {axis.key: value} for axis in axes for value in axis.examples[1:]]


def settings_of(axes: list[Axis], point: Point) -> list[str]:
    """The settings of tabicl-train at a point."""
    return [text for axis in axes for text in axis.settings(point[axis.key])]


def label(axes: list[Axis], point: Point, names: dict[str, str]) -> str:
    """A point in words that can be part of a file name, whatever the order of the axes."""
    parts = []
    for axis in axes:
        value = point[axis.key]
        text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else override_text(value)
        parts.append(f"{names[axis.key]}-{text.strip('[]{}')}")
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(sorted(parts)))[:150]
