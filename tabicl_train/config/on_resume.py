"""What it means for a run if an option differs when the run is continued, as the option itself declares.

    dropout: float = option(0.0, resume="refused")

An option that declares nothing has the severity of its section, and a section that declares nothing is TOLD.

A start from `init_weights` compares the options of the network, too: another value is an error if the option is NEVER,
nothing if it is FREE, START or acts in training only, and otherwise a warning
(`initial_weights` in training/resume.py).
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from priors.options import default_of


class Severity(Enum):
    """How a change of an option is met when a run is continued."""

    FREE = "free"  # it changes neither the weights of a run nor its scores, and is not mentioned
    START = "start"  # it belongs to one start of the run, and is not mentioned
    TOLD = "told"  # printed as a line
    WARNING = "warning"  # printed as a warning
    REFUSED = "refused"  # it would be another run; resume.allow_changes=true permits it
    NEVER = "never"  # it would be another network, which the weights do not fit; refused in any case


def severity_of(key: str, options: type, default: Severity = Severity.TOLD) -> Severity:
    """Return what a dataclass of options declares about one of them.

    Parameters
    ----------
    key : str
        The option; for one of a section, a dotted name.
    options : type
        The dataclass.
    default : Severity
        That of an option without a declaration, or of one that no longer exists.
    """
    name, _, rest = key.partition(".")
    fields = {field.name: field for field in dataclasses.fields(options)}
    if name not in fields:
        return default
    severity = Severity(fields[name].metadata.get("resume", default))
    section = type(default_of(fields[name]))
    if rest and dataclasses.is_dataclass(section):
        return severity_of(rest, section, severity)  # of an option of a section
    return severity  # also of a key of a dictionary, whose keys declare nothing
