"""What is wrong with a run's prior: whether it can draw the tables that the run asks for."""

from __future__ import annotations

from priors import Prior
from priors.disk import Disk
from tabicl_train.config.monitoring import ValidationConfig
from tabicl_train.config.stages import CurriculumConfig


def prior_problems(
    name: str, prior: Prior, curriculum: CurriculumConfig, validation: ValidationConfig, is_regression: bool
) -> list[str]:
    """What is wrong wherever the run starts."""
    problems = []
    if is_regression and not prior.numeric_targets:
        problems.append(f"prior={name} draws classes only, but model.max_classes=0 is regression")
    for stage, settings in curriculum.stages.items():
        for key in ("rows", "small_rows") if settings.small_share > 0 else ("rows",):
            rows = max(getattr(settings, key), default=0)
            problems += too_long(f"curriculum.stages.{stage}.{key}", rows, prior, is_regression)
    if validation.every and validation.rows:
        if isinstance(prior, Disk):
            problems.append("validation.rows must be [] with prior=disk, which only has the tables of steps")
        rows, held_out = max(validation.rows), prior.for_validation()
        problems += too_long("validation.rows", rows, held_out, is_regression, ", which are those held out,")
    return problems


def too_long(key: str, rows: int, prior: Prior, is_regression: bool, which: str = "") -> list[str]:
    """The problem with a number of rows that no real table of the prior has."""
    usable = prior.usable(rows, is_regression)
    if usable is None or usable[0] > 0:
        return []
    return [f"{key} has tables of {rows} rows, but none of the {usable[1]} real tables{which} is long enough"]


def missing_steps(prior: Prior, seed: int, curriculum: CurriculumConfig, total_steps: int) -> list[str]:
    """Which tables of a run are not stored, if its prior serves stored ones."""
    if not isinstance(prior, Disk):
        return []
    tables = [stage.tables for stage in curriculum.stages.values() for _ in range(stage.steps)]
    return [f"prior.{line}" for line in prior.missing_steps(seed, tables[:total_steps])]


def usable_tables(prior: Prior, curriculum: CurriculumConfig, is_regression: bool) -> list[str]:
    """For each stage, how many of the real tables are long enough, in a line; [] of other priors."""
    lines = []
    for name, stage in curriculum.stages.items():
        few, many = (prior.usable(rows, is_regression) for rows in stage.rows)
        if few and many:
            low, high = stage.rows
            lines.append(f"stage {name}: {few[0]} of {few[1]} tables have {low:,} rows, and {many[0]} have {high:,}")
    return lines
