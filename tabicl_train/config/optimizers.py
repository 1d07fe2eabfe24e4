"""The optimizers by name, and the settings of each: its name and its options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tabicl_train import register
from tabicl_train.config.schema import OptimizerConfig
from tabicl_train.console import first_line

__all__ = ["OptimizerKind", "settings_of"]

OF_STAGES = ("lr", "weight_decay")  # arguments that the stages of the curriculum set


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer: what is registered by `register.optimizer`.

    Parameters
    ----------
    entry : type or str
        A subclass of torch.optim.Optimizer, see optimizer.py; or "module:name", which is imported on first use.
    options : type, optional
        The dataclass of its options, which the class takes as keyword arguments. By default its options are the
        arguments of the class that have a default of a plain type.
    """

    entry: Any
    options: type | None = None

    @property
    def optimizer(self) -> Any:
        """The class."""
        return register.load(self.entry) if isinstance(self.entry, str) else self.entry


def settings_of(name: str) -> type:
    """Return the dataclass of the settings `optimizer.*` for an optimizer; ConfigError if it is not registered."""
    return _settings(name, register.optimizer[name])


@functools.cache
def _settings(name: str, kind: OptimizerKind) -> type:
    if kind.options is OptimizerConfig:
        return OptimizerConfig
    fields: list[Any] = [("name", str, field(default=name))]
    if kind.options is None:
        fields += argument_fields(kind.optimizer)
        bases: tuple[type, ...] = ()
    else:
        bases = (kind.options,)
    return dataclasses.make_dataclass(f"{name}_settings", fields, bases=bases, namespace={"problems": problems})


def argument_fields(entry: Callable[..., Any]) -> list[Any]:
    """Return the arguments of a class that can be options, as fields of a dataclass."""
    fields: list[Any] = []
    _, *others = inspect.signature(entry).parameters.values()  # the first one are the parameters
    for argument in others:
        default = argument.default
        if argument.name in OF_STAGES or default is inspect.Parameter.empty:
            continue
        if isinstance(default, tuple | list):
            fields.append((argument.name, list[Any], field(default_factory=functools.partial(list, default))))
        elif isinstance(default, bool | float | str):
            fields.append((argument.name, type(default), field(default=default)))
        elif isinstance(default, int) and "float" in str(argument.annotation):
            fields.append((argument.name, float, field(default=float(default))))
        elif isinstance(default, int) and argument.annotation in (int, "int"):
            fields.append((argument.name, int, field(default=default)))
        elif isinstance(default, int | None):  # it does not say whether it takes fractions
            fields.append((argument.name, Any, field(default=default)))
    return fields


def problems(settings: Any) -> list[str]:
    """List what is wrong with the settings of an optimizer of a plug-in, which is tried out."""
    of_options = getattr(super(type(settings), settings), "problems", None)
    found = of_options() if of_options is not None else []
    if found:
        return found
    from tabicl_train.optimizer import try_out  # on first use, as it imports torch

    try:
        try_out(settings)
    except Exception as error:  # of a plug-in, of any type
        return [f"name is {settings.name!r}, which cannot take a step: {first_line(error)}"]
    return []


register.optimizer("muon", "tabicl_train.optimizer:Muon", options=OptimizerConfig)
register.optimizer("muon_all", "tabicl_train.optimizer:MuonAll", options=OptimizerConfig)
register.optimizer("adamw", "tabicl_train.optimizer:AdamW", options=OptimizerConfig)
