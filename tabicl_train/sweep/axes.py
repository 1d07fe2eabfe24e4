"""Where the values of a parameter, and of the metric, lie on an axis of a figure, and which color they have."""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.ticker import LogLocator, MaxNLocator

from tabicl_train.run_dir.records import number
from tabicl_train.sweep.metric import is_better_lower
from tabicl_train.sweep.ranking import Point, short_names, value_of, value_text
from tabicl_train.sweep.results import Sweep

# Distinguishable with any color vision: https://jfly.uni-koeln.de/color (without yellow, which is faint on white).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000", "#E69F00")
GREY = "0.55"
STEPS = [1, 2, 2.5, 5, 10]  # between the ticks of a linear axis, times powers of ten
FEW = 8  # values that all get a tick
CLIP = 6.0  # an axis of the metric reaches this many times as far from the best value as the median does


@dataclass
class ParameterAxis:
    """values: all different ones, ascending if they are numbers or labels that are
    scale: log, linear, or names, which lie at equal distances"""

    key: str
    name: str
    values: list[Any]
    scale: str

    @property
    def is_numeric(self) -> bool:
        return self.scale != "names"

    def position(self, value: Any) -> float:
        if not self.is_numeric:
            return self.values.index(value)
        return math.log10(float(value)) if self.scale == "log" else float(value)

    @property
    def ends(self) -> tuple[float, float]:
        return self.position(self.values[0]), self.position(self.values[-1])

    def ticks(self, gap: float) -> dict[float, str]:
        """Labels by position; gap: smallest distance of two labels, as a share of the axis."""
        low, high = self.ends
        values: Any = self.values
        if len(values) > FEW and self.is_numeric:
            first, last = float(self.values[0]), float(self.values[-1])
            subs = (1, 2, 5) if high - low < 2 else (1,)
            locator = LogLocator(subs=subs) if self.scale == "log" else MaxNLocator(5, steps=STEPS)
            values = [v for v in locator.tick_values(first, last) if first <= v <= last] or [first, last]
        kept: dict[float, str] = {}
        for value in values:
            position = self.position(value)
            if not kept or position - max(kept) >= gap * (high - low):
                kept[position] = value_text(value)
        return kept


def parameter_axes(sweep: Sweep) -> list[ParameterAxis]:
    """Of the parameters that have more than one value."""
    names = short_names(sweep.parameters)
    axes = []
    for key in sweep.parameters:
        values: list[Any] = []
        for job in sweep.jobs:
            if value_of(job, key) not in values:
                values.append(value_of(job, key))
        if len(values) > 1:
            is_numeric = all(map(is_number, values))
            values = sorted(values, key=float) if is_numeric else values
            scale = scale_of(list(map(float, values))) if is_numeric else "names"
            axes.append(ParameterAxis(key, names[key], values, scale))
    return axes


def is_number(value: Any) -> bool:
    """Whether a value, or the label of settings that change together, is a finite number."""
    value = number(value) if isinstance(value, str) else value
    return type(value) in (int, float) and math.isfinite(value)


def scale_of(values: list[float]) -> str:
    """Logarithmic over a decade or more, and for values such as 64, 128, 256."""
    if values[0] <= 0:
        return "linear"
    ratios = [b / a for a, b in itertools.pairwise(values)]
    is_geometric = len(ratios) > 1 and 1.5 <= max(ratios) < 1.05 * min(ratios)
    return "log" if values[-1] >= 10 * values[0] or is_geometric else "linear"


@dataclass
class MetricAxis:
    """The part of the metric's axis that is shown: from the best value, as far as it does not flatten the others."""

    low: float
    high: float
    lower_is_better: bool

    def share(self, value: float) -> float:
        """How good a value is: 1 for the best, 0 for the worst that is shown."""
        share = (np.clip(value, self.low, self.high) - self.low) / (self.high - self.low)
        return float(1 - share if self.lower_is_better else share)

    def color(self, value: float) -> tuple:
        """Darker is better."""
        return colormaps["viridis"](0.92 * (1 - self.share(value)))

    def clip(self, values: Any) -> np.ndarray:
        return np.clip(values, self.low, self.high)

    @property
    def limits(self) -> tuple[float, float]:
        margin = 0.06 * (self.high - self.low)
        return self.low - margin, self.high + margin


def metric_axis(sweep: Sweep, values: list[float]) -> MetricAxis:
    """For these values; those that are not finite do not count, and there must be another one."""
    finite = [value for value in values if math.isfinite(value)]
    lower = is_better_lower(sweep.metric)
    best, worst = (min(finite), max(finite)) if lower else (max(finite), min(finite))
    limit = best + CLIP * (float(np.median(finite)) - best)
    worst = min(worst, limit) if lower else max(worst, limit)
    if math.isclose(worst, best, rel_tol=1e-6):
        worst = best + (1 if lower else -1) * max(abs(best) * 0.05, 1e-3)
    return MetricAxis(min(best, worst), max(best, worst), lower)


def point_name(sweep: Sweep, point: Point, width: int = 45) -> str:
    names = short_names(sweep.parameters)
    return shortened(", ".join(f"{names[key]}={value_text(value)}" for key, value in point.params.items()), width)


def shortened(text: str, width: int) -> str:
    """A text for a figure, where matplotlib would set what lies between two dollars as a formula."""
    text = text if len(text) <= width else text[: width - 3] + "..."
    return text.replace("$", r"\$")


def wrapped(name: str, width: int) -> str:
    """A dotted name in lines that break after its dots and underscores."""
    spaced = name.replace("_", "_ ").replace(".", ". ")
    return "\n".join(line.replace(" ", "") for line in textwrap.wrap(spaced, width))
