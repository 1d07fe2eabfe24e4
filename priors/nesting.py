"""JSON of files that may come from anyone, read or refused, and a check for what other formats hold."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 100  # of lists and dictionaries in each other; ours have fewer than ten
MOST_VALUES = 1_000_000  # in all; an alias of YAML stands for all that it names


def read_json(text: str) -> Any:
    """Parse JSON; raises ValueError for whatever is wrong with it, also if it is nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_nesting(content)
    return content


def check_nesting(content: Any) -> None:
    """Raise ValueError for lists and dictionaries that are nested too deeply, or that hold themselves."""
    level = [content]
    values = 0
    for _ in range(MOST_LEVELS):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                below += value.values() if isinstance(value, dict) else value
                if values + len(below) > MOST_VALUES:
                    raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        if not below:
            return
        values += len(below)
        level = below
    raise ValueError("it is nested too deeply")
