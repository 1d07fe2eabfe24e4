"""What produced a run: the code, the versions and the command."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from priors.storage.shards import version
from tabicl_train.config.folders import PACKAGE

DRAWING = ("torch", "numpy", "scipy", "numba")  # packages that decide what a table is
PACKAGES = ("tabicl-train", "lightning", "hydra-core", *DRAWING)
# Extensions of the instruction set with which numba, torch or BLAS sum in another order or round otherwise.
EXTENSIONS = ("fma", "avx2", "avx512f", "avx512bf16", "avx512fp16", "amx-bf16", "sve", "sve2")


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


def cpu_kind() -> str:
    """The model of the CPU, and the instructions that numba and torch use on it.

    Where two machines differ in it, tables of the same address can differ (priors/README.md). The name of the model
    alone does not tell: a virtual machine can hide it, and extensions can be switched off.
    """
    from llvmlite import binding  # compiles for numba

    features = binding.get_host_cpu_features()
    extensions = " ".join(name for name in EXTENSIONS if features.get(name))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu_model()} ({binding.get_host_cpu_name()}: {extensions}; torch: {capability})"


def cpu_model() -> str:
    """The name of the CPU's model, or of its architecture where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


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
