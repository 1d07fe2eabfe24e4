"""Priors: distributions over tables, and how to draw from them.

A prior is a subclass of `Prior` whose fields are its options, registered by `register`, ours at the end of this file.
Those of installed packages are found too, see registry.py.

Registering and listing priors imports no torch, which takes 2 s; all else is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from priors.errors import PriorError
from priors.options import build
from priors.registry import prior as register

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


def prior_names() -> list[str]:
    """Return the names of all priors, sorted."""
    return sorted(register)


def prior_class(name: str) -> type[Prior]:
    """Return the class of a prior; raises PriorError if there is none of this name, or its package is broken."""
    from priors.prior import Prior

    cls = register[name]
    if not isinstance(cls, type) or not issubclass(cls, Prior):
        raise PriorError(f"the prior {name} = {cls!r} is not a subclass of priors.Prior")
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


register("dummy", "priors.dummy:Dummy")
register("graph_scm", "priors.graph_scm:GraphSCM")
register("hdf5", "priors.hdf5:HDF5")
register("mix_scm", "priors.mix_scm:MixSCM")
register("mlp_scm", "priors.mlp_scm:MLPSCM")
register("one_table", "priors.one_table:OneTable")
register("tables", "priors.tables:FolderOfTables")
register("tree_scm", "priors.tree_scm:TreeSCM")
