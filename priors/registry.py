"""Registries: one for each kind of thing with a name, filled in the same way by this package and by plug-ins.

    @register.prior("ring")
    class Ring(Prior): ...

An entry may also be the text "module:name", which is imported when it is needed, since the help of a command must not
wait two seconds for torch. An unknown name is searched for in installed packages: an entry point of the group
`tabicl_train.plugins` names a module, which registers its entries when it is imported.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from priors.errors import PriorError
from priors.options import closest

__all__ = ["GROUP", "OLD_CONFIGS", "Registry", "load", "place_of", "prior"]

GROUP = "tabicl_train.plugins"  # of entry points
# Groups of version 0.2.0, which work until version 0.4.0.
OLD_CONFIGS = "tabicl_train.configs"  # their entry points name packages that are folders of configuration files
OLD_PRIORS = "tabicl_train.priors"  # their entry points name classes of priors
OURS = ("priors", "tabicl_train")

LOCK = threading.RLock()  # for imports of plug-ins, since estimators may be fitted in several threads
_installed_loaded = False
_broken: list[str] = []  # why installed plug-ins could not be imported


class Registry(Mapping[str, Any]):
    """Mapping from names to the entries of one kind, such as all priors or all networks.

    Parameters
    ----------
    kind : str
        Name of the kind in messages, such as "scaling rule".
    home : str
        Module that registers the entries of this package, imported on first use.
    record : str, optional
        "module:name" of a class that is called with each entry and the facts about it. Default: there are no facts.
    error : callable
        Returns the exception for a message.
    """

    def __init__(
        self, kind: str, home: str, record: str | None = None, error: Callable[[str], Exception] = PriorError
    ) -> None:
        self.kind = kind
        self.home = home
        self.record = record
        self.error = error
        self._entries: dict[str, Any] = {}
        self._modules: dict[str, str] = {}  # by name, the module that registered the entry

    def __call__(self, name: str, entry: Any = None, **facts: Any) -> Any:
        """Register an entry under a name; without an entry, return a decorator that does so.

        Parameters
        ----------
        name : str
            Name in configurations and commands.
        entry : object, optional
            The class or function, or "module:name", which is imported on first use.
        **facts
            Further parameters of the record of this kind, such as `settings` for a network.

        Returns
        -------
        object
            The entry, or the decorator.

        Raises
        ------
        ConfigError
            If another entry has the name; PriorError for a prior.
        """
        # The calling module, since the entry may be from another one: register.optimizer("sgd", torch.optim.SGD).
        module = sys._getframe(1).f_globals.get("__name__", "__main__")
        if entry is None:
            return lambda decorated: self._add(name, decorated, module, facts)
        return self._add(name, entry, module, facts)

    def _add(self, name: str, entry: Any, module: str, facts: dict[str, Any]) -> Any:
        """Register an entry on behalf of a module, and return it; see `__call__`."""
        registered = self._entries.get(name)
        # A module may be imported twice.
        if registered is not None and self.place(name) != place_of(entry):
            problem = f"two {self.kind}s are called {name!r}: {self.place(name)} and {place_of(entry)}"
            raise self.error(f"{problem}; rename one of them")
        # The entry, or a record of it with its facts.
        added = entry
        if self.record is None and facts:
            raise self.error(f"register.{self.kind}({name!r}) takes no {', '.join(facts)}")
        if self.record is not None:
            try:
                added = load(self.record)(entry, **facts)
            except TypeError as error:
                # A fact is missing or unknown.
                door = self.kind.removesuffix(" rule").replace(" ", "_")
                raise self.error(f"register.{door}({name!r}): {str(error).partition(' ')[2]}") from None
        self._entries[name] = added
        self._modules[name] = module
        return entry

    def __contains__(self, name: object) -> bool:
        """Whether something is registered under a name, possibly by an installed plug-in."""
        if name not in self._entries:
            importlib.import_module(self.home)
        if name not in self._entries:
            load_installed()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        importlib.import_module(self.home)
        load_installed()
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Count all names."""
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        """Return the entry of a name.

        Raises
        ------
        ConfigError
            If there is none, or it cannot be imported; PriorError for a prior. The message suggests the most similar
            name, or all names, and says which installed plug-ins are broken.
        """
        if name not in self:
            raise self.error(self.unknown(name))
        entry = self._entries[name]
        if isinstance(entry, str):
            try:
                self._entries[name] = load(entry)
            except (Exception, SystemExit) as error:
                # Importing a module may fail in any way.
                problem = f"the {self.kind} {name} = {entry!r} cannot be loaded: {describe(error)}"
                raise self.error(problem) from error
        return self._entries[name]

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not registered."""
        near = closest(name, self)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self)}"
        return "; ".join([f"there is no {self.kind} {name!r}; {hint}", *broken()])

    def place(self, name: str) -> str:
        """Return where the entry of a name is defined, "module:name"."""
        return place_of(self._entries[name])

    def plugin(self, name: str) -> str | None:
        """Return the module of a plug-in that registered a name; None for built-in and unknown names."""
        if name not in self or is_ours(self._modules[name]):
            return None
        return self._modules[name]

    def of_plugins(self) -> list[str]:
        """Return the names that plug-ins have registered, without importing anything of this package."""
        load_installed()
        return [name for name in self._entries if not is_ours(self._modules[name])]


def place_of(entry: Any) -> str:
    """Return where an entry is defined, "module:name"."""
    if isinstance(entry, str):
        return entry
    entry = getattr(entry, "entry", entry)  # of a record
    entry = getattr(entry, "func", entry)  # of a partial
    if isinstance(entry, str):
        return entry
    named = entry if hasattr(entry, "__qualname__") else type(entry)
    return f"{named.__module__}:{named.__qualname__}"


def load(place: str) -> Any:
    """Import "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def is_ours(module: str) -> bool:
    """Whether a module belongs to this package."""
    return module.partition(".")[0] in OURS


