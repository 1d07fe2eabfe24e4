"""The interface of a prior, and the loop behind it: plan, execute, finish, filter, and count rejected draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from priors.finish import Rejected, finish
from priors.options import option
from priors.random import Seed, as_seed, one_thread, rng_at
from priors.realism import Realism, fill_missing
from priors.table import Largest, PriorError, Table, TableSpec

__all__ = ["Prior", "Realistic"]

MAX_REJECTIONS = 1000  # in a row, before the request counts as impossible


@dataclass
class Prior:
    """A distribution over tables. The fields of a subclass are its options, and the schema of its YAML file.

    A subclass implements `plan` and `execute`, and `accept` if it has filters; `sample` does what all priors share. A
    subclass that prepares its tables in another way (tables) overrides `attempt` instead, and one that gets them from
    elsewhere (mix_scm, hdf5) overrides `sample`. A prior of real tables is also a `priors.real.RealTables`.

    Attributes
    ----------
    numeric_targets : bool
        Whether it also draws tables with a numeric target, which ``spec.max_classes = 0`` asks for.
    classes : bool
        Whether it draws tables with classes.
    raw : bool
        Whether its columns and targets become tables unchanged, in their order and on their scale.
    stored_sizes : array or None
        Int64 (T, 3), if tables are stored with sizes of their own: rows, labeled rows and features of each. Those of a
        stage must lie in its ranges, and neither mixtures nor validation can ask for others.
    stored_classes : int
        No label of the stored tables is this or more; 0 if it has none, or does not know.
    """

    numeric_targets: ClassVar[bool] = False
    classes: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    stored_sizes: ClassVar[np.ndarray | None] = None
    stored_classes: ClassVar[int] = 0

    def problems(self) -> list[str]:
        """List what is wrong with the options beyond what they declare: contradictions, and files that are missing."""
        return []

    def plan(self, spec: TableSpec, seed: tuple[int, ...]) -> Any:
        """Make all decisions about a table.

        Parameters
        ----------
        spec : TableSpec
            What is asked for.
        seed : tuple of int
            The table's address and the number of the attempt; the plan is a pure function of them.

        Returns
        -------
        Any
            A small description from which `execute` computes the table; its text is shown to users.

        Raises
        ------
        Rejected
            With a one-word reason, if the decisions lead to no table.
        """
        raise NotImplementedError

    def execute(self, plan: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Compute a plan.

        Returns
        -------
        columns : torch.Tensor
            Raw columns, float32 (num_rows, num_features).
        target : torch.Tensor
            Labels, int64 (num_rows,), or, if ``spec.max_classes`` was 0, raw numbers, float32 (num_rows,).
        num_classes : int
            Number of classes; 0 if the target is numeric.

        Raises
        ------
        Rejected
            With a one-word reason, if the plan leads to no table.
        """
        raise NotImplementedError

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        """Raise Rejected for a finished table that does not pass the prior's filters."""

    def stored_tables(self, first: int, count: int) -> int:
        """Return how many tables of a stage there are, from its first one on; all of them if they are not stored.

        Parameters
        ----------
        first : int
            The number of its first table in a run, counted from 0 over all steps.
        count : int
            How many tables it has.
        """
        return count

    def sizes_of_stage(self, first: int, count: int) -> np.ndarray | None:
        """Return the stored sizes of the tables of a stage; see `stored_tables` and `stored_sizes`."""
        return self.stored_sizes

    def stored_spec(self, number: int, first: int, wanted: TableSpec) -> TableSpec:
        """Return what is asked for instead, by a prior of stored tables, which have sizes of their own.

        Parameters
        ----------
        number : int
            The number of the table in a run, counted from 0 over all its steps.
        first : int
            The number of the first table of its stage.
        wanted : TableSpec
            What the curriculum asks for.
        """
        return wanted

    def pass_lines(self, stages: Mapping[str, tuple[int, int]]) -> list[str]:
        """Return what the plan of a run says about passes of its stored tables.

        Parameters
        ----------
        stages : mapping
            The steps of each stage in this run, and the tables of a step, by the name of the stage.
        """
        return []

    def largest(self, rows: int, numeric: bool) -> Largest:
        """Return the largest sizes of the tables that can be drawn, which limit the trained range of a network.

        Parameters
        ----------
        rows : int
            The fewest rows that a table is asked to have.
        numeric : bool
            Whether the target is a number.
        """
        return Largest(classes=None if numeric else self.stored_classes or None)

    def fingerprint(self) -> str | None:
        """Return a hash of the files behind the prior; a run is continued only on the same ones."""
        return None

    def mixed(self, mix: Mapping[str, float]) -> Prior:
        """Return the prior as a stage with these shares of its components draws from it; {} for its own shares."""
        if mix:
            raise PriorError("only mixtures have shares (prior=mix_scm)")
        return self

    def import_loops(self) -> None:
        """Import the compiled loops that draw tables, before workers are forked, so that these share them."""

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        """Draw a table with its plan, or raise Rejected; seed: the table's address and the number of the attempt."""
        plan = self.plan(spec, seed)
        columns, target, num_classes = self.execute(plan)
        table = self.finished(columns, target, num_classes, spec, seed)
        self.accept(table, seed)
        table.plan = plan
        return table

    def finished(
        self, columns: torch.Tensor, target: torch.Tensor, num_classes: int, spec: TableSpec, seed: tuple[int, ...]
    ) -> Table:
        """Make a table of what `execute` returns, or raise Rejected."""
        spec.check_sizes(columns, target, spec.train_size, self)
        if self.raw:
            return Table(columns, target, spec.train_size, num_classes)
        return finish(columns, target, num_classes, spec.train_size, rng_at(seed, "finish"))

    @one_thread()
    def sample(self, spec: TableSpec, seed: Seed) -> Table:
        """Draw the table at an address: a pure function of the options, spec and seed.

        Parameters
        ----------
        spec : TableSpec
            What is asked for.
        seed : int or tuple of int
            The address; 7 and (7,) are the same.

        Raises
        ------
        PriorError
            If the spec is impossible, and after 1,000 rejected draws in a row.
        """
        spec.check()
        if spec.max_classes == 0 and not self.numeric_targets:
            raise PriorError("this prior draws classes only, but max_classes is 0, which asks for a numeric target")
        if spec.max_classes and not self.classes:
            raise PriorError(f"this prior draws numeric targets only, but max_classes is {spec.max_classes}, not 0")
        address = as_seed(seed)
        rejections: Counter[str] = Counter()
        for attempt in range(MAX_REJECTIONS):
            try:
                table = self.attempt(spec, (*address, attempt))
            except Rejected as rejected:
                rejections[rejected.reason] += 1
                continue
            table.rejections = rejections
            return table
        by_frequency = rejections.most_common()
        reasons = ", ".join(f"{reason} {count}x" for reason, count in by_frequency)
        advice = advice_on(by_frequency[0][0], spec)
        raise PriorError(f"{MAX_REJECTIONS} draws in a row were rejected for {spec} ({reasons}); {advice}")


