"""Reads configurations in plain values, as checkpoints and config.yaml keep them."""

from __future__ import annotations

from typing import Any


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def steps_of_stages(lengths: dict[str, int], steps: int) -> dict[str, int]:
    """Return how many of the first `steps` steps belong to each stage that has begun, by name."""
    done = {}
    for name, length in lengths.items():
        if steps > 0:
            done[name] = min(length, steps)
        steps -= length
    return done
