"""mix_scm: tables of several priors in given proportions, by default those of TabICL v1 (arXiv 2502.05564)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from priors.prior import Prior
from priors.random import Seed, as_seed, rng_at
from priors.table import PriorError, Table, TableSpec


@dataclass
class MixSCM(Prior):
    """A mixture of priors. The tables of a group come from the same component."""

    components: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"mlp_scm": {"weight": 0.7}, "tree_scm": {"weight": 0.3}}
    )
    """The priors by name, each with a weight (0 or more; shares are proportional to it) and with options of that prior:
    {graph_scm: {weight: 2, preset: released}, ...}; the default is TabICL's (arXiv 2502.05564, appendix)."""

    def problems(self) -> list[str]:
        problems, total = [], 0.0
        for name, options in self.components.items():
            if name == "mix_scm":
                problems.append("components.mix_scm: a mixture cannot be part of a mixture")
                continue
            if not isinstance(options, dict):
                problems.append(f"components.{name} is {options!r}; it must hold a weight and options of {name}")
                continue
            weight: Any = options.get("weight")
            if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
                problems.append(f"components.{name}.weight is {weight}; it must be a number, 0 or more")
            else:
                total += weight
            try:
                build_component(name, options)
            except PriorError as error:
                problems.append(f"components.{name}: {error}")
        if not problems and total == 0:
            problems.append("components: at least one needs a positive weight")
        return problems

    @cached_property
    def priors(self) -> dict[str, Prior]:
        """The components, sorted by name, so that no draw depends on the order in which they are configured."""
        return {name: build_component(name, self.components[name]) for name in sorted(self.components)}

    @property
    def numeric_targets(self) -> bool:  # type: ignore[override]
        return all(prior.numeric_targets for prior in self.priors.values())

    def for_validation(self) -> MixSCM:
        other = replace(self)
        other.priors = {name: prior.for_validation() for name, prior in self.priors.items()}
        return other

    def unfit(self, max_classes: int) -> list[str]:
        return [f"component {name}: {line}" for name, prior in self.priors.items() for line in prior.unfit(max_classes)]

    def parts(self) -> dict[str, Prior]:
        """Mixtures of the components that a run of these weights draws from."""
        by_part: dict[str, dict[str, Prior]] = {}
        for name, prior in self.priors.items():
            if self.components[name]["weight"]:
                for part in prior.parts():
                    by_part.setdefault(part, {})[name] = prior
        mixtures: dict[str, Prior] = {}
        for part, priors in by_part.items():
            mixture = replace(self, components={name: self.components[name] for name in priors})
            mixture.priors = priors
            mixtures[part] = mixture
        return mixtures

    def usable(self, rows: int, numeric: bool) -> tuple[int, int] | None:
        counts = (prior.usable(rows, numeric) for name, prior in self.priors.items() if self.components[name]["weight"])
        return min((count for count in counts if count is not None), default=None)

    def fingerprint(self) -> str | None:
        return "".join(prior.fingerprint() or "" for prior in self.priors.values()) or None

    def about(self, most: int = 3) -> list[str]:
        return [line for prior in self.priors.values() for line in prior.about(most)]

    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        address = as_seed(seed if spec.group_seed is None else spec.group_seed)
        weights = np.cumsum([self.components[name]["weight"] for name in self.priors])
        draw = rng_at(address, "component").random() * weights[-1]
        name, prior = list(self.priors.items())[np.searchsorted(weights, draw, side="right")]
        try:
            return prior.sample(spec, seed)
        except PriorError as error:
            raise PriorError(f"component {name}: {error}") from None


def build_component(name: str, options: dict[str, Any]) -> Prior:
    """The prior of a component; options: its own and the weight."""
    from priors import build_prior  # not at the top: build_prior imports this module to find the priors

    return build_prior(name, **{option: value for option, value in options.items() if option != "weight"})
