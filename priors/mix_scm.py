"""mix_scm: tables of several priors in given proportions, by default those of TabICL v1 (arXiv 2502.05564)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from priors.options import build, closest, option
from priors.prior import Prior, Realistic
from priors.random import Seed, as_seed, rng_at
from priors.realism import Realism
from priors.table import Largest, PriorError, Table, TableSpec

__all__ = ["MixSCM"]


@dataclass
class MixSCM(Prior):
    """A mixture of priors. The tables of a group come from the same component."""

    components: dict[str, dict[str, Any]] = option({"mlp_scm": {"weight": 0.7}, "tree_scm": {"weight": 0.3}})
    """The priors by name, each with a weight (0 or more; shares are proportional to it) and with options of that prior:
    {graph_scm: {weight: 2, preset: released}, ...}; the default is TabICL's (arXiv 2502.05564, appendix).
    prior.components={...} replaces the mixture, prior.components.NAME.KEY=VALUE changes one component, and with a plus
    before it adds one. A file with `defaults: [schema/mix_scm]` has exactly the components that it lists."""
    realism: Realism = option(Realism)
    """What tables may have in common with real ones, for synthetic components that do not set it themselves."""
    min_skill: float = option(0.0, at_least=0, below=1)
    """Least skill of extremely randomized trees on a table, for synthetic components that do not set it themselves; the
    same component draws a rejected table again, so the shares stay as they are."""

    def problems(self) -> list[str]:
        """List what is wrong with the options."""
        # The import is not at the top, since that module imports this one to find the priors.
        from priors import prior_class

        problems = []
        total = 0.0  # of the weights
        for name, settings in self.components.items():
            # The weight.
            key = f"components.{name}"
            if name == "mix_scm":
                problems.append(f"{key}: a mixture cannot be part of a mixture")
                continue
            options = dict(settings)
            weight: Any = options.pop("weight", None)
            if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
                problems.append(f"{key}.weight is {weight}; it must be a number, 0 or more")
            else:
                total += weight

            # The prior and its options.
            try:
                cls = prior_class(name)
            except PriorError as error:
                problems.append(f"{key}: {error}")
                continue
            # Where the sizes depend on options, the class has a property.
            if cls.stored_sizes is not None:
                problems.append(f"{key}: its tables have sizes of their own, which a mixture cannot ask for")
            else:
                problems += build(cls, options, key)[1]

        if not self.components:
            problems.append("components is empty; name at least one, {mlp_scm: {weight: 1}, ...}")
        elif not problems and total == 0:
            problems.append("components: at least one needs a positive weight")
        return problems

    @cached_property
    def priors(self) -> dict[str, Prior]:
        """The components, sorted by name, so that draws do not depend on the order of the configuration."""
        inherited = {"realism": self.realism, "min_skill": self.min_skill}
        priors = {}
        for name in sorted(self.components):
            priors[name] = build_component(name, self.components[name], inherited)
        return priors

    @property
    def shares(self) -> dict[str, float]:
        """The shares of the components, which add up to 1."""
        total = sum(self.components[name]["weight"] for name in self.priors)
        return {name: self.components[name]["weight"] / total for name in self.priors}

    def mixed(self, mix: Mapping[str, float]) -> MixSCM:
        """Return the mixture with other shares of its components; see Prior.mixed."""
        problems = []
        for name, share in mix.items():
            if name not in self.components:
                near = closest(name, self.components)
                advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(self.priors)}"
                problems.append(f"{name!r} is not a component of the mixture; {advice}")
            elif not 0 <= share < float("inf"):
                problems.append(f"the share of {name} is {share}; it must be a number, 0 or more")
        if not problems and mix and sum(mix.values()) == 0:
            problems.append("at least one share must be positive")
        if problems:
            raise PriorError("; ".join(problems))
        if not mix:
            return self
        components = {}
        for name, options in self.components.items():
            components[name] = {**options, "weight": mix.get(name, 0.0)}
        return self.with_priors(self.priors, components)

    def with_priors(self, priors: dict[str, Prior], components: dict[str, dict[str, Any]] | None = None) -> MixSCM:
        """Return a mixture of these priors, with these options and weights, by default its own."""
        other = replace(self, components=components or self.components)
        # Instead of those that the cached property would build.
        other.priors = priors
        return other

    def import_loops(self) -> None:
        """Import the loops of all components; see `Prior.import_loops`."""
        for prior in self.priors.values():
            prior.import_loops()

    @property
    def numeric_targets(self) -> bool:  # type: ignore[override]
        """Whether all components also draw tables with a numeric target."""
        return all(prior.numeric_targets for prior in self.priors.values())

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the largest sizes of the components that are drawn; see Prior.largest."""
        drawn = [self.priors[name].largest(rows, numeric) for name, share in self.shares.items() if share > 0]
        most = []
        for sizes in zip(*drawn, strict=True):
            known = [size for size in sizes if size is not None]
            # One without a limit is enough.
            most.append(max(known) if len(known) == len(sizes) else None)
        return Largest(*most)

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Draw the table at an address; see Prior.sample."""
        weights = dict(spec.mix)
        if not weights:
            weights = {name: options["weight"] for name, options in self.components.items()}
        thresholds = np.cumsum([weights.get(name, 0.0) for name in self.priors])
        # The tables of a group draw the same number, and so the same component.
        address = as_seed(seed if spec.group_seed is None else spec.group_seed)
        draw = rng_at(address, "component").random() * thresholds[-1]
        name = list(self.priors)[np.searchsorted(thresholds, draw, side="right")]
        try:
            table = self.priors[name].sample(replace(spec, mix=()), seed)
        except PriorError as error:
            raise PriorError(f"component {name}: {error}") from None
        path = "" if table.source is None else table.source[1]
        table.source = (name, path)
        return table


def build_component(name: str, options: dict[str, Any], inherited: dict[str, Any]) -> Prior:
    """Build a component from its options and weight; a synthetic one inherits the options that it does not set."""
    # The import is not at the top, since that module imports this one to find the priors.
    from priors import build_prior, prior_class

    prior_options = dict(inherited) if issubclass(prior_class(name), Realistic) else {}
    prior_options.update(options)
    prior_options.pop("weight", None)
    return build_prior(name, **prior_options)