def load_installed() -> None:
    """Import the installed plug-ins, once. A broken one is an error only where it is needed, see `broken`."""
    global _installed_loaded
    # Other threads wait until all are registered; this one may ask for names while it imports a plug-in.
    with LOCK:
        if _installed_loaded:
            return
        _installed_loaded = True
        for group in (GROUP, OLD_CONFIGS, OLD_PRIORS):
            for entry in entry_points(group=group):
                try:
                    if group != GROUP:
                        warn_of_old_group(entry)
                    if group == OLD_PRIORS:
                        prior._add(entry.name, f"{entry.module}:{entry.attr}", entry.module, {})
                    else:
                        entry.load()
                except (Exception, SystemExit) as error:
                    # A plug-in may fail in any way.
                    _broken.append(f"{owner(entry)} cannot be imported: {describe(error)}")
                    # Said at once, too: another plug-in may have what this one was to register.
                    warnings.warn(_broken[-1], RuntimeWarning, stacklevel=2)


def warn_of_old_group(entry: EntryPoint) -> None:
    """Warn about an entry point in a group of version 0.2.0."""
    brings = "that registers its priors" if entry.group == OLD_PRIORS else "next to its folder configs"
    line = f"{entry.group}, the group of entry points of {owner(entry)}, works until version 0.4.0"
    warnings.warn(f"{line}; name a module {brings} in {GROUP}", DeprecationWarning, stacklevel=2)


def broken() -> list[str]:
    """List why installed plug-ins are missing."""
    return list(_broken)


def owner(entry: EntryPoint) -> str:
    """Name the plug-in of an entry point in messages."""
    package = f" of the package {entry.dist.name}" if entry.dist else ""
    return f"the plug-in {entry.name}{package}"


def describe(error: BaseException) -> str:
    """Describe an error in one line, with the line of code that raised it."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    trace = error.__traceback__
    if trace is None:
        return text
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{text} ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


prior = Registry("prior", "priors")
