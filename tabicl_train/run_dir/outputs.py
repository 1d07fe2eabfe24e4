"""Files and folders that a command is asked to write: looked at before the work for them begins."""

from __future__ import annotations

import os
from pathlib import Path

from tabicl_train.errors import ConfigError, unusable_folder


def make_folder(setting: str, path: Path) -> None:
    """Raises ConfigError that names the setting where files cannot be made in the folder."""
    if problem := folder_problem(path):
        raise ConfigError([f"{setting} is {str(path)!r}; {problem}"])


def folder_problem(path: Path) -> str | None:
    """Make a folder; returns what is in the way."""
    if problem := unusable_folder(path):
        return problem
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # os.access knows nothing of names too long, or of file systems like /proc
        return f"{path} cannot be made ({error.strerror})"
    return None


def output_problems(setting: str, path: str | Path | None) -> list[str]:
    """What keeps a file from being written, if one is asked for; its folder is made now."""
    if path is None:
        return []
    path = Path(path)
    if path.is_dir():
        problem = "it is a folder, not a file"
    elif path.exists() and not os.access(path, os.W_OK):
        problem = "it is not writable"
    else:
        problem = folder_problem(path.parent)
    return [f"{setting} is {str(path)!r}; {problem}"] if problem else []


def check_output(path: str | Path) -> None:
    """Raises ConfigError where `output` cannot be written."""
    if problems := output_problems("output", path):
        raise ConfigError(problems)
