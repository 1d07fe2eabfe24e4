"""Builds the objects that a configuration names from their options: callbacks, objectives, schedules, priors."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from priors.options import build
from tabicl_train.errors import ConfigError

if TYPE_CHECKING:
    from priors import Prior


def build_options(cls: Any, options: dict[str, Any]) -> Any:
    """Build an object from the options that differ from their defaults; raises ConfigError with all problems."""
    built, problems = build(cls, options)
    if problems:
        raise ConfigError(problems)
    return built


@dataclass
class NoOptions:
    """The options of a function: it has none."""


def options_class(entry: Any) -> Any:
    """Return the dataclass of the options of an objective or a schedule: the class itself, or `NoOptions`."""
    return entry if isinstance(entry, type) else NoOptions


def build_callable(entry: Any, options: dict[str, Any]) -> Any:
    """Return an objective or a schedule that is a function, or build it from its class, as `build_options` does."""
    if not isinstance(entry, type) and not options:
        return entry
    return build_options(options_class(entry), options)


def configured_prior(settings: dict[str, Any] | None) -> Prior:
    """Build the prior of a configuration, `config.prior`; raises PriorError with all problems."""
    from priors import PriorError

    prior, problems = built_prior(settings)
    if problems:
        raise PriorError("; ".join(problems))
    return prior


def built_prior(settings: dict[str, Any] | None) -> tuple[Prior, list[str]]:
    """Build the prior of a configuration from its name and its options.

    The prior that was built last is kept and returned again for the same settings, since it may have read many files;
    see `last_prior`.

    Parameters
    ----------
    settings : dict or None
        The section `prior`: the name, and options that differ from their defaults.

    Returns
    -------
    Prior
        The prior; options that are wrong have their defaults.
    list of str
        What is wrong with the options.

    Raises
    ------
    PriorError
        If there is no such prior.
    """
    import priors

    if not isinstance(settings, dict) or "name" not in settings:
        raise priors.PriorError(f"none is chosen; set prior=NAME to one of {', '.join(priors.prior_names())}")
    return last_prior(json.dumps(settings))


@functools.lru_cache(maxsize=1)
def last_prior(settings: str) -> tuple[Prior, list[str]]:
    """Build the prior with these settings, in JSON, as `built_prior` does.

    Call `last_prior.cache_clear()` if its files may have changed.
    """
    import priors

    values = json.loads(settings)
    return build(priors.prior_class(values.pop("name")), values, "prior")
