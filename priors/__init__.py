"""Synthetic tables: what one is, and how to draw one.

A prior is one module `priors/<name>.py` with one `Prior` subclass, whose fields are its options, and one file
`configs/prior/<name>.yaml`; no other file lists it. Another package registers a prior of its own as an entry
point, which names such a module or the class itself, and brings its YAML file as priors/README.md describes:

    [project.entry-points."tabicl_train.priors"]
    mine = "my_package.my_prior"
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, get_origin, get_type_hints

from priors.finish import Rejected
from priors.prior import Prior, Realistic
from priors.random import rng_at
from priors.table import PriorError, Table, TableSpec

__all__ = [
    "Prior",
    "PriorError",
    "Realistic",
    "Rejected",
    "Table",
    "TableSpec",
    "build_prior",
    "prior_class",
    "prior_names",
    "rng_at",
]

GROUP = "tabicl_train.priors"


def prior_names() -> list[str]:
    """Names of the priors of this package and of those that other packages register.

    Raises PriorError if two priors have the same name.
    """
    own = [name for name in own_modules() if own_class(name)]
    return sorted([*own, *installed_priors(own)])


def prior_class(name: str) -> type[Prior]:
    """The prior called `name`; PriorError if there is none, or if the package that registers it is broken."""
    if name in own_modules() and (cls := own_class(name)):
        return cls
    installed = installed_priors()
    if name not in installed:
        raise PriorError(f"there is no prior {name!r}; there are: {', '.join(prior_names())}")
    return load_prior(installed[name])


def build_prior(name: str, **options) -> Prior:
    """The prior called `name` with some of its options set; PriorError lists everything wrong with them."""
    cls = prior_class(name)
    refuse_unknown(f"prior {name}", cls, options)
    for option, kind in get_type_hints(cls).items():
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(values := options.get(option), dict):
            refuse_unknown(f"prior {name}: {option}", kind, values)
            options[option] = kind(**values)
    if problems := wrong_types(cls, options):
        raise PriorError(f"prior {name}: " + "; ".join(problems))
    prior = cls(**options)
    if problems := prior.problems():
        raise PriorError(f"prior {name}: " + "; ".join(problems))
    return prior


def refuse_unknown(what: str, cls: type, options: Collection[str]) -> None:
    """Raise PriorError for options that are no fields of the class."""
    known = [field.name for field in fields(cls) if field.init]
    unknown = []
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            unknown.append(f"{option!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        available = f"its options are: {', '.join(known)}" if known else "it has none"
        raise PriorError(f"{what} has no option {', '.join(unknown)}; {available}")


def wrong_types(cls: type[Prior], options: dict[str, Any]) -> list[str]:
    """Options whose values are not of their declared type; an int is accepted for a float."""
    hints = get_type_hints(cls)
    problems = []
    for option, value in options.items():
        kind = get_origin(hints[option]) or hints[option]
        if type(value) is not kind and not (kind is float and type(value) is int):
            problems.append(f"{option} is {value!r}; it must be of type {kind.__name__}")
    return problems


def own_modules() -> list[str]:
    """The modules of this package; its subpackages hold parts of priors, and no priors."""
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]


def own_class(module: str) -> type[Prior] | None:
    return find_class(importlib.import_module(f"{__name__}.{module}"))


def find_class(module: ModuleType) -> type[Prior] | None:
    """The single Prior subclass that a module defines, if any."""
    classes = [
        entry
        for entry in vars(module).values()
        if isinstance(entry, type)
        and issubclass(entry, Prior)
        and entry not in (Prior, Realistic)
        and entry.__module__ == module.__name__
    ]
    if len(classes) > 1:
        raise TypeError(f"module {module.__name__} defines several priors: {', '.join(c.__name__ for c in classes)}")
    return classes[0] if classes else None


def installed_priors(taken: Collection[str] = ()) -> dict[str, EntryPoint]:
    """The priors that other packages register, by name; PriorError if a name is used twice or `taken`."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in taken or entry.name in entries:
            other = package_of(entries[entry.name]) if entry.name in entries else "tabicl-train itself"
            raise PriorError(f"two priors are called {entry.name!r}: of {package_of(entry)} and of {other}")
        entries[entry.name] = entry
    return entries


def package_of(entry: EntryPoint) -> str:
    assert entry.dist is not None  # entry_points() sets it
    return f"package {entry.dist.name}"


def load_prior(entry: EntryPoint) -> type[Prior]:
    """The class of a prior that a package registers."""
    description = f"{package_of(entry)}: the prior {entry.name} = {entry.value!r}"
    try:
        loaded = entry.load()
        cls = find_class(loaded) if isinstance(loaded, ModuleType) else loaded
    except Exception as error:  # importing the package may fail in any way
        raise PriorError(f"{description} cannot be loaded ({type(error).__name__}: {error})") from error
    if not (isinstance(cls, type) and issubclass(cls, Prior)):
        raise PriorError(f"{description} is neither a subclass of priors.Prior nor a module that defines one")
    return cls
