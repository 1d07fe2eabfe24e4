"""Module paths that pages of version 0.2.0 named, and where the modules are now; they work until version 0.4.0."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# Old and new names, each with all that lies below it.
MOVED = {
    "tabicl_train.callbacks": "tabicl_train.training.callbacks",
    "tabicl_train.commands": "tabicl_train.cli",
    "tabicl_train.distributed": "tabicl_train.training.distributed",
    "tabicl_train.objectives": "tabicl_train.training.objectives",
    "tabicl_train.plugins": "tabicl_train.doors.plugins",
    "tabicl_train.prediction.export": "tabicl_train.weights.export",
    "tabicl_train.prediction.predict": "tabicl_train.model.predict",  # in pickles of estimators
    "tabicl_train.register": "tabicl_train.doors.register",
    "tabicl_train.saved_run": "tabicl_train.report.saved_run",
    "tabicl_train.table_stream": "tabicl_train.stream.table_stream",
}


def new_name(name: str) -> str | None:
    """Return the full name that a module has now, or None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class MovedModules:
    """Imports a module under its old path: a finder and loader of the same module, so that its classes exist only once.

    It does not inherit from the classes of importlib.abc, which take milliseconds to import.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder."""
        place = new_name(fullname)
        if place is None:
            return None
        warnings.warn(
            f"{fullname} is now {place}; the old path works until version 0.4.0", DeprecationWarning, stacklevel=2
        )
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See importlib.abc.Loader."""
        module = importlib.import_module(str(new_name(spec.name)))
        spec.loader_state = module.__spec__  # Python replaces it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        """See importlib.abc.Loader."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType:
        """Return the code for python -m."""
        spec = importlib.util.find_spec(str(new_name(fullname)))
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]
