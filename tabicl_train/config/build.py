"""Builds the objects that a configuration names from their options: callbacks, objectives, priors."""

from __future__ import annotations

import functools
import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from priors.options import build
from tabicl_train.errors import ConfigError

if TYPE_CHECKING:
    from priors import Prior


def build_options(cls: Any, options: dict[str, Any]) -> Any:
    """Build an object from those of its options that differ from their defaults; ConfigError with all problems."""
    built, problems = build(cls, options)
    if problems:
        raise ConfigError(problems)
    return built


@dataclass
class NoOptions:
    """The options of a function."""


def options_class(entry: Any) -> Any:
    """Return the dataclass of the options of an objective or a schedule: its class; a function has none."""
    return NoOptions if inspect.isfunction(entry) else entry


def build_callable(entry: Any, options: dict[str, Any]) -> Any:
    """Return an objective or a schedule that is a function, or build one from its class; ConfigError as above."""
    if inspect.isfunction(entry) and not options:
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
