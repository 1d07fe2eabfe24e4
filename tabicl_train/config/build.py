"""Builds the objects that a configuration names from their options: callbacks, objectives, priors."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from tabicl_train.errors import ConfigError

if TYPE_CHECKING:
    from priors import Prior


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of an option."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def build_options(cls: Any, options: dict[str, Any]) -> Any:
    """Build an object from options, which are the fields of its dataclass.

    Parameters
    ----------
    cls : type
        The class.
    options : dict
        Those of its options that differ from their defaults.

    Raises
    ------
    ConfigError
        With everything that is wrong with the options.
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init] if dataclasses.is_dataclass(cls) else []
    problems = []
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
            problems.append(f"{option}: no such option; {hint}")
    if problems:
        raise ConfigError(problems)
    hints = get_type_hints(cls)
    for option, value in options.items():
        kind = get_origin(hints[option]) or hints[option]
        accepted = (int, float) if kind is float else kind
        if kind in (bool, int, float, str, list, dict) and not isinstance(value, accepted):
            problems.append(f"{option} is {value!r}; it must be of type {kind.__name__}")
    if problems:
        raise ConfigError(problems)
    built = cls(**options)
    problems = built.problems() if hasattr(built, "problems") else []
    if problems:
        raise ConfigError(problems)
    return built


def build_objective(entry: Any, options: dict[str, Any]) -> Any:
    """Build an objective from its options: a function is one already, which has none; see `build_options`."""
    if not inspect.isfunction(entry):
        return build_options(entry, options)
    if options:
        raise ConfigError([f"{option}: no such option; a function has none" for option in options])
    return entry


def build_prior(settings: dict[str, Any] | None) -> Prior:
    """Build the prior with these settings, or return the one that was built last, if its settings were the same."""
    import priors

    if not isinstance(settings, dict) or "name" not in settings:
        raise priors.PriorError(f"none is chosen; set prior=NAME to one of {', '.join(priors.prior_names())}")
    return last_prior(json.dumps(settings))


@functools.lru_cache(maxsize=1)
def last_prior(settings: str) -> Prior:
    import priors

    options = json.loads(settings)
    return priors.build_prior(options.pop("name"), **options)
