"""Checks of single values, shared by the dataclasses of the schema. Each returns the list of problems."""

from __future__ import annotations

from priors import Prior
from priors.real import real_tables


def one_of(name: str, value: str, choices: tuple[str, ...]) -> list[str]:
    """The problem with a value that is not among the choices, as a list of one or no lines."""
    return [] if value in choices else [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def at_least(bound: float, **values: float) -> list[str]:
    """A problem for each of the named values that is below the bound."""
    return [f"{name} is {value}; it must be at least {bound}" for name, value in values.items() if value < bound]


def ordered_pair(name: str, value: list, low: float, high: float = float("inf")) -> list[str]:
    """The problems with a range: it must be a list of two numbers in order, both within the bounds low..high."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    if value[0] < low or value[1] > high:
        upper = "" if high == float("inf") else f"..{high}"
        return [f"{name} is {list(value)}; it must lie in {low}{upper or ' and above'}"]
    return []


def long_enough(name: str, rows: int, prior: Prior, is_regression: bool) -> list[str]:
    """The problem with a number of rows that none of a prior's real tables has."""
    real = real_tables(prior)
    eligible = None if real is None else real.eligible(rows, is_regression)
    if eligible is None or eligible[0] > 0:
        return []
    if eligible[1] == 0:  # in validation only: a prior of which no table is drawn in training has a problem of its own
        advice = f"raise the prior's validation_fraction, or choose {name}=[]"
        return [f"{name} asks for real tables, but none is for validation; {advice}"]
    return [f"{name} has tables of {rows} rows; none of the {eligible[1]} real tables for it is that long"]
