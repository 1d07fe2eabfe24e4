"""Refuses nan, inf and -inf as values of options, except inf for an option that declares that it may be infinite."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

MAY_BE_INFINITE = {"may_be_infinite": True}
"""The metadata of an option for which inf has a documented meaning: field(default=..., metadata=MAY_BE_INFINITE)."""


def not_finite(options: Any, prefix: str = "") -> list[str]:
    """List a problem for each number in a dataclass of options, at any depth, that is nan or infinite but may not be.

    `prefix` comes before the names of the options.
    """
    problems = []
    for field in dataclasses.fields(options):
        allows_inf = field.metadata.get("may_be_infinite", False)
        problems += not_finite_in(f"{prefix}{field.name}", getattr(options, field.name), allows_inf)
    return problems


def not_finite_in(key: str, value: Any, allows_inf: bool) -> list[str]:
    """List the problems in the value of an option: a number, or a list, a dictionary or a dataclass of values."""
    if dataclasses.is_dataclass(value):
        return not_finite(value, f"{key}.")
    problems = []
    if isinstance(value, dict):
        for name, item in value.items():
            problems += not_finite_in(f"{key}.{name}", item, allows_inf)
        return problems
    if isinstance(value, list):
        for item in value:
            problems += not_finite_in(key, item, allows_inf)
        return problems
    if not isinstance(value, float) or math.isfinite(value):
        return []
    if not allows_inf:
        return [f"{key} is {value}; it must be a finite number"]
    if value != math.inf:
        return [f"{key} is {value}; it must be a number or inf"]
    return []
