"""What is wrong with single values and keys, in the user's terms; shared by the schema and the command lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from tabicl_train.console import first_line


def one_of(name: str, value: str, choices: Collection[str]) -> list[str]:
    """The problem with a value that is not among the choices, as a list of one or no lines."""
    return [] if value in choices else [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def at_least(bound: float, **values: float | None) -> list[str]:
    """A problem for each of the named values that is below the bound; None has no value yet, and no problem."""
    low = {name: value for name, value in values.items() if value is not None and not value >= bound}
    return [f"{name} is {value}; it must be at least {bound}" for name, value in low.items()]


def positive(**values: float | None) -> list[str]:
    """A problem for each of the named values that is not above zero."""
    wrong = {name: value for name, value in values.items() if value is not None and not value > 0}
    return [f"{name} is {value}; it must be positive" for name, value in wrong.items()]


def within(low: float, high: float, **values: float) -> list[str]:
    """A problem for each of the named values outside low..high, both ends included."""
    wrong = {name: value for name, value in values.items() if not low <= value <= high}
    return [f"{name} is {value}; it must lie in {low}..{high}" for name, value in wrong.items()]


def ordered_pair(name: str, value: list, low: float) -> list[str]:
    """The problem with a range: it must be a list of two numbers in order, none of them below the bound."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    return [] if value[0] >= low else [f"{name} is {list(value)}; it must lie in {low} and above"]


def unknown_key(
    prefix: str, key: str, known: Collection[str], last: str | None = None, all_keys: Collection[str] = ()
) -> str:
    """The message for a key that is not among the `known` ones under `prefix`, with what may have been meant.

    last: the last part of the dotted key, which may be the name of a setting elsewhere
    all_keys: the dotted keys of all settings
    """
    start = f"{prefix}." if prefix else ""
    keys_by_name: dict[str, list[str]] = {}
    for path in all_keys:
        keys_by_name.setdefault(path.rpartition(".")[2], []).append(path)
    last = last or key
    siblings = [start + name for name in closest(key, known)]
    near = [*siblings, *keys_by_name.get(last, [])] if last == key else keys_by_name.get(last, siblings)
    near = near or [path for name in closest(last, keys_by_name) for path in keys_by_name[name]]
    if near:
        return f"{start}{key}: no such setting; did you mean {' or '.join(near[:3])}?"
    return f"{start}{key}: no such setting; there are {', '.join(map(str, known))}"


def closest(name: str, names: Collection[str]) -> list[str]:
    """The most similar name, if any. The cutoff is 0.7 since at 0.5 `tabel` was taken for `trainer`."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.7)


def wrong_type(key: str, error: Exception) -> str:
    """The message for a value that OmegaConf refuses."""
    cause = error.__cause__ or error
    reason = first_line(cause)
    is_list = reason.startswith("Cannot merge DictConfig with ListConfig")
    if (is_list and "reference_type=Dict[" in str(cause)) or re.match(r"Cannot assign \w+ to Dict\[", reason):
        reason = "it must be a mapping, such as {name: 1}"
    elif "ListConfig" in reason:
        reason = "it must be a list, such as [1,2]"
    return f"{key}: {reason}"


def first_lines(error: Exception) -> str:
    """The message of an OmegaConf or Hydra error in one line, without the type of the node."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines[:3] if not line.startswith("object_type"))
