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


def ordered_pair(name: str, value: list) -> list[str]:
    """List the problem with a range, which must be two numbers in order."""
    if len(value) == 2 and value[0] <= value[1]:
        return []
    return [f"{name} is {list(value)}; it must be [lowest, highest]"]
