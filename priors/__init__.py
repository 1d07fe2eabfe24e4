"""Priors: distributions over tables, and how to draw from them.

A prior is a subclass of `Prior` whose fields are its options, registered by `register`, ours at the end of this file.
Those of installed packages are registered by their entry point in the group `tabicl_train.plugins`; the group
`tabicl_train.priors` of earlier versions names classes.

Registering and listing priors imports no torch, which takes 2 s; all else is imported on first use.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from priors.errors import PriorError
from priors.options import build

if TYPE_CHECKING:
    from priors.finish import Rejected
    from priors.prior import Prior, Realistic
    from priors.random import rng_at
    from priors.table import Largest, Table, TableSpec

__all__ = [
    "Largest",
    "Prior",
    "PriorError",
    "Realistic",
    "Rejected",
    "Table",
    "TableSpec",
    "build_prior",
    "register",
    "rng_at",
]

GROUP = "tabicl_train.priors"  # of entry points
PRIORS: dict[str, type[Prior] | str] = {}  # by name; some as "module:class", which is imported when it is asked for
HOMES = {  # the modules of names that are imported on first use
    "Largest": "priors.table",
    "Prior": "priors.prior",
    "Realistic": "priors.prior",
    "Rejected": "priors.finish",
    "Table": "priors.table",
    "TableSpec": "priors.table",
    "rng_at": "priors.random",
}


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(name: str, cls: type[Prior] | str | None = None) -> Any:
    """Register a prior; without a class, return a decorator that does.

    Parameters
    ----------
    name : str
        What `build_prior` and `prior=` take.
    cls : type or str, optional
        The class, or "module:class", which is imported on first use.

    Returns
    -------
    object
        The class, or the decorator.

    Raises
    ------
    PriorError
        If another prior has the name, or if it is no prior.
    """
    if cls is None:
        return lambda decorated: register(name, decorated)
    if not isinstance(cls, str) and not is_prior(cls):
        raise PriorError(f"the prior {name} = {cls!r} is no subclass of priors.Prior")
    registered = PRIORS.get(name, cls)
    if place_of(registered) != place_of(cls):  # a module that is imported twice may register its priors again
        places = f"{place_of(registered)} and {place_of(cls)}"
        raise PriorError(f"two priors are called {name!r}: {places}; rename one of them")
    PRIORS[name] = cls
    return cls


def is_prior(value: object) -> bool:
    from priors.prior import Prior

    return isinstance(value, type) and issubclass(value, Prior)


def place_of(cls: type[Prior] | str) -> str:
    """Return where a class is defined, "module:class"."""
    if isinstance(cls, str):
        return cls
    return f"{cls.__module__}:{cls.__qualname__}"


def prior_names() -> list[str]:
    """Return the names of all priors, sorted."""
    return sorted([*PRIORS, *installed_priors()])


def prior_class(name: str) -> type[Prior]:
    """Return the class of a prior; raises PriorError if there is none of this name, or its package is broken."""
    registered = PRIORS.get(name)
    if registered is None:
        entry = installed_priors().get(name)
        if entry is None:
            raise PriorError(f"there is no prior {name!r}; there are: {', '.join(prior_names())}")
    elif isinstance(registered, str):
        entry = EntryPoint(name, registered, GROUP)
    else:
        return registered
    try:
        cls = entry.load()
    except (Exception, SystemExit) as error:  # importing the package may fail in any way
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        raise PriorError(f"{package_of(entry)}: the prior {name} = {entry.value!r} {problem}") from error
    if not is_prior(cls):
        raise PriorError(f"{package_of(entry)}: the prior {name} = {entry.value!r} is no subclass of priors.Prior")
    return cls


def build_prior(name: str, **options) -> Prior:
    """Build a prior.

    Parameters
    ----------
    name : str
        Name of a registered prior, such as "graph_scm".
    **options
        Options of the prior; the others have their defaults.

    Raises
    ------
    PriorError
        If there is no such prior, or with all problems of the options.
    """
    prior, problems = build(prior_class(name), options)
    if problems:
        raise PriorError(f"prior {name}: {'; '.join(problems)}")
    return prior


def installed_priors() -> dict[str, EntryPoint]:
    """Return the priors that other packages register, by name; PriorError if a name is used twice."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = None
        if entry.name in entries:
            other = package_of(entries[entry.name])
        elif entry.name in PRIORS:
            other = "tabicl-train itself"
        if other is not None:
            raise PriorError(f"two priors are called {entry.name!r}: of {package_of(entry)} and of {other}")
        entries[entry.name] = entry
    return entries


def package_of(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "tabicl-train"


register("dummy", "priors.dummy:Dummy")
register("graph_scm", "priors.graph_scm:GraphSCM")
register("hdf5", "priors.hdf5:HDF5")
register("mix_scm", "priors.mix_scm:MixSCM")
register("mlp_scm", "priors.mlp_scm:MLPSCM")
register("one_table", "priors.one_table:OneTable")
register("tables", "priors.tables:FolderOfTables")
register("tree_scm", "priors.tree_scm:TreeSCM")
