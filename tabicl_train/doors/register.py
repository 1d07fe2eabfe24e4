"""The doors: a registry for each kind of thing with a name, filled in the same way by this package and by plug-ins.

    from tabicl_train import register

    @register.scaling("power", options=("scaling_bound",))
    class Power(Scaling): ...

    register.callback("lowest_loss", LowestLoss)

`Registry` is defined in priors/registry.py, and so is the registry of priors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from priors.registry import Registry, load, prior
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
    "schedule",
    "suite",
]


def plugins_used(parts: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return what files record about the plug-ins that things need.

    Parameters
    ----------
    parts : iterable of (str, str)
        The kind and the name of each thing, such as ("scaling", "power").

    Returns
    -------
    list of dict
        A record for each plug-in, with the things it is needed for; see `plugins.require`.
    """
    uses: dict[plugins.Plugin, list[list[str]]] = {}
    for kind, name in parts:
        module = globals()[kind].plugin(name)
        plugin = None if module is None else plugins.of_module(module)
        if plugin is not None and [kind, name] not in uses.setdefault(plugin, []):
            uses[plugin].append([kind, name])
    return [plugin.record() | {"uses": names} for plugin, names in uses.items()]


@dataclass(frozen=True)
class Experiment:
    """An experiment of `tabicl-lab`: what is registered by `register.experiment`.

    Parameters
    ----------
    entry : callable or str
        A function whose only parameter is annotated with the dataclass of its options; or "module:name".
    question : str
        The question that it answers, for the list of all experiments.
    trains : bool
        Whether it trains networks in a sweep, which needs the packages of sweeps.
    packages : tuple of str
        Further packages that it needs; a missing one is reported before it starts.
    """

    entry: Any
    question: str
    trains: bool = False
    packages: tuple[str, ...] = ()

    @property
    def function(self) -> Callable[[Any], None]:
        """The function."""
        return load(self.entry) if isinstance(self.entry, str) else self.entry


def door(kind: str, home: str, record: str | None = None) -> Registry:
    """Make a registry that raises ConfigError; see `Registry`."""
    return Registry(kind, home, record, lambda line: ConfigError([line]))


network = door("network", "tabicl_train.model.config", "tabicl_train.model.config:Family")
scaling = door("scaling rule", "tabicl_train.model.scaling", "tabicl_train.model.scaling:Rule")
objective = door("objective", "tabicl_train.training.objectives")
optimizer = door(
    "optimizer", "tabicl_train.training.optimizer_settings", "tabicl_train.training.optimizer_settings:OptimizerKind"
)
callback = door("callback", "tabicl_train.training.callbacks.build")
schedule = door("schedule", "tabicl_train.stream.schedules")
suite = door("suite", "tabicl_train.evaluation.suites")
export_format = door("export format", "tabicl_train.weights.export", "tabicl_train.weights.export:Format")
experiment = door("experiment", "tabicl_train.doors.register", "tabicl_train.doors.register:Experiment")
