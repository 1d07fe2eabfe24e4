"""Functions of configurations in plain values, as checkpoints and config.yaml hold them."""

from __future__ import annotations

from typing import Any


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def steps_of_stages(lengths: dict[str, int], steps: int) -> dict[str, int]:
    """Return how many of the first steps of a run belong to each stage that has begun.

    Parameters
    ----------
    lengths : dict of str to int
        The steps of all stages, in their order.
    steps : int
        The number of steps done.

    Returns
    -------
    dict of str to int
        Steps by the names of the stages.
    """
    done = {}
    left = steps
    for name, length in lengths.items():
        if left > 0:
            done[name] = min(length, left)
        left -= length
    return done
