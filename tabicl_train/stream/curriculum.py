"""What an optimizer step consists of: its stage, its tables, and which rank computes them.

Everything here is a pure function of the configuration, the run's seed and the step. So a step is the same for any
number of workers, ranks or machines, and a single integer is enough to resume a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from priors import Prior, TableSpec
from priors.random import rng_at
from tabicl_train.config.schema import CurriculumConfig, StageConfig
from tabicl_train.model.config import family_of
from tabicl_train.model.family import NetworkConfig

# The cost of the slowest rank that is allowed, over the lower bound; a finer division loses more in small packs.
IMBALANCE = 1.05
# The most features of tables with more than so many rows, as in tabicl 2.2.0 (prior/_dataset.py).
FEATURE_CAPS = ((65_000, 10), (60_000, 15), (50_000, 20), (40_000, 30), (30_000, 40), (20_000, 60), (10_240, 80))


@dataclass(frozen=True)
class Group:
    """Tables of a step with the same rows, split and number of features.

    Parameters
    ----------
    spec : TableSpec
        What each table is; its group_seed is the address of the group.
    tables : tuple of int
        The numbers of the tables; table i of the step has the address (seed, step, i).
    table_cost : float
        The cost of a table when ranks are balanced, see `cost_of`.
    table_tokens : int
        The tokens of a table in the budget of a pack.
    """

    spec: TableSpec
    tables: tuple[int, ...]
    table_cost: float
    table_tokens: int

    @property
    def cost(self) -> float:
        """The cost of all its tables."""
        return len(self.tables) * self.table_cost


@dataclass(frozen=True)
class StepPlan:
    """An optimizer step: its stage, and the groups of tables of all ranks.

    Parameters
    ----------
    step : int
        The number of the step, counted from 0.
    stage : str
        The name of its stage.
    tables : int
        The number of tables on all ranks.
    groups : tuple of Group
        The tables.
    pack_tokens : int
        The token budget of a pack.
    """

    step: int
    stage: str
    tables: int
    groups: tuple[Group, ...]
    pack_tokens: int

    def packs(self, rank: int, ranks: int) -> list[list[Group]]:
        """Divide the tables of one rank into passes through the model, shorter tables first.

        Parameters
        ----------
        rank, ranks : int
            The rank, and the number of ranks.

        Returns
        -------
        list of list of Group
            The tables of each pack.

        Raises
        ------
        ValueError
            If the rank has no tables, since there are fewer tables than ranks.
        """

        def order(group: Group) -> tuple[int, int, int, tuple[int, ...]]:
            return group.spec.num_rows, group.spec.train_size, group.spec.num_features, group.tables

        # The tables in order, as groups of one table each.
        tables = []
        for group in sorted(self.assign(ranks)[rank], key=order):
            tables += [replace(group, tables=(index,)) for index in group.tables]
        if not tables:
            raise ValueError(f"rank {rank} of {ranks} has no table in step {self.step}, which has {self.tables} tables")

        # As few packs as the budget allows, with about the same number of tokens: lower the budget as far as (within
        # 2 %) no further pack is needed.
        fewest = len(cut_into_packs(tables, self.pack_tokens))
        budget = min(sum(table.table_tokens for table in tables) / fewest, self.pack_tokens)
        packs = cut_into_packs(tables, budget)
        while len(packs) > fewest:
            budget = min(1.02 * budget, self.pack_tokens)
            packs = cut_into_packs(tables, budget)
        return [join(pack) for pack in packs]

    def assign(self, ranks: int) -> list[list[Group]]:
        """Divide the groups among the ranks: largest first, each to the rank with the lowest cost so far.

        The largest group is halved as long as

        - a rank would be idle, or
        - the slowest rank would be more than 5 % above the lower bound: the mean over ranks, or the largest table,

        and a group has more than one table.

        Parameters
        ----------
        ranks : int
            The number of ranks.

        Returns
        -------
        list of list of Group
            The groups of each rank.
        """
        groups = list(self.groups)
        mean_cost = sum(group.cost for group in groups) / ranks
        bound = max(mean_cost, max(group.table_cost for group in groups))
        while True:
            # Assign them.
            shares: list[list[Group]] = [[] for _ in range(ranks)]
            loads = [0.0] * ranks
            for group in sorted(groups, key=lambda group: (-group.cost, group.tables)):
                rank = loads.index(min(loads))
                loads[rank] += group.cost
                shares[rank].append(group)
            # Stop once they are balanced, or cannot be divided further.
            is_balanced = all(shares) and max(loads) <= IMBALANCE * bound
            divisible = [group for group in groups if len(group.tables) > 1]
            if is_balanced or not divisible:
                return shares
            # Halve the largest group.
            largest = max(divisible, key=lambda group: (group.cost, group.tables))
            half = len(largest.tables) // 2
            groups.remove(largest)
            groups.append(replace(largest, tables=largest.tables[:half]))
            groups.append(replace(largest, tables=largest.tables[half:]))


def cut_into_packs(tables: list[Group], budget: float) -> list[list[Group]]:
    """Cut a list of groups of one table each wherever the next table would exceed the budget of tokens."""
    packs: list[list[Group]] = []
    room = -1.0
    for table in tables:
        if table.table_tokens > room:
            packs.append([])
            room = budget
        packs[-1].append(table)
        room -= table.table_tokens
    return packs


def join(tables: list[Group]) -> list[Group]:
    """Join neighboring groups of one table each that have the same specification."""
    groups = []
    for _, same_spec in groupby(tables, lambda table: table.spec):
        members = list(same_spec)
        indices = [index for table in members for index in table.tables]
        groups.append(replace(members[0], tables=tuple(indices)))
    return groups


def stage_at(curriculum: CurriculumConfig, step: int) -> tuple[str, StageConfig, int]:
    """Return name and settings of the stage of a step, and the step's number within it; IndexError after the last."""
    for name, stage in curriculum.stages.items():
        if step < stage.steps:
            return name, stage, step
        step -= stage.steps
    raise IndexError("the step lies after the last stage")


