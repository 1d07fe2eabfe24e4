"""Synthetic tables: what one is, and how to draw one.

A prior is one module `priors/<name>.py` with one `Prior` subclass, whose fields are its options, and one file
`configs/prior/<name>.yaml`; nothing else lists it.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_origin, get_type_hints

from priors.prior import Prior
from priors.table import PriorError, Table, TableSpec

__all__ = ["Prior", "PriorError", "Table", "TableSpec", "build_prior", "prior_class", "prior_names"]


def prior_names() -> list[str]:
    """Names of the priors: the modules of this package that define a prior."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if find_class(module.name))


def prior_class(name: str) -> type[Prior]:
    """The prior called `name`; PriorError where there is none."""
    found = find_class(name) if name in {module.name for module in pkgutil.iter_modules(__path__)} else None
    if found is None:
        raise PriorError(f"there is no prior {name!r}; there are: {', '.join(prior_names())}")
    return found


def build_prior(name: str, **options) -> Prior:
    """The prior called `name` with some of its options set; PriorError tells all that is wrong with them."""
    cls = prior_class(name)
    known = [field.name for field in fields(cls) if field.init]
    unknown = []
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            unknown.append(f"{option!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        have = f"its options are: {', '.join(known)}" if known else "it has none"
        raise PriorError(f"prior {name} has no option {', '.join(unknown)}; {have}")
    if problems := wrong_types(cls, options):
        raise PriorError(f"prior {name}: " + "; ".join(problems))
    prior = cls(**options)
    if problems := prior.problems():
        raise PriorError(f"prior {name}: " + "; ".join(problems))
    return prior


def wrong_types(cls: type[Prior], options: dict[str, Any]) -> list[str]:
    """Options whose values are not of their declared type; an int will do for a float."""
    hints = get_type_hints(cls)
    found = []
    for option, value in options.items():
        kind = get_origin(hints[option]) or hints[option]
        if type(value) is not kind and not (kind is float and type(value) is int):
            found.append(f"{option} is {value!r}; it must be of type {kind.__name__}")
    return found


def find_class(module: str) -> type[Prior] | None:
    """The single Prior subclass that a module of this package defines, if any."""
    content = vars(importlib.import_module(f"{__name__}.{module}")).values()
    found = [
        entry
        for entry in content
        if isinstance(entry, type) and issubclass(entry, Prior) and entry.__module__ == f"{__name__}.{module}"
    ]
    found = [cls for cls in found if cls is not Prior]
    if len(found) > 1:
        raise TypeError(f"module priors.{module} defines several priors: {', '.join(cls.__name__ for cls in found)}")
    return found[0] if found else None
