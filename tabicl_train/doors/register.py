"""The doors: a registry for each kind of thing that has a name, filled the same way by us and by others.

    from tabicl_train import register

    @register.scaling("power", options=("scaling_bound",))
    class Power(Scaling): ...

    register.callback("lowest_loss", LowestLoss)

An entry may also be the text "module:name", which is imported when it is asked for, since the help of a command must
not wait two seconds for torch. Names that are not known are looked for in the installed plug-ins, see plugins.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from priors.options import closest
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError

__all__ = [
    "Registry",
    "callback",
    "experiment",
    "export_format",
    "network",
    "objective",
    "optimizer",
    "prior",
    "scaling",
    "suite",
]


class Registry(Mapping[str, Any]):
    """Mapping from names to the entries of one kind, such as all priors or all networks.

    Parameters
    ----------
    kind : str
        Name of the kind in messages, such as "scaling rule".
    home : str
        Module that registers the entries of this package, imported on first use.
    record : str, optional
        "module:name" of a class that is called with each entry and the facts about it; by default there are no facts.
    """

    def __init__(self, kind: str, home: str, record: str | None = None) -> None:
        self.kind = kind
        self.home = home
        self.record = record
        self._entries: dict[str, Any] = {}
        self._modules: dict[str, str] = {}  # that have registered them, by name

    def __call__(self, name: str, entry: Any = None, **facts: Any) -> Any:
        """Register an entry under a name; without an entry, return a decorator that does.

        Parameters
        ----------
        name : str
            Name in configurations and commands.
        entry : object, optional
            The class or function, or "module:name", which is imported on first use.
        **facts
            Further parameters of the record of this kind, such as `settings` of a network.

        Returns
        -------
        object
            The entry, or the decorator.

        Raises
        ------
        ConfigError
            If another entry has the name.
        """
        # The module that calls, since the entry may be of another one: register.optimizer("sgd", torch.optim.SGD).
        module = sys._getframe(1).f_globals.get("__name__", "__main__")
        if entry is None:
            return lambda decorated: self._add(name, decorated, module, facts)
        return self._add(name, entry, module, facts)

    def _add(self, name: str, entry: Any, module: str, facts: dict[str, Any]) -> Any:
        known = self._entries.get(name)
        if known is not None and self.place(name) != place_of(entry):
            problem = f"two {self.kind}s are called {name!r}: {self.place(name)} and {place_of(entry)}"
            raise ConfigError([f"{problem}; rename one of them"])
        added = entry
        if self.record is None and facts:
            raise ConfigError([f"register.{self.kind}({name!r}) takes no {', '.join(facts)}"])
        if self.record is not None:
            try:
                added = load(self.record)(entry, **facts)
            except TypeError as error:  # a fact that is missing or unknown
                door = self.kind.removesuffix(" rule").replace(" ", "_")
                raise ConfigError([f"register.{door}({name!r}): {str(error).partition(' ')[2]}"]) from None
        self._entries[name] = added
        self._modules[name] = module
        return entry

    def __contains__(self, name: object) -> bool:
        """Whether something is registered under a name, by an installed plug-in too."""
        if name not in self._entries:
            self._fill()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield all names."""
        self._fill()
        return iter(list(self._entries))

    def __len__(self) -> int:
        """Count all names."""
        self._fill()
        return len(self._entries)

    def __getitem__(self, name: str) -> Any:
        """Return what is registered under a name.

        Raises
        ------
        ConfigError
            If there is nothing; the line has the most similar name, or all names, and why installed plug-ins are
            missing.
        """
        if name not in self:
            raise ConfigError([self.unknown(name)])
        if isinstance(self._entries[name], str):
            self._entries[name] = load(self._entries[name])
        return self._entries[name]

    def unknown(self, name: str) -> str:
        """Return the message for a name that is not registered."""
        near = closest(name, self)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self)}"
        line = f"there is no {self.kind} {name!r}; {hint}"
        return "; ".join([line, *plugins.broken()])

    def place(self, name: str) -> str:
        """Return where the entry of a name is defined, "module:name"."""
        return place_of(self._entries[name])

    def plugin(self, name: str) -> plugins.Plugin | None:
        """Return the plug-in that has registered a name; None for those of this package, and for unknown names."""
        if name not in self:
            return None
        return plugins.of_module(self._modules[name])

    def of_plugins(self) -> list[str]:
        """Return the names that plug-ins have registered; it imports nothing of this package."""
        plugins.load_installed()
        return [name for name in self._entries if not plugins.is_ours(self._modules[name])]

    def _fill(self) -> None:
        """Import the module with our own entries, and the installed plug-ins."""
        importlib.import_module(self.home)
        plugins.load_installed()


def plugins_used(parts: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return what files say of the plug-ins that things need, each with what it is needed for.

    Parameters
    ----------
    parts : iterable of (str, str)
        The kind and the name of each thing, such as ("scaling", "power").

    Returns
    -------
    list of dict
        See `plugins.require`.
    """
    uses: dict[plugins.Plugin, list[list[str]]] = {}
    for kind, name in parts:
        if kind == "prior":
            plugin = plugins.of_module(load("priors:prior_class")(name).__module__)
        else:
            plugin = globals()[kind].plugin(name)
        if plugin is not None and [kind, name] not in uses.setdefault(plugin, []):
            uses[plugin].append([kind, name])
    return [plugin.record() | {"uses": names} for plugin, names in uses.items()]


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


def prior(name: str, entry: Any = None) -> Any:
    """Register a prior, a subclass of `priors.Prior` whose fields are its options; also as a decorator.

    Parameters
    ----------
    name : str
        What `prior=` takes.
    entry : type, optional
        The class, or "module:name".

    Returns
    -------
    object
        The class, or the decorator.
    """
    priors: Callable[..., Any] = load("priors:register")
    return priors(name, entry)


@dataclass(frozen=True)
class Experiment:
    """An experiment of `tabicl-lab`: what is registered by `register.experiment`.

    Parameters
    ----------
    entry : callable or str
        A function of its options, whose only parameter is annotated with their dataclass; or "module:name".
    question : str
        What it asks, for the list of all experiments.
    trains : bool
        Whether it trains networks in a sweep, which needs the packages of sweeps.
    packages : tuple of str
        Other packages that it needs beyond those of the project; a missing one is reported before it starts.
    """

    entry: Any
    question: str
    trains: bool = False
    packages: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[[Any], None]:
        """The function."""
        return load(self.entry) if isinstance(self.entry, str) else self.entry


network = Registry("network", "tabicl_train.model.config", "tabicl_train.model.config:Family")
scaling = Registry("scaling rule", "tabicl_train.model.scaling", "tabicl_train.model.scaling:Rule")
objective = Registry("objective", "tabicl_train.training.objectives")
optimizer = Registry(
    "optimizer", "tabicl_train.training.optimizer_settings", "tabicl_train.training.optimizer_settings:OptimizerKind"
)
callback = Registry("callback", "tabicl_train.training.callbacks.build")
suite = Registry("suite", "tabicl_train.evaluation.suites")
export_format = Registry("export format", "tabicl_train.weights.export", "tabicl_train.weights.export:Format")
experiment = Registry("experiment", "tabicl_train.doors.register", "tabicl_train.doors.register:Experiment")