def last_of_stage(curriculum: CurriculumConfig, step: int) -> str | None:
    """Return the name of the stage that ends with a step, counted from 0, or None."""
    name, stage, stage_step = stage_at(curriculum, step)
    return name if stage_step == stage.steps - 1 else None


def plan_step(
    curriculum: CurriculumConfig, model: NetworkConfig, seed: int, step: int, prior: Prior | None = None
) -> StepPlan:
    """Plan the tables of a step.

    Parameters
    ----------
    curriculum : CurriculumConfig
        The stages.
    model : NetworkConfig
        The settings of the network.
    seed : int
        The seed of the run.
    step : int
        The step, counted from 0.
    prior : Prior, optional
        The prior. If it has stored tables, they keep their sizes.

    Returns
    -------
    StepPlan
        The groups of tables of all ranks.
    """
    name, stage, stage_step = stage_at(curriculum, step)
    rng = rng_at(seed, step, "step plan")
    family = family_of(model)
    before = curriculum.tables_before(step)
    first_of_stage = before - stage_step * stage.tables
    groups = []
    for first in range(0, stage.tables, stage.group_size):
        # What all tables of the group are, unless they are stored with other sizes.
        wanted = replace(
            draw_spec(stage, model.max_classes, rng),
            group_seed=(seed, step, first),
            keeps_missing=model.missing_values,
        )
        by_spec: dict[TableSpec, list[int]] = defaultdict(list)
        for table in range(first, min(first + stage.group_size, stage.tables)):
            spec = wanted if prior is None else prior.stored_spec(before + table, first_of_stage, wanted)
            by_spec[spec].append(table)
        # What they cost.
        for spec, tables in by_spec.items():
            cost = cost_of(spec, model, curriculum.rank_costs)
            tokens = family.pack_tokens(model, spec.num_rows, spec.num_features)
            groups.append(Group(spec, tuple(tables), cost, tokens))
    return StepPlan(step, name, stage.tables, tuple(groups), stage.pack_tokens)


