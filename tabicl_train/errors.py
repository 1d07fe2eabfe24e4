"""Errors that a user sees as a message instead of a stack trace, and errors that go from process to process."""

from __future__ import annotations

import importlib.util
import os
import pickle
from pathlib import Path


class ConfigError(Exception):
    """A configuration that cannot run; `problems` says why, one line each, in the user's terms.

    everywhere: all processes of the run raise it alike, so rank 0 alone prints it
    """

    everywhere = False

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def picklable(error: Exception) -> Exception:
    """The error, or a RuntimeError with the same text where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def install(packages: str, extra: str) -> str:
    """How to install what an extra of this project adds; the project itself is on no package index."""
    return f"pip install {packages}, or pip install '.[{extra}]' in the project's folder"


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError([f"pictures need matplotlib: {install('matplotlib', 'plots')}"])


def unusable_folder(path: Path) -> str | None:
    """Why no files can be created in a folder, if so; the folder need not exist yet."""
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"
