"""What decides which bits a machine draws: versions, the code of the priors, and the kind of CPU."""

from __future__ import annotations

import inspect
import platform
import socket
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import priors
from priors.storage.shards import version
from tabicl_train import curriculum, stream
from tabicl_train.run_dir.provenance import DRAWING, cpu_kind

PACKAGES = ("tabicl-train", *DRAWING)


@dataclass
class Machine:
    """name: of the host; versions: of all that decides which tables an address has; cpu: its kind"""

    name: str
    versions: dict[str, str]
    cpu: str


def this_machine(prior: priors.Prior | None) -> Machine:
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    versions["code of the tables"] = digest_of_code(prior)
    return Machine(socket.gethostname(), versions, cpu_kind())


def digest_of_code(prior: priors.Prior | None) -> str:
    """Of the files of all priors and of the stream. A checkout has the version of the last release, whatever it holds.

    A prior of another package counts with the file of its class.
    """
    folder = Path(priors.__file__).parent
    files = [*sorted(folder.rglob("*.py")), Path(curriculum.__file__), Path(stream.__file__)]
    if prior is not None and (own := Path(inspect.getfile(type(prior)))) not in files:
        files.append(own)
    digest = blake2b(digest_size=6)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def differences(machines: list[Machine], here: Machine) -> list[str]:
    """Versions that differ from those of this machine, one line for each."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for machine in machines:
        for name, expected in here.versions.items():
            if machine.versions.get(name) != expected:
                found[name, str(machine.versions.get(name))].add(machine.name)
    return [
        f"{name} is {value} on {', '.join(sorted(hosts))}, and {here.versions[name]} on this machine"
        for (name, value), hosts in sorted(found.items())
    ]


def other_kinds(machines: list[Machine], here: Machine) -> str | None:
    """A warning about CPUs of another kind, if there are any."""
    kinds = defaultdict(set)
    for machine in machines:
        if machine.cpu != here.cpu:
            kinds[machine.cpu].add(machine.name)
    if not kinds:
        return None
    listed = "; ".join(f"{cpu} on {', '.join(sorted(hosts))}" for cpu, hosts in sorted(kinds.items()))
    return (
        f"the actors have another kind of CPU ({listed}) than this machine ({here.cpu}): some of their tables may "
        "differ from those that this machine would draw, so the run may not be repeatable bit for bit"
    )