def cost_of(spec: TableSpec, model: NetworkConfig, rank_costs: list[float]) -> float:
    """Return the cost of a table when ranks are balanced.

    With costs a, b and c, N rows, n of them labeled, and M features, it is ``N (a M + b + c n)``. Without them it is
    the FLOPs of the forward pass, or the tokens if the network has no formula for FLOPs.

    Parameters
    ----------
    spec : TableSpec
        The table.
    model : NetworkConfig
        The settings of the network.
    rank_costs : list of float
        The costs a of a cell, b of a row, and c of a pair of a row and a labeled row; or [].
    """
    if rank_costs:
        cell_cost, row_cost, pair_cost = rank_costs
        return spec.num_rows * (cell_cost * spec.num_features + row_cost + pair_cost * spec.train_size)
    family = family_of(model)
    flops = family.forward_flops(model, spec.num_rows, spec.train_size, spec.num_features)
    return family.pack_tokens(model, spec.num_rows, spec.num_features) if math.isnan(flops) else flops


def cap_features(rows: int, features: int) -> int:
    """Limit the number of features of a table by `FEATURE_CAPS` for its rows."""
    caps = [cap for more_than, cap in FEATURE_CAPS if rows > more_than]
    return min([features, *caps])


def largest_tables(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> dict[str, dict[str, int]]:
    """Return limits of the sizes of tables within the ranges of their stages.

    Real tables may be shorter or narrower than asked for, or have fewer classes, and long tables have fewer features.

    Returns
    -------
    dict
        By stage, the largest number of rows, features and classes, as far as they are limited.
    """
    largest: dict[str, dict[str, int]] = {}
    for name, stage in curriculum.stages.items():
        fewest_rows, _ = stage.rows
        prior_limits = prior.mixed(stage.mix).largest(fewest_rows, is_regression)._asdict()
        # A plug-in may return NumPy integers, and a checkpoint with them could not be loaded.
        limits = {size: int(most) for size, most in prior_limits.items() if most is not None}
        most_asked_for = cap_features(fewest_rows, stage.features[1])
        if prior.stored_sizes is None and most_asked_for < stage.features[1]:
            limits["features"] = min(most_asked_for, limits.get("features", most_asked_for))
        if limits:
            largest[name] = limits
    return largest


def draw_spec(stage: StageConfig, max_classes: int, rng: np.random.Generator) -> TableSpec:
    """Draw the rows, split and features of one group.

    Parameters
    ----------
    stage : StageConfig
        The ranges to draw from.
    max_classes : int
        The most classes of a table; 0 for regression.
    rng : numpy.random.Generator
        The generator, which is advanced.
    """
    # Version 0.2.0 drew a choice here. Without this call, all later draws would change.
    rng.random()
    # Rows, uniform in themselves or in their logarithm.
    low, high = stage.rows
    if stage.row_distribution == "log_uniform":
        rows = math.floor(math.exp(rng.uniform(math.log(low), math.log(high + 1))))
    else:
        rows = int(rng.integers(low, high + 1))
    rows = min(max(rows, low), high)
    # Features, fewer for long tables, and the split, with at least two rows on each side.
    features = int(rng.integers(stage.features[0], stage.features[1] + 1))
    features = cap_features(rows, features)
    train_size = min(max(round(rows * rng.uniform(stage.train_share[0], stage.train_share[1])), 2), rows - 2)
    # A class needs a labeled and a query row, so the smaller side of the split limits the number of classes.
    classes = min(max_classes, train_size, rows - train_size)
    return TableSpec(rows, train_size, features, classes, mix=tuple(sorted(stage.mix.items())))
