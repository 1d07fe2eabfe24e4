"""What it means for a run if an option has another value when the run is continued, as the option itself declares.

    dropout: float = option(0.0, resume="refused")

An option that declares nothing has the severity of its section, and a section that declares nothing is TOLD.

A start from `init_weights` also compares the options of the network (`initial_weights` in training/resume.py). Another
value is an error if the option is NEVER. It is ignored if the option is FREE or START, or acts in training only.
Otherwise it is a warning.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from priors.options import default_of


class Severity(Enum):
    """What happens if the value of an option has changed when a run is continued."""

    FREE = "free"  # it changes neither the weights of a run nor its scores, and is not mentioned
    START = "start"  # it belongs to one start of the run, and is not mentioned
    TOLD = "told"  # printed
    WARNING = "warning"  # printed as a warning
    REFUSED = "refused"  # it would be another run; resume.allow_changes=true permits it
    NEVER = "never"  # it would be another network, which the weights do not fit; refused in any case


def severity_of(key: str, options: type, default: Severity = Severity.TOLD) -> Severity:
    """Return the severity that a dataclass of options declares for one of them.

    Parameters
    ----------
    key : str
        The option; a dotted name if it is in a section.
    options : type
        The dataclass.
    default : Severity
        The severity of an option without a declaration, or of one that no longer exists.

    Returns
    -------
    Severity
        The severity of a change.
    """
    name, _, rest = key.partition(".")
    fields = {field.name: field for field in dataclasses.fields(options)}
    if name not in fields:
        return default
    severity = Severity(fields[name].metadata.get("resume", default))
    section = type(default_of(fields[name]))
    if rest and dataclasses.is_dataclass(section):
        return severity_of(rest, section, severity)
    return severity  # also for a key of a dictionary, which declares nothing
