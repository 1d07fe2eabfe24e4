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
    """Of Python, this package and those that decide what a run computes."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


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
