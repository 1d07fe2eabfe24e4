"""Builds the objects that a configuration names from their options: callbacks, objectives, priors."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from priors.options import build
from tabicl_train.errors import ConfigError

if TYPE_CHECKING:
    from priors import Prior


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of an option."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


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
    # The names of the options.
    names: list[str] = []
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.init]
    problems = []
    for option in options:
        if option in names:
            continue
        near = difflib.get_close_matches(str(option), names, n=1)
        hint = f"there are {', '.join(names) or 'none'}"
        if near:
            hint = f"did you mean {near[0]}?"
        problems.append(f"{option}: no such option; {hint}")
    if problems:
        raise ConfigError(problems)

    # The types of their values, where it is a plain one; of a list or a dictionary not those of its items.
    types = get_type_hints(cls)
    for option, value in options.items():
        expected = get_origin(types[option]) or types[option]  # list[int] is checked as a list
        if expected not in (bool, int, float, str, list, dict):
            continue
        if isinstance(value, expected) or (expected is float and isinstance(value, int)):
            continue
        problems.append(f"{option} is {value!r}; it must be of type {expected.__name__}")
    if problems:
        raise ConfigError(problems)

    # What the class itself has to say.
    built = cls(**options)
    if hasattr(built, "problems"):
        problems = built.problems()
    if problems:
        raise ConfigError(problems)
    return built


def build_objective(entry: Any, options: dict[str, Any]) -> Any:
    """Return an objective that is a function, which has no options, or build one from its class and its options."""
    if not inspect.isfunction(entry):
        return build_options(entry, options)
    if options:
        raise ConfigError([f"{option}: no such option; a function has none" for option in options])
    return entry


def configured_prior(settings: dict[str, Any] | None) -> Prior:
    """Build the prior of a configuration, `config.prior`; raises PriorError with all problems."""
    from priors import PriorError

    prior, problems = built_prior(settings)
    if problems:
        raise PriorError("; ".join(problems))
    return prior


def built_prior(settings: dict[str, Any] | None) -> tuple[Prior, list[str]]:
    """Build the prior of a configuration from its name and its options, and list what is wrong with them.

    The prior that was built last is kept, and returned again for the same settings: it may have read many files. See
    `last_prior`. Raises PriorError if there is no such prior.
    """
    import priors

    if not isinstance(settings, dict) or "name" not in settings:
        raise priors.PriorError(f"none is chosen; set prior=NAME to one of {', '.join(priors.prior_names())}")
    return last_prior(json.dumps(settings))


@functools.lru_cache(maxsize=1)
def last_prior(settings: str) -> tuple[Prior, list[str]]:
    """Build the prior with these settings, in JSON, and list its problems.

    `last_prior.cache_clear()` forgets it when its files may differ. Raises PriorError if there is no such prior.
    """
    import priors

    values = json.loads(settings)
    return build(priors.prior_class(values.pop("name")), values, "prior")
