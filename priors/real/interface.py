"""What a prior of real tables offers beside its draws, and how a mixture passes it on."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from priors.mix_scm import MixSCM
from priors.prior import Prior
from priors.table import Source, Table

__all__ = ["OWN", "SYNTHETIC", "RealTables", "parts", "real_tables"]

SYNTHETIC, OWN = "synthetic", "own"  # what the tables of a prior are: computed, or drawn from real ones


@runtime_checkable
class RealTables(Protocol):
    """What a prior of real tables offers beside its draws; such a prior inherits from it, and from `Prior`.

    It implements `sources`, `for_validation`, `for_test`, `clusters` and `fingerprint`; the others have defaults.

    Attributes
    ----------
    kind_of_clusters : str
        What `clusters` are: tables, families of tables, or rows.
    """

    kind_of_clusters: str = "tables"

    def sources(self) -> dict[Source, int]:
        """Return the tables that training draws, with their numbers of rows.

        Returns
        -------
        dict
            Number of rows by source; 0 for the components of synthetic tables that are mixed with them.
        """
        raise NotImplementedError

    def for_validation(self) -> Prior:
        """Return the prior that validation draws from: of tables or rows that training never draws."""
        raise NotImplementedError

    def for_test(self) -> Prior:
        """Return the prior whose draws tell at the end what a training has gained.

        Returns
        -------
        Prior
            Of tables or rows that neither training nor validation draws.
        """
        raise NotImplementedError

    def clusters(self, table: Table) -> list[Hashable] | None:
        """Return what each query row of a table belongs to, for means and confidence intervals.

        Returns
        -------
        list or None
            For each query row, a real row or table that several draws may share; None if the table is a cluster of
            its own, as every synthetic one is.
        """
        raise NotImplementedError

    def ineligible(self, max_classes: int) -> list[str]:
        """Return why a real table cannot train a network with so many classes (0: that predicts numbers)."""
        return []

    def eligible(self, rows: int, numeric: bool) -> tuple[int, int] | None:
        """Return how many real tables are long enough for a draw, and how many there are.

        Parameters
        ----------
        rows : int
            Rows of the draw.
        numeric : bool
            Whether its target is a number.

        Returns
        -------
        tuple of int, or None
            None if the length of the tables does not matter.
        """
        return None

    def fingerprint(self) -> str:
        """Return a hash of the real tables, with which a run is continued on the same ones only."""
        raise NotImplementedError

    def describe(self, most: int = 3) -> list[str]:
        """Return what the real tables are and what is left out, in lines for the user.

        Parameters
        ----------
        most : int
            Names in each line.
        """
        return []


def real_tables(prior: Prior) -> RealTables | None:
    """Return what a prior, or a mixture, offers of its real tables.

    Parameters
    ----------
    prior : Prior
        Any prior.

    Returns
    -------
    RealTables or None
        None if the prior computes all of its tables.
    """
    if isinstance(prior, MixSCM):
        real = {name: tables for name, component in prior.priors.items() if (tables := real_tables(component))}
        return MixedTables(prior, real) if real else None
    return prior if isinstance(prior, RealTables) else None


def parts(prior: Prior, mixes: Collection[Mapping[str, float]] = ()) -> dict[str, Prior]:
    """Divide a prior into that of the synthetic tables and that of the real ones, which are scored apart.

    Parameters
    ----------
    prior : Prior
        Any prior.
    mixes : collection of mappings
        The shares of stages; if no component of a part has a weight, those that a stage draws from have the same.

    Returns
    -------
    dict
        Priors by SYNTHETIC or OWN.
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

    def describe(self, most: int = 3) -> list[str]:
        return [line for own in self.real.values() for line in own.describe(most)]
