"""The error of the priors and the least rows of a table, in a file that imports no torch."""

from __future__ import annotations

__all__ = ["MIN_ROWS", "PriorError"]

MIN_ROWS = 10  # of a table


class PriorError(ValueError):
    """A request that a prior cannot serve; the message is for the user."""
