"""What produced a run: the code, the versions and the command."""

from __future__ import annotations

import platform
import subprocess
import sys
import time

from priors.storage.shards import version
from tabicl_train.config.folders import PACKAGE

PACKAGES = ("tabicl-train", "torch", "lightning", "hydra-core", "numpy", "scipy", "numba")


def describe_origin() -> dict:
    """Time, commit and diff of the tracked files (None outside a checkout), versions, command line."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "HEAD"),
        "versions": versions(),
        "command": sys.argv,
    }


def versions() -> dict[str, str]:
    """The versions of Python, of this package, and of those that decide what a run computes."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def git(*args: str) -> str | None:
    """What git prints about the checkout that tracks this package, None if there is none.

    An installed package may lie inside a checkout of something else, which does not track it.
    """
    for command in (["ls-files", "--error-unmatch", "train.py"], list(args)):
        try:
            result = subprocess.run(["git", *command], cwd=PACKAGE, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if result.returncode != 0:
            return None
    return result.stdout.strip()
