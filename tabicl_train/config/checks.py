"""Checks of single values of options: each returns a list of problems, which is empty if the value is fine."""

from __future__ import annotations

from collections.abc import Collection

LARGEST_SEED = 2**64 - 1  # that torch.manual_seed takes


def one_of(name: str, value: str, choices: Collection[str]) -> list[str]:
    """List the problem with a value that is not among the choices."""
    if value in choices:
        return []
    return [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def each_of(name: str, values: Collection[str], choices: Collection[str]) -> list[str]:
    """List a problem for each value that is not among the choices."""
    problems = []
    for value in values:
        problems += one_of(name, value, choices)
    return problems


def at_least(bound: float, **values: float | None) -> list[str]:
    """List a problem for each of the named values that is below the bound; None is allowed."""
    problems = []
    for name, value in values.items():
        if value is not None and not value >= bound:  # so written, nan is a problem, too
            problems.append(f"{name} is {value}; it must be at least {bound}")
    return problems


def seed_problems(name: str, seed: int) -> list[str]:
    """List the problem with a seed that torch's generators do not take."""
    if seed > LARGEST_SEED:
        return [f"{name} is {seed}; it must be at most {LARGEST_SEED}"]
    return at_least(0, **{name: seed})


def positive(**values: float | None) -> list[str]:
    """List a problem for each of the named values that is not above zero; None is allowed."""
    problems = []
    for name, value in values.items():
        if value is not None and not value > 0:
            problems.append(f"{name} is {value}; it must be positive")
    return problems


def within(low: float, high: float, **values: float) -> list[str]:
    """List a problem for each of the named values outside low..high, both ends included."""
    problems = []
    for name, value in values.items():
        if not low <= value <= high:
            problems.append(f"{name} is {value}; it must lie in {low}..{high}")
    return problems


def ordered_pair(name: str, value: list, low: float) -> list[str]:
    """List the problem with a range, which must be two numbers in order, not below the bound."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    if value[0] >= low:
        return []
    return [f"{name} is {list(value)}; it must lie in {low} and above"]