@dataclass
class Realistic(Prior):
    """A prior of synthetic tables, which may be made more like real ones."""

    realism: Realism = option(Realism, kw_only=True)
    """What tables may have in common with real ones."""
    min_skill: float = option(0.0, at_least=0, below=1, kw_only=True)
    """Least skill of extremely randomized trees out of bag; tables from which they learn less are drawn again. With
    classes, the skill is 2 ROC AUC - 1, and with a numeric target R2; 0 keeps all tables. The trees learn from at most
    1,024 rows."""

    def import_loops(self) -> None:
        """Import the loops of all such priors; see `Prior.import_loops`."""
        import priors.floats

        if self.min_skill:
            import priors.predictability  # noqa: F401

    def attempt(self, spec: TableSpec, seed: tuple[int, ...]) -> Table:
        """Draw a table as `Prior.attempt` does, with the missing cells of `realism`."""
        plan = self.plan(spec, seed)
        columns, target, num_classes = self.execute(plan)
        table = self.finished(columns, target, num_classes, spec, seed)
        table.plan = plan
        strength = self.realism.draw_strength(seed)
        if strength is None:
            self.accept(table, seed)
            return table
        # Filters see a table without NaN, the same one whether missing cells stay missing or not.
        missing, text = fill_missing(table, strength, seed)
        self.accept(table, seed)
        if spec.keeps_missing:
            table.X[torch.from_numpy(missing)] = torch.nan
        table.plan = f"{plan}\nrealism: {text}"
        return table

    def accept(self, table: Table, seed: tuple[int, ...]) -> None:
        """Raise Rejected("skill") for a table with less than min_skill."""
        if self.min_skill:
            # Numba takes a second to import.
            from priors.predictability import check_skill, trees_of

            check_skill(trees_of(table, rng_at(seed, "skill")), self.min_skill)


def advice_on(reason: str, spec: TableSpec) -> str:
    """Suggest a setting to change if draws are rejected for this reason."""
    match reason:
        case "split":
            return (
                f"num_rows or train_size is too small for up to {spec.max_classes} classes: raise num_rows, move the "
                "labeled share toward one half, or lower max_classes"
            )
        case "unpredictable":
            return "the filter of unpredictable tables rejects all of them: raise num_rows or switch the filter off"
        case "skill":
            return "nothing learns as much as min_skill asks for: raise num_rows, or lower min_skill"
        case "classes":
            return "nearly all rows of each real table belong to one class: raise num_rows"
        case "target":
            return "the numeric target is constant or not finite: raise num_rows, or use the prior's default options"
    return "raise num_rows or num_features, or use the prior's default options"
