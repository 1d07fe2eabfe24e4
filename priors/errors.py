"""The error of the priors, in a file that imports no torch."""

from __future__ import annotations

__all__ = ["PriorError"]


class PriorError(ValueError):
    """A request that a prior cannot serve; the message is for the user."""
