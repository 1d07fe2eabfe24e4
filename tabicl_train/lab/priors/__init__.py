"""Priors of single experiments: tasks on which rules of attention are compared."""

from __future__ import annotations


def not_positive(**options: float) -> list[str]:
    """List the options, such as standard deviations and factors, that are not positive, as messages for the user."""
    return [f"{name} is {value}; it must be positive" for name, value in options.items() if not value > 0]
