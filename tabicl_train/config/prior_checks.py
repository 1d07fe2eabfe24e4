"""Checks of a run that need its prior, and the files and real tables behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from priors import Prior


def long_enough(name: str, rows: int, prior: Prior, is_regression: bool) -> list[str]:
    """List the problem with a number of rows that none of a prior's real tables has."""
    from priors.real import real_tables, setting

    real = real_tables(prior)
    eligible = None if real is None else real.eligible(rows, is_regression)
    if eligible is None or eligible[0] > 0:
        return []
    if eligible[1] == 0:  # in validation only: a prior without training tables is reported elsewhere
        advice = f"raise {setting(prior, 'validation_fraction')}, or choose {name}=[] and validation.best=real"
        return [f"{name} asks for real tables, but none is for validation; {advice}"]
    return [f"{name} has tables of {rows} rows; none of the {eligible[1]} real tables for it is that long; lower it"]
