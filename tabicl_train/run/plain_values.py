"""Reads configurations in plain values, as checkpoints and config.yaml keep them."""

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
    """Return how many of the first `steps` steps belong to each stage that has begun, by name.

    lengths: the steps of all stages, in their order
    """
    done = {}
    left = steps
    for name, length in lengths.items():
        if left > 0:
            done[name] = min(length, left)
        left -= length
    return done
