"""What a user is told instead of a stack trace."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


class ConfigError(Exception):
    """A configuration that cannot run; `problems` says why, one line each, in the user's terms.

    everywhere: all processes of a run raise it alike, and the first one prints it
    """

    everywhere = False

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def install(packages: str, extra: str) -> str:
    """How to get what an extra of this project brings; the project itself is on no package index."""
    return f"pip install {packages}, or pip install '.[{extra}]' in the project's folder"


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError([f"pictures need matplotlib: {install('matplotlib', 'plots')}"])


def unusable_folder(path: Path) -> str | None:
    """Why files cannot be made in a folder, which need not exist yet."""
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"
