"""The small files of a run. A full disk costs their lines, and a warning, but never the run."""

from __future__ import annotations

import os
from pathlib import Path

from tabicl_train.messages import first_line, tell

_failing: set[Path] = set()  # told already


def append_text(path: Path, text: str) -> None:
    """Add to a file, all of it or nothing."""
    size = path.stat().st_size if path.exists() else None
    try:
        with open(path, "a", newline="") as file:
            file.write(text)
    except OSError as error:
        if size is not None:
            os.truncate(path, size)  # part of the text may be there
        else:
            path.unlink(missing_ok=True)
        warn(path, error)
    else:
        _failing.discard(path)


def replace_text(path: Path, text: str) -> None:
    """Write a file anew: it is the old one or the new one, whenever the process is killed."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.write_text(text)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        warn(path, error)
    else:
        _failing.discard(path)


def warn(path: Path, error: OSError) -> None:
    if path not in _failing:
        _failing.add(path)
        tell(f"warning   {path.name} cannot be written ({first_line(error)}); what belongs there is left out")
