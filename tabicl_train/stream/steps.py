"""The stream of optimizer steps: one item is everything that a rank computes in one step.

The items depend on (seed, step) only, so they are the same whether this process draws them or a worker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import torch

from priors import Prior, Table, TableSpec
from priors.real import real_tables
from tabicl_train.config.schema import CurriculumConfig
from tabicl_train.model.config import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.model.padding import Size
from tabicl_train.stream.curriculum import plan_step, stage_at

PLANNED = 16  # the first steps of a stage that decide the size of a typical pack


@dataclass
class StepItem:
    """One rank's share of one optimizer step.

    Parameters
    ----------
    step : int
        The step, counted from 0.
    stage : str
        The name of its stage.
    tables : int
        The number of tables of the step on all ranks, over which the loss is averaged.
    packs : list of Pack
        The tables of this rank.
    rejections : Counter
        Draws of the prior that were rejected, by reason.
    clusters : list
        The clusters of the query rows of each table, or None for a table without; [] unless `keeps_clusters`.
    """

    step: int
    stage: str
    tables: int
    packs: list[Pack]
    rejections: Counter[str] = field(default_factory=Counter)
    clusters: list[list[Hashable] | None] = field(default_factory=list)

    def to(self, device: torch.device) -> StepItem:
        """Return the same item with its tables on a device."""
        return replace(self, packs=[pack.to(device) for pack in self.packs])


@dataclass
class StepStream:
    """The items of one rank, which depend on nothing but these parameters.

    Parameters
    ----------
    prior : Prior
        What draws the tables.
    curriculum : CurriculumConfig
        The stages.
    model : NetworkConfig
        The settings of the network.
    seed : int
        The seed of the run.
    steps : range
        The steps to draw.
    rank, ranks : int
        The rank, and the number of ranks.
    keeps_clusters : bool
        Whether items hold the clusters of rows, see `RealTables.clusters`.
    prepares : bool
        Whether packs get a layout, for training on a GPU.
    pads : bool
        Whether the pack of a step that has only one is padded to one of a few sizes, for CUDA graphs.
    typical_sizes : dict
        The size of a typical pack by stage; filled in when it is needed.
    """

    prior: Prior
    curriculum: CurriculumConfig
    model: NetworkConfig
    seed: int
    steps: range
    rank: int = 0
    ranks: int = 1
    keeps_clusters: bool = False
    prepares: bool = False
    pads: bool = False
    typical_sizes: dict[str, Size | None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[StepItem]:
        """Draw the items of all steps in this process."""
        return map(self.draw, self.steps)

    def draw(self, step: int, before_table: Callable[[int], None] = lambda index: None) -> StepItem:
        """Draw the item of a step.

        Parameters
        ----------
        step : int
            The step, counted from 0.
        before_table : callable
            Called with the number of each table before it is drawn; it may raise an exception to stop.
        """
        plan = plan_step(self.curriculum, self.model, self.seed, step, self.prior)
        item = StepItem(step, plan.stage, plan.tables, [])
        for groups in plan.packs(self.rank, self.ranks):
            tables = []
            for group in groups:
                for index in group.tables:
                    before_table(index)
                    table = draw_table(self.prior, group.spec, self.seed, step, index, self.model.max_classes)
                    tables.append(table)
                    item.rejections.update(table.rejections)
            # Equal shapes together: tables with constant columns have fewer features than planned.
            tables.sort(key=lambda table: (len(table.y), table.train_size, table.X.shape[1]))
            item.packs.append(self.laid_out(pack(tables), step))
            if self.keeps_clusters:
                real = real_tables(self.prior)
                item.clusters += [None if real is None else real.clusters(table) for table in tables]
        return item

    def laid_out(self, pack: Pack, step: int) -> Pack:
        """Return a pack with a layout if training needs one, and padded if it has all tables of a step."""
        family = family_of(self.model)
        stage, settings, _ = stage_at(self.curriculum, step)
        # Pad it, unless its tables are too large.
        if self.pads and len(pack) == settings.tables:
            if stage not in self.typical_sizes:
                self.typical_sizes[stage] = typical_size_of_stage(
                    self.curriculum, self.model, self.seed, step, self.prior
                )
            typical = self.typical_sizes[stage]
            padded = None if typical is None else family.padded(self.model, pack, typical)
            if padded is not None:
                return padded
        if self.prepares:
            pack.layout = family.prepared(self.model, pack)
        return pack


def typical_size_of_stage(
    curriculum: CurriculumConfig, model: NetworkConfig, seed: int, step: int, prior: Prior | None = None
) -> Size | None:
    """Return the size of a typical pack in the stage of a step, from the plans of its first steps; see padding.py."""
    _, stage, stage_step = stage_at(curriculum, step)
    packs = []
    for number in range(min(PLANNED, stage.steps)):
        plan = plan_step(curriculum, model, seed, step - stage_step + number, prior)
        specs = [group.spec for group in plan.groups for _ in group.tables]
        packs.append([(spec.num_rows, spec.train_size, spec.num_features) for spec in specs])
    return family_of(model).typical_size(model, packs, stage.rows[1], stage.features[1])


def draw_table(prior: Prior, spec: TableSpec, seed: int, step: int, index: int, max_classes: int = 0) -> Table:
    """Draw the table at an address (seed, step, index).

    Parameters
    ----------
    prior : Prior
        What draws the table.
    spec : TableSpec
        What to draw.
    seed, step, index : int
        The address; an error of the prior gets a note with it.
    max_classes : int
        If positive, labels are checked. On a GPU, a wrong label would end the process with an assertion of the device,
        which names no table.

    Returns
    -------
    Table
        The table.
    """
    try:
        table = prior.sample(spec, (seed, step, index))
        # A table from a file may have fewer rows.
        if table.source is None or not table.source[1]:
            spec.check_sizes(table.X, table.y, table.train_size, prior)
        low, high = table.y.min().item(), table.y.max().item()
        if max_classes and not 0 <= low <= high < max_classes:
            raise ValueError(f"labels are in {low}..{high}; they must be in 0..{max_classes - 1}")
        return table
    except Exception as error:
        error.add_note(f"while drawing table {index} of step {step}, seed {seed}: {spec}")
        raise


def pack(tables: list[Table]) -> Pack:
    return Pack.of((table.X, table.y, table.train_size) for table in tables)
