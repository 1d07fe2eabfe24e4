"""Checks of single values, shared by the dataclasses of the schema."""

from __future__ import annotations


def one_of(name: str, value: str, choices: tuple[str, ...]) -> list[str]:
    return [] if value in choices else [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def at_least(bound: float, **values: float) -> list[str]:
    return [f"{name} is {value}; it must be at least {bound}" for name, value in values.items() if value < bound]


def ordered_pair(name: str, value: list, low: float, high: float = float("inf")) -> list[str]:
    """A range [low, high] as YAML gives it: two numbers in order, inside the bounds."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    if value[0] < low or value[1] > high:
        upper = "" if high == float("inf") else f"..{high}"
        return [f"{name} is {list(value)}; it must lie in {low}{upper or ' and above'}"]
    return []
