"""What imports no torch: the error of the priors, the first line of other errors, and the least rows of a table."""

from __future__ import annotations

__all__ = ["MIN_ROWS", "PriorError", "message_line"]

MIN_ROWS = 10  # of a table


class PriorError(ValueError):
    """A request that a prior cannot serve; the message is for the user."""


def message_line(error: Exception) -> str:
    """Return the first line of a message; "" for an error without one."""
    lines = str(error).splitlines()
    return lines[0] if lines else ""
