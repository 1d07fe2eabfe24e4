"""Real tables: the interface of their priors, and the preprocessing of data frames, which the estimators share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from priors.mix_scm import MixSCM
from priors.prior import Prior
from priors.table import Source, Table

__all__ = ["OWN", "SYNTHETIC", "RealTables", "hash_of_tables", "parts", "real_tables", "setting"]

SYNTHETIC, OWN = "synthetic", "own"  # kinds of tables of a prior: computed, or drawn from real ones
TRAINING, VALIDATION, TEST = "training", "validation", "test"  # what a table or row is drawn for


class RealTables:
    """The interface of a prior of real tables, which inherits from it and from `Prior`."""

    kind_of_clusters = "tables"  # what `clusters` are: tables, families of tables, or rows

    def sources(self) -> dict[Source, int]:
        """Return the tables that training draws, with their rows; 0 for synthetic components of a mixture."""
        raise NotImplementedError

    def for_validation(self) -> Prior:
        """Return the prior of the tables or rows for validation, which training never draws."""
        raise NotImplementedError

    def for_test(self) -> Prior:
        """Return the prior of the tables or rows for the final test, which training and validation never draw."""
        raise NotImplementedError

    def clusters(self, table: Table) -> list[Hashable] | None:
        """Return the cluster of each query row, for confidence intervals; None if the table is its own cluster."""
        raise NotImplementedError

    def ineligible(self, max_classes: int) -> list[str]:
        """Return why a real table cannot train a network with so many classes (0: that predicts numbers)."""
        return []

    def eligible(self, rows: int, numeric: bool) -> tuple[int, int] | None:
        """Return how many tables are long enough for a draw, and how many; None if their length does not matter."""
        return None

    def fingerprint(self) -> str:
        """Return a hash of the real tables; a run is continued only on the same ones."""
        raise NotImplementedError

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        """Describe the real tables and what is left out, in lines for the user with at most `most` names.

        key: the prefix of the prior's options in a run
        """
        return []


class DividedTables(RealTables):
    """Real tables, or rows of one, that are divided by the fields `validation_fraction` and `test_fraction`."""

    side = TRAINING  # what this prior draws for
    shared: tuple[str, ...]  # properties that the priors of all sides have in common
    validation_fraction: float
    test_fraction: float

    def fraction_problems(self, what: str, may_be_0: bool) -> list[str]:
        fractions = {"validation_fraction": self.validation_fraction, "test_fraction": self.test_fraction}
        allowed = {name: 0 < share < 1 or (may_be_0 and share == 0) for name, share in fractions.items()}
        interval = "[0, 1)" if may_be_0 else "(0, 1)"
        problems = [
            f"{name} is {fractions[name]}; it must lie in {interval}" for name in fractions if not allowed[name]
        ]
        if not problems and sum(fractions.values()) >= 1:
            problems.append(f"validation_fraction and test_fraction leave no {what} for training; lower one of them")
        return problems

    def for_validation(self) -> Any:
        return self.drawing_for(VALIDATION)

    def for_test(self) -> Any:
        return self.drawing_for(TEST)

    def drawing_for(self, side: str) -> Any:
        other: Any = replace(self)  # type: ignore[type-var]
        vars(other).update({name: getattr(self, name) for name in self.shared}, side=side)
        return other


def real_tables(prior: Prior) -> RealTables | None:
    """Return a prior, or the part of a mixture, as real tables; None if all of its tables are synthetic."""
    if isinstance(prior, MixSCM):
        real = {name: tables for name, component in prior.priors.items() if (tables := real_tables(component))}
        return MixedTables(prior, real) if real else None
    return prior if isinstance(prior, RealTables) else None


def hash_of_tables(prior: Prior) -> str | None:
    """Return a hash of the real or stored tables of a prior, without which it would be another one, or None."""
    real = real_tables(prior)
    return prior.fingerprint() if real is None else real.fingerprint()


def setting(prior: Prior, option: str) -> str:
    """Return the key of an option of a prior of real tables in a run; in a mixture, the keys of its components."""
    if not isinstance(prior, MixSCM):
        return f"prior.{option}"
    names = [name for name, component in prior.priors.items() if real_tables(component)]
    return " and ".join(f"prior.components.{name}.{option}" for name in names)


def parts(prior: Prior, mixes: Collection[Mapping[str, float]] = ()) -> dict[str, Prior]:
    """Return the priors of the synthetic tables and of the real ones, which are scored separately.

    mixes: the shares of stages; in a part without weights, all components that a stage draws from weigh the same
    """
    if not isinstance(prior, MixSCM):
        return {SYNTHETIC if real_tables(prior) is None else OWN: prior}
    by_part: dict[str, dict[str, Prior]] = {}
    for name, component in prior.priors.items():
        by_part.setdefault(SYNTHETIC if real_tables(component) is None else OWN, {})[name] = component
    mixtures: dict[str, Prior] = {}
    for part, priors in by_part.items():
        weights = {name: prior.components[name]["weight"] for name in priors}
        if not any(weights.values()):
            weights = {name: float(any(mix.get(name) for mix in mixes)) for name in priors}
        components = {name: {**prior.components[name], "weight": share} for name, share in weights.items() if share}
        if components:
            mixtures[part] = prior.with_priors({name: priors[name] for name in components}, components)
    return mixtures


@dataclass
class MixedTables(RealTables):
    """The real tables of a mixture; real: those of its components, by name."""

    mixture: MixSCM
    real: dict[str, RealTables]

    @property
    def kind_of_clusters(self) -> str:  # type: ignore[override]
        kinds = {tables.kind_of_clusters for tables in self.real.values()}
        synthetic = {RealTables.kind_of_clusters} if len(self.real) < len(self.mixture.priors) else set()
        return " and ".join(sorted(kinds | synthetic))

    def sources(self) -> dict[Source, int]:
        sources: dict[Source, int] = {}
        for name in self.mixture.priors:
            own = self.real[name].sources() if name in self.real else {(name, ""): 0}
            sources |= {(name, path): rows for (_, path), rows in own.items()}
        return sources

    def for_validation(self) -> MixSCM:
        return self.with_real({name: tables.for_validation() for name, tables in self.real.items()})

    def for_test(self) -> MixSCM:
        return self.with_real({name: tables.for_test() for name, tables in self.real.items()})

    def with_real(self, priors: dict[str, Prior]) -> MixSCM:
        return self.mixture.with_priors({**self.mixture.priors, **priors})

    def clusters(self, table: Table) -> list[Hashable] | None:
        return self.real[table.source[0]].clusters(table) if table.source and table.source[0] in self.real else None

    def ineligible(self, max_classes: int) -> list[str]:
        return [f"component {name}: {line}" for name, own in self.real.items() for line in own.ineligible(max_classes)]

    def eligible(self, rows: int, numeric: bool) -> tuple[int, int] | None:
        drawn = [own for name, own in self.real.items() if self.mixture.components[name]["weight"]]
        counts = (own.eligible(rows, numeric) for own in drawn)
        return min((count for count in counts if count is not None), default=None)

    def fingerprint(self) -> str:
        return "".join(own.fingerprint() for own in self.real.values())

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        return [line for name, own in self.real.items() for line in own.describe(most, f"{key}.components.{name}")]
