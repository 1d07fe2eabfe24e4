"""The held-out tables of a run, and the losses of a network on them."""

from __future__ import annotations

import statistics
from collections.abc import Hashable

from priors import Prior
from tabicl_train.callbacks.scores import score_classes, score_numbers
from tabicl_train.config.schema import CurriculumConfig, RunConfig, StageConfig, build_prior
from tabicl_train.model.family import Network
from tabicl_train.module import Pretraining
from tabicl_train.stream import StepItem, StepStream

# In place of a run's seed, which is at least 0: no step has these tables, and all runs share them.
VALIDATION, ANSWER = -1, -2

Losses = list[tuple[Hashable, float]]  # of rows or tables, each with the unit that it belongs to


def held_out_streams(config: RunConfig) -> dict[str, StepStream]:
    """The tables of a validation, by the parts of the prior: item k holds those with the k-th number of rows.

    Apart from the validation's own settings they depend on the prior and the number of classes only. A prior of real
    tables draws them from those that it holds out.
    """
    parts, rows = config.curriculum.parts(build_prior(config.prior)), list(config.validation.rows)
    return {part: stream(config, prior.for_validation(), rows, VALIDATION) for part, prior in parts.items()}


def answer_streams(config: RunConfig) -> dict[str, StepStream]:
    """The same for the answer at the end of a run: other tables, and real ones that no validation draws. Without the
    numbers of rows that none of these real tables has."""
    parts = {part: prior.for_answer() for part, prior in config.curriculum.parts(build_prior(config.prior)).items()}
    return {part: stream(config, prior, drawable(config, prior), ANSWER) for part, prior in parts.items()}


def drawable(config: RunConfig, prior: Prior) -> list[int]:
    usable = {rows: prior.usable(rows, config.model.is_regression) for rows in config.validation.rows}
    return [rows for rows, tables in usable.items() if tables is None or tables[0] > 0]


def stream(config: RunConfig, prior: Prior, rows: list[int], seed: int) -> StepStream:
    settings = config.validation
    stages = {
        f"{k}": StageConfig(steps=1, rows=[n, n], features=list(settings.features), tables=settings.tables)
        for k, n in enumerate(rows)
    }
    return StepStream(prior, CurriculumConfig(stages), config.model, seed, range(len(stages)), keeps_units=True)


def score_item(network: Network, module: Pretraining, item: StepItem) -> tuple[dict[str, float], Losses]:
    """Scores by their names in validation.csv, and the losses on which they are based."""
    score = score_numbers if network.config.is_regression else score_classes
    packs = [pack.to(module.device) for pack in item.packs]
    scores, row_losses = score(network, module, packs)
    losses: Losses = []
    tables = enumerate(item.units)
    for pack, of_rows in zip(packs, row_losses, strict=True):
        end = 0
        of_tables, of_rows = network.means(of_rows, pack).tolist(), of_rows.tolist()
        for (rows, labeled, _), of_table in zip(pack.shapes, of_tables, strict=True):
            number, units = next(tables)
            start, end = end, end + rows - labeled
            if units is None:
                losses.append(((item.step, number), of_table))
            else:
                losses += zip(units, of_rows[start:end], strict=True)
    return scores, losses


def unit_losses(losses: Losses) -> dict[Hashable, float]:
    """The mean loss of each unit."""
    by_unit: dict[Hashable, list[float]] = {}
    for unit, loss in losses:
        by_unit.setdefault(unit, []).append(loss)
    return {unit: statistics.fmean(values) for unit, values in by_unit.items()}
