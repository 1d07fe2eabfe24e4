"""Paths without the folders of this machine, for files that others will read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# The folders in front of a path inside other text, such as {tables: {folder: /home/me/tables}}.
FOLDERS = re.compile(r"""
    (?: ^ | (?<=[=,\s\[{('"]) | (?<=:)(?!//) )  # a path begins after one of these; https://... is none
    (?: ~\w* | \.\. )? / (?=[^\s/])
    (?: [^/,'"\]}]* / )*
    (?=[^/,'"\]}])  # the last part stays
""", re.VERBOSE)  # fmt: skip


def without_folders(value: Any) -> Any:
    """Replace each path that names folders of this machine (/..., ~... or ../...) by its last part, at any depth."""
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    if not isinstance(value, str):
        return value
    name, equals, path = value.partition("=")  # of a command
    if not equals:
        name, path = "", value
    # A path may hold any character, which inside other text would end it.
    if path.startswith(("/", "~", "../")):
        return name + equals + Path(path).name
    return FOLDERS.sub("", value)
