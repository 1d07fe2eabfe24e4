"""The optimizers by name, and the settings of each: its name and its options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from priors.options import declared_problems
from tabicl_train.config.schema import OptimizerConfig
from tabicl_train.console import first_line
from tabicl_train.doors import register

__all__ = ["OptimizerKind"]

SET_BY_STAGES = ("lr", "weight_decay")  # arguments that are no options, since the stages of the curriculum set them


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

    def settings(self, name: str) -> type:
        """Return the dataclass of the settings `optimizer.*` for this optimizer, registered under a name."""
        return make_settings(name, self)


# Cached, so that the settings of an optimizer have one class, by which they can be compared.
@functools.cache
def make_settings(name: str, kind: OptimizerKind) -> type:
    """Make the dataclass: a field `name`, the options, and a method `problems` that tries them out."""
    # Our own settings have a name and checks already.
    if kind.options is OptimizerConfig:
        return OptimizerConfig
    fields: list[Any] = [("name", str, field(default=name))]
    bases: tuple[type, ...] = ()
    if kind.options is None:
        fields += argument_fields(kind.optimizer)
    else:
        bases = (kind.options,)
    methods = {"problems": problems_of_plugin}
    return dataclasses.make_dataclass(f"{name}_settings", fields, bases=bases, namespace=methods)


def argument_fields(entry: Callable[..., Any]) -> list[Any]:
    """Return the arguments of a class that can be options, as fields of a dataclass."""
    fields: list[Any] = []
    arguments = list(inspect.signature(entry).parameters.values())
    # The first argument takes the parameters of the network.
    for argument in arguments[1:]:
        default = argument.default
        if argument.name in SET_BY_STAGES or default is inspect.Parameter.empty:
            continue
        if isinstance(default, tuple | list):
            fields.append((argument.name, list[Any], field(default_factory=functools.partial(list, default))))
        elif isinstance(default, bool | float | str):
            fields.append((argument.name, type(default), field(default=default)))
        elif isinstance(default, int) and "float" in str(argument.annotation):
            fields.append((argument.name, float, field(default=float(default))))
        elif isinstance(default, int) and argument.annotation in (int, "int"):
            fields.append((argument.name, int, field(default=default)))
        elif isinstance(default, int | None):
            # It does not say whether it takes fractions.
            fields.append((argument.name, Any, field(default=default)))
    return fields


def problems_of_plugin(settings: Any) -> list[str]:
    """List what is wrong with the settings of an optimizer of a plug-in: the method `problems` of `make_settings`."""
    # First what the plug-in's own dataclass declares and has to say, whose `problems` this method hides.
    options = super(type(settings), settings)
    problems = declared_problems(settings)
    if not problems and hasattr(options, "problems"):
        problems = options.problems()
    if problems:
        return problems
    # Then a step is tried.
    # Imported on first use, since it imports torch.
    from tabicl_train.training.optimizer import try_out

    try:
        try_out(settings)
    except Exception as error:
        # A plug-in may raise any error.
        return [f"name is {settings.name!r}, which cannot take a step: {first_line(error)}"]
    return []


register.optimizer("muon", "tabicl_train.training.optimizer:Muon", options=OptimizerConfig)
register.optimizer("muon_all", "tabicl_train.training.optimizer:MuonAll", options=OptimizerConfig)
register.optimizer("adamw", "tabicl_train.training.optimizer:AdamW", options=OptimizerConfig)
