"""What produced a run: the code, the versions and the command."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time

from tabicl_train.config import PACKAGE

PACKAGES = ("torch", "lightning", "hydra-core", "numpy", "scipy", "numba")


def describe_origin() -> dict:
    """Time, commit and diff of the tracked files (None outside a checkout), versions, command line."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "HEAD"),
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "command": sys.argv,
    }


def git(*arguments: str) -> str | None:
    """What git says of the checkout that this package is tracked in; an installed package may lie in another one."""
    for command in (["ls-files", "--error-unmatch", "train.py"], list(arguments)):
        try:
            result = subprocess.run(["git", *command], cwd=PACKAGE, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if result.returncode != 0:
            return None
    return result.stdout.strip()
