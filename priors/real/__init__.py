"""Real tables: the interface of their priors, and the preprocessing of data frames, which the estimators share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from priors.mix_scm import MixSCM
from priors.prior import Prior
from priors.table import Table

__all__ = ["OWN", "SYNTHETIC", "RealTables", "hash_of_tables", "priors_by_kind", "real_tables", "setting"]

# Kinds of tables of a prior.
SYNTHETIC = "synthetic"  # computed
OWN = "own"  # drawn from real ones

# What a table or row is drawn for.
TRAINING = "training"
VALIDATION = "validation"
TEST = "test"


class Eligible(NamedTuple):
    """How many real tables are long enough for a draw, of how many."""

    long_enough: int
    tables: int


class RealTables:
    """The interface of a prior of real tables, which inherits from it and from `Prior`."""

    kind_of_clusters = "tables"  # what `clusters` are: tables, families of tables, or rows

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

    def eligible(self, rows: int, numeric: bool) -> Eligible | None:
        """Count the tables that are long enough to draw so many rows; None if their length does not matter."""
        return None

    def fingerprint(self) -> str:
        """Return a hash of the real tables; a run is continued only on the same ones."""
        raise NotImplementedError

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        """Describe the real tables and what is left out.

        Parameters
        ----------
        most : int
            Most names in a line.
        key : str
            The prefix of the prior's options in a run.

        Returns
        -------
        list of str
            Lines for the user.
        """
        return []


class DividedTables(RealTables):
    """Real tables, or rows of one, that are divided by the fields `validation_fraction` and `test_fraction`."""

    side = TRAINING  # what this prior draws for
    shared: tuple[str, ...]  # properties that the priors of all sides have in common
    validation_fraction: float
    test_fraction: float

    def fraction_problems(self, what: str) -> list[str]:
        """List what is wrong with the sum of the two fractions; what: what they divide, tables or rows."""
        if self.validation_fraction + self.test_fraction < 1:
            return []
        return [f"validation_fraction and test_fraction leave no {what} for training; lower one of them"]

    def for_validation(self) -> Any:
        return self.drawing_for(VALIDATION)

    def for_test(self) -> Any:
        return self.drawing_for(TEST)

    def drawing_for(self, side: str) -> Any:
        """Return the prior of a side, which shares with this one what was computed of the files."""
        other: Any = replace(self)  # type: ignore[type-var]
        for name in self.shared:
            # A cached property keeps its value under its own name.
            vars(other)[name] = getattr(self, name)
        other.side = side
        return other


def real_tables(prior: Prior) -> RealTables | None:
    """Return a prior, or the part of a mixture, as real tables; None if all of its tables are synthetic."""
    if isinstance(prior, RealTables):
        return prior
    if not isinstance(prior, MixSCM):
        return None
    real = {}
    for name, component in prior.priors.items():
        tables = real_tables(component)
        if tables is not None:
            real[name] = tables
    return MixedTables(prior, real) if real else None


def hash_of_tables(prior: Prior) -> str | None:
    """Return a hash of the real or stored tables of a prior, without which it would be another one, or None."""
    real = real_tables(prior)
    return prior.fingerprint() if real is None else real.fingerprint()


def setting(prior: Prior, option: str) -> str:
    """Return the key of an option of a prior of real tables in a run; in a mixture, the keys of its components."""
    if not isinstance(prior, MixSCM):
        return f"prior.{option}"
    names = [name for name, component in prior.priors.items() if real_tables(component) is not None]
    return " and ".join(f"prior.components.{name}.{option}" for name in names)


def priors_by_kind(prior: Prior, mixes: Collection[Mapping[str, float]] = ()) -> dict[str, Prior]:
    """Divide a prior by the kinds of its tables, which are scored separately.

    Parameters
    ----------
    prior : Prior
        The prior of a run.
    mixes : collection of mapping
        The shares of the components of a mixture in the stages. In a kind without weights, all components that a stage
        draws from weigh the same.

    Returns
    -------
    dict of str to Prior
        The priors of the SYNTHETIC tables and of the real ones, OWN, if there are such tables.
    """
    if not isinstance(prior, MixSCM):
        return {kind_of_tables(prior): prior}
    names_by_kind: dict[str, list[str]] = {}  # of the components
    for name, component in prior.priors.items():
        names_by_kind.setdefault(kind_of_tables(component), []).append(name)
    drawn_by_stages = {name for mix in mixes for name, share in mix.items() if share}
    mixtures: dict[str, Prior] = {}
    for kind, names in names_by_kind.items():
        has_weights = any(prior.components[name]["weight"] for name in names)
        components = {}
        for name in names:
            weight = prior.components[name]["weight"] if has_weights else float(name in drawn_by_stages)
            if weight:
                components[name] = {**prior.components[name], "weight": weight}
        if components:
            priors = {name: prior.priors[name] for name in components}
            mixtures[kind] = prior.with_priors(priors, components)
    return mixtures


def kind_of_tables(prior: Prior) -> str:
    """Return the kind of the tables of a prior that is no mixture."""
    return SYNTHETIC if real_tables(prior) is None else OWN


@dataclass
class MixedTables(RealTables):
    """The real tables of a mixture; real: those of its components, by name."""

    mixture: MixSCM
    real: dict[str, RealTables]

    @property
    def kind_of_clusters(self) -> str:  # type: ignore[override]
        kinds = {tables.kind_of_clusters for tables in self.real.values()}
        # Some components are synthetic.
        if len(self.real) < len(self.mixture.priors):
            kinds.add(RealTables.kind_of_clusters)
        return " and ".join(sorted(kinds))

    def for_validation(self) -> MixSCM:
        return self.with_real({name: tables.for_validation() for name, tables in self.real.items()})

    def for_test(self) -> MixSCM:
        return self.with_real({name: tables.for_test() for name, tables in self.real.items()})

    def with_real(self, priors: dict[str, Prior]) -> MixSCM:
        return self.mixture.with_priors({**self.mixture.priors, **priors})

    def clusters(self, table: Table) -> list[Hashable] | None:
        if not table.source:
            return None
        name, _ = table.source
        return self.real[name].clusters(table) if name in self.real else None

    def ineligible(self, max_classes: int) -> list[str]:
        problems = []
        for name, tables in self.real.items():
            problems += [f"component {name}: {line}" for line in tables.ineligible(max_classes)]
        return problems

    def eligible(self, rows: int, numeric: bool) -> Eligible | None:
        """Return the counts of the component with the fewest tables that are long enough."""
        counts_of_components = []
        for name, tables in self.real.items():
            is_drawn = self.mixture.components[name]["weight"] != 0
            counts = tables.eligible(rows, numeric) if is_drawn else None
            if counts is not None:
                counts_of_components.append(counts)
        # The comparison begins with `long_enough`.
        return min(counts_of_components, default=None)

    def fingerprint(self) -> str:
        return "".join(tables.fingerprint() for tables in self.real.values())

    def describe(self, most: int = 3, key: str = "prior") -> list[str]:
        lines = []
        for name, tables in self.real.items():
            lines += tables.describe(most, f"{key}.components.{name}")
        return lines
