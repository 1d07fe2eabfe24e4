"""The provenance of a run: code, versions, command and machines."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tabicl_train import __version__
from tabicl_train.console import info
from tabicl_train.doors import plugins
from tabicl_train.run.records import Records

PACKAGE = Path(__file__).resolve().parents[1]
DRAWING = ("torch", "numpy", "scipy", "numba")  # packages on which the bits of a table depend
PACKAGES = ("lightning", "hydra-core", *DRAWING)


def describe_origin() -> dict:
    """Return the time, the commit and diff of the tracked files (None outside a checkout), versions and command."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "HEAD"),
        "versions": versions(),
        "command": [*sys.argv, *plugins.arguments(hashes=False)],
    }


def describe_installation() -> str:
    """Return what a bug report needs, one fact a line: versions, commit and device."""
    commit = git("rev-parse", "HEAD") or "unknown, outside a checkout"
    if git("diff", "HEAD"):
        commit += " with changes"
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts = {
        "tabicl-train": "",  # the first line
        **versions(),
        "commit": commit,
        "device": machine["gpu"] or machine["cpu"],
    }
    return "\n".join(f"{name} {value}" for name, value in facts.items())


def record_start(records: Records, step: int, origin: dict, ranks: list[dict[str, Any]]) -> None:
    """Add a start of the run to provenance.jsonl, and print a line if its tables may differ from earlier ones.

    Parameters
    ----------
    records : Records
        The records of the run.
    step : int
        The number of steps done.
    origin : dict
        What `describe_origin` returned.
    ranks : list of dict
        What `describe_machine` returned on each rank.
    """
    start = {"step": step, **origin, "machines": grouped(ranks)}
    starts = records.lines("provenance.jsonl")
    if step > 0 and starts:
        changes = drawing_changes(starts[-1], start)
        if changes:
            differ = "from here on, tables may differ from those that the run would have drawn (priors/README.md)"
            info(f"changed   {'; '.join(changes)}: {differ}")
    cpus = grouped([{"cpu": rank["cpu"]} for rank in ranks])
    if len(cpus) > 1:
        texts = [f"{kind['cpu']} (rank {', '.join(map(str, kind['ranks']))})" for kind in cpus]
        differ = "the CPUs differ, so tables may depend on the rank that draws them (priors/README.md)"
        info(f"warning   {differ}: {'; '.join(texts)}")
    records.append_line("provenance.jsonl", start)


def grouped(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge equal descriptions of ranks; each result has the list of its `ranks`."""
    groups: list[dict[str, Any]] = []
    descriptions: list[dict[str, Any]] = []  # of the groups, without their ranks
    for rank, description in enumerate(ranks):
        if description not in descriptions:
            descriptions.append(description)
            groups.append({**description, "ranks": []})
        groups[descriptions.index(description)]["ranks"].append(rank)
    return groups


def drawing_changes(before: dict, now: dict) -> list[str]:
    """Describe what has changed since an earlier start among the things that the bits of a table depend on."""
    old = drawing_facts(before)
    new = drawing_facts(now)
    return [f"{name} was {old[name]}, is {new[name]}" for name in new if old[name] and old[name] != new[name]]


def drawing_facts(start: dict) -> dict[str, str | None]:
    """Return what the bits of a table depend on, from the record of a start: package versions and kinds of CPUs."""
    facts = {name: (start.get("versions") or {}).get(name) for name in DRAWING}
    cpus = {str(machine.get("cpu")) for machine in start.get("machines") or [] if isinstance(machine, dict)}
    facts["the CPU"] = " and ".join(sorted(cpus))
    return facts


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine of this process: host name, kind of CPU, and name of the GPU that it trains on, if any."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"host": platform.node(), "cpu": cpu_kind(), "gpu": gpu}


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, and of packages that the results of a run depend on."""
    return {
        "python": platform.python_version(),
        # From the code, since the metadata of an editable install keep the version at the time of the install.
        "tabicl-train": __version__,
        **{name: metadata.version(name) for name in PACKAGES},
    }


def cpu_kind() -> str:
    """Return the kind of CPU that numba compiles for, and the instruction set that torch uses on it.

    Tables of the same address can differ between kinds (priors/README.md).
    """
    from llvmlite import binding  # compiles for numba

    return f"{binding.get_host_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def git(*args: str) -> str | None:
    """Return git's output for the checkout that tracks this package, or None.

    An installed package may lie inside the checkout of another project. `ls-files` fails there.
    """
    for command in (["ls-files", "--error-unmatch", "__main__.py"], list(args)):
        try:
            result = subprocess.run(["git", *command], cwd=PACKAGE, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if result.returncode != 0:
            return None
    return result.stdout.strip()
