"""Checks that files and folders can be written, before the work whose results they will hold."""

from __future__ import annotations

import os
from pathlib import Path

from tabicl_train.errors import ConfigError, unusable_folder


def make_folder(setting: str, path: Path) -> None:
    """Create a folder; raises ConfigError that names the setting if files cannot be created in it."""
    if problem := folder_problem(path):
        raise ConfigError([f"{setting} is {str(path)!r}; {problem}"])


def folder_problem(path: Path) -> str | None:
    """Create a folder; returns what prevents it, if anything."""
    if problem := unusable_folder(path):
        return problem
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # os.access cannot foresee a name that is too long, or a file system like /proc
        return f"{path} cannot be created ({error.strerror})"
    return None


def output_problems(setting: str, path: str | Path | None) -> list[str]:
    """What prevents a file from being written, if one is asked for. Its folder is created."""
    if path is None:
        return []
    path = Path(path)
    if path.is_dir():
        problem: str | None = "it is a folder, not a file"
    elif path.exists() and not os.access(path, os.W_OK):
        problem = "it is not writable"
    else:
        problem = folder_problem(path.parent)
    return [f"{setting} is {str(path)!r}; {problem}"] if problem else []


def check_output(path: str | Path) -> None:
    """Raises ConfigError if the file of the setting `output` cannot be written."""
    if problems := output_problems("output", path):
        raise ConfigError(problems)
