"""Checks of single values of options: each returns a list of problems, which is empty if the value is fine."""

from __future__ import annotations

from collections.abc import Collection

LARGEST_SEED = 2**64 - 1  # that torch.manual_seed takes


def one_of(name: str, value: str, choices: Collection[str]) -> list[str]:
    """List the problem with a value that is not among the choices."""
    return [] if value in choices else [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def at_least(bound: float, **values: float | None) -> list[str]:
    """List a problem for each of the named values that is below the bound; None is allowed."""
    low = {name: value for name, value in values.items() if value is not None and not value >= bound}
    return [f"{name} is {value}; it must be at least {bound}" for name, value in low.items()]


def seed_problems(name: str, seed: int) -> list[str]:
    """List the problem with a seed that torch's generators do not take."""
    if seed <= LARGEST_SEED:
        return at_least(0, **{name: seed})
    return [f"{name} is {seed}; it must be at most {LARGEST_SEED}"]


def positive(**values: float | None) -> list[str]:
    """List a problem for each of the named values that is not above zero."""
    wrong = {name: value for name, value in values.items() if value is not None and not value > 0}
    return [f"{name} is {value}; it must be positive" for name, value in wrong.items()]


def within(low: float, high: float, **values: float) -> list[str]:
    """List a problem for each of the named values outside low..high, both ends included."""
    wrong = {name: value for name, value in values.items() if not low <= value <= high}
    return [f"{name} is {value}; it must lie in {low}..{high}" for name, value in wrong.items()]


def ordered_pair(name: str, value: list, low: float) -> list[str]:
    """List the problem with a range, which must be two numbers in order, not below the bound."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    return [] if value[0] >= low else [f"{name} is {list(value)}; it must lie in {low} and above"]
