"""The doors: a registry for each kind of thing that has a name, filled the same way by us and by others.

    from tabicl_train import register

    @register.prior("ring")
    class Ring(Prior): ...

    register.callback("lowest_loss", LowestLoss)

The page Extend (tabicl_train/EXTEND.md) has an example of each kind. An entry may also be the text "module:name", which
is imported when it is asked for, since the help of a command must not wait two seconds for torch. Names that are not
known are looked for in the installed plug-ins; see plugins.py.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from tabicl_train import plugins
from tabicl_train.errors import ConfigError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """The things of one kind, by name.

    Parameters
    ----------
    kind : str
        What messages call them, such as "scaling rule".
    home : str, optional
        The module that registers those of this package, imported on first use.
    """

    def __init__(self, kind: str, home: str | None = None) -> None:
        self.kind = kind
        self.home = home
        self.entries: dict[str, T | str] = {}

    @overload
    def __call__(self, name: str) -> Callable[[T], T]: ...

    @overload
    def __call__(self, name: str, entry: T | str) -> T | str: ...

    def __call__(self, name: str, entry: T | str | None = None) -> Any:
        """Register an entry under a name; without an entry, return a decorator that does.

        Raises
        ------
        ConfigError
            If another entry has the name.
        """
        if entry is None:
            return lambda decorated: self(name, decorated)
        known = self.entries.get(name)
        if known is not None and place_of(known) != place_of(entry):
            problem = f"two {self.kind}s are called {name!r}: {place_of(known)} and {place_of(entry)}"
            raise ConfigError([f"{problem}; rename one of them"])
        self.entries[name] = entry
        return entry

    def __contains__(self, name: object) -> bool:
        """Whether something is registered under a name, by an installed plug-in too."""
        if name not in self.entries:
            self._fill()
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        self._fill()
        return iter(list(self.entries))

    def __len__(self) -> int:
        """Count all names."""
        self._fill()
        return len(self.entries)

    def __getitem__(self, name: str) -> T:
        """Return what is registered under a name.

        Raises
        ------
        ConfigError
            If there is nothing; the line has the most similar name, or all names, and installed plug-ins that are
            broken.
        """
        if name not in self:
            raise ConfigError([self.unknown(name)])
        entry = self.entries[name]
        if isinstance(entry, str):
            entry = self.entries[name] = load(entry)
        return entry

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not registered."""
        near = difflib.get_close_matches(name, list(self), n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self)}"
        line = f"there is no {self.kind} {name!r}; {hint}"
        return "; ".join([line, *plugins.broken()])

    def plugin(self, name: str) -> plugins.Plugin | None:
        """Return the plug-in that has registered a name; None for those of this package, and for unknown names."""
        if name not in self:
            return None
        return plugins.of_module(place_of(self.entries[name]).partition(":")[0])

    def _fill(self) -> None:
        """Import the module with our own entries, and the installed plug-ins."""
        if self.home is not None:
            importlib.import_module(self.home)
        plugins.load_installed()


def place_of(entry: Any) -> str:
    """Return where an entry is defined, "module:name"."""
    if isinstance(entry, str):
        return entry
    defined = getattr(entry, "source", entry)  # an entry may be a record around a class
    name = getattr(defined, "__qualname__", type(defined).__qualname__)
    return f"{getattr(defined, '__module__', type(defined).__module__)}:{name}"


def load(place: str) -> Any:
    """Import "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
