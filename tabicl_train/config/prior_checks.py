"""Checks of a run that need its prior, and the files and real tables behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabicl_train.config.build import build_prior, last_prior
from tabicl_train.config.finite import not_finite
from tabicl_train.config.score_names import REAL

if TYPE_CHECKING:
    import numpy as np

    from priors import Prior
    from tabicl_train.config.schema import CurriculumConfig, RunConfig


def long_enough(name: str, rows: int, prior: Prior, is_regression: bool) -> list[str]:
    """List the problem with a number of rows that none of a prior's real tables has."""
    from priors.real import real_tables, setting

    real = real_tables(prior)
    eligible = None if real is None else real.eligible(rows, is_regression)
    if eligible is None or eligible.long_enough > 0:
        return []
    if eligible.tables == 0:  # in validation only: a prior without training tables is reported elsewhere
        advice = f"raise {setting(prior, 'validation_fraction')}, or choose {name}=[] and validation.best=real"
        return [f"{name} asks for real tables, but none is for validation; {advice}"]
    tables = f"none of the {eligible.tables} real tables for it"
    return [f"{name} has tables of {rows} rows; {tables} is that long; lower it"]


def prior_problems(config: RunConfig) -> list[str]:
    """List problems of the prior, which is built here for the whole process, and settings that contradict it."""
    from priors import PriorError
    from priors.real import real_tables

    last_prior.cache_clear()  # the files behind it may have changed
    try:
        prior = build_prior(config.prior)
    except PriorError as error:
        return [str(error) if str(error).startswith("prior ") else f"prior: {error}"]
    name = config.prior["name"]
    is_regression = config.model.is_regression
    problems = not_finite(prior, "prior.")
    problems += stored_in_validation(config, prior)
    if is_regression and not prior.numeric_targets:
        problems.append(f"prior={name} draws classes only, but model.max_classes=0 is regression")
    if not is_regression and not prior.classes:
        problems.append(f"prior={name} draws numbers only, which needs model.max_classes=0")
    real = real_tables(prior)
    if real is not None:
        problems += [f"prior {name}: {line}" for line in real.ineligible(config.model.max_classes)]
    problems += [f"curriculum.{line}" for line in missing_from_prior(config.curriculum, prior, is_regression)]
    if prior.stored_sizes is not None:
        problems += [f"curriculum.{line}" for line in other_sizes(config.curriculum, prior.stored_sizes)]
        if 0 < config.model.max_classes < prior.stored_classes:
            most = f"the stored tables of prior={name} have up to {prior.stored_classes} classes"
            problems.append(f"model.max_classes is {config.model.max_classes}, but {most}")
    if draws_validation_tables(config):
        problems += missing_from_validation(config, prior)
    return problems


def draws_validation_tables(config: RunConfig) -> bool:
    """Whether the prior draws tables for validation; public real tables need no prior."""
    return config.validation.every > 0 and bool(config.validation.rows)


def stored_in_validation(config: RunConfig, prior: Prior) -> list[str]:
    """List the problem with validation tables of a prior=disk, alone or in a mixture, or one with stored sizes."""
    from priors.mix_scm import MixSCM

    name = config.prior["name"]
    for part in config.curriculum.parts(prior).values():
        if isinstance(part, MixSCM) and "disk" in part.priors:
            name = "disk"
    is_stored = name == "disk" or prior.stored_sizes is not None
    if not is_stored or not draws_validation_tables(config):
        return []
    return [f"validation.rows must be [] with prior={name}, which only has the tables of steps"]


def other_sizes(curriculum: CurriculumConfig, stored_sizes: np.ndarray) -> list[str]:
    """List the stages whose sizes are not those of the stored tables, which are the ones that tables have."""
    # The stages decide the trained range in exports, the estimate of memory and the plan that is printed.
    # stored_sizes: see Prior
    rows, labeled, features = stored_sizes.T
    shares = labeled / rows
    stored: dict[str, list] = {
        "rows": [int(rows.min()), int(rows.max())],
        "features": [int(features.min()), int(features.max())],
        "train_share": [max(0.001, round(float(shares.min()), 3)), min(0.999, round(float(shares.max()), 3))],
    }
    problems = []
    for name, stage in curriculum.stages.items():
        wrong = []
        for key, bounds in stored.items():
            tolerance = 0.01 if key == "train_share" else 0
            pairs = zip(getattr(stage, key), bounds, strict=False)  # another number of values is refused elsewhere
            if any(abs(value - bound) > tolerance for value, bound in pairs):
                wrong.append(f"curriculum.stages.{name}.{key}=[{bounds[0]},{bounds[1]}]")
        if stage.small_share > 0:
            wrong.append(f"curriculum.stages.{name}.small_share=0")
        if wrong:
            problems.append(f"stages.{name}: the stored tables have other sizes; set {' '.join(wrong)}")
    return problems


def missing_from_prior(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> list[str]:
    """List what a prior lacks for the stages: components of their mixes, and real tables that are long enough."""
    from priors import PriorError

    problems = []
    for name, stage in curriculum.stages.items():
        try:
            mixed = prior.mixed(stage.mix)
        except PriorError as error:
            problems.append(f"stages.{name}.mix is {stage.mix}; {error}")
            continue
        for key, rows in stage.row_ranges.items():
            problems += long_enough(f"stages.{name}.{key}", max(rows), mixed, is_regression)
        if stage.uses > 1 and not can_be_permuted(mixed):
            why = "which needs synthetic tables whose columns may have any order"
            problems.append(f"stages.{name}.uses is {stage.uses}, {why}")
    return problems


def can_be_permuted(prior: Prior) -> bool:
    """Whether the columns and rows of all tables may be permuted.

    So none are real, whose labeled and query rows may have to stay apart, or stored, or have an order with a meaning.
    """
    from priors.mix_scm import MixSCM
    from priors.real import real_tables

    components = list(prior.priors.values()) if isinstance(prior, MixSCM) else [prior]
    if prior.num_tables is not None or real_tables(prior) is not None:
        return False
    return not any(component.raw for component in components)


def missing_from_validation(config: RunConfig, prior: Prior) -> list[str]:
    """List what a prior lacks for validation: real tables that are long enough, and the part that decides."""
    from priors.real import real_tables

    problems = []
    parts = config.curriculum.parts(prior)
    rows = min(config.validation.rows)  # larger numbers than any table has are left out
    for part in parts.values():
        real = real_tables(part)
        drawn = part if real is None else real.for_validation()
        problems += long_enough("validation.rows", rows, drawn, config.model.is_regression)
    best = config.validation.best
    if best != REAL and best not in parts:
        only = next(iter(parts))
        advice = f"set validation.best={only}"
        problems.append(f"validation.best is {best!r}, but all tables of the prior are {only}; {advice}")
    return problems


def missing_steps(config: RunConfig) -> list[str]:
    """List the steps whose tables a prior=disk lacks, alone or in a mixture, or a file that ends before the run."""
    from priors.disk import Disk
    from priors.mix_scm import MixSCM

    prior = build_prior(config.prior)
    if prior.num_tables is not None:
        steps = config.curriculum.whole_steps(prior.num_tables)
        if steps >= config.total_steps:
            return []
        lasts = f"prior: its {prior.num_tables:,} tables end after {steps:,} of the run's {config.total_steps:,} steps"
        advice = f"set trainer.max_steps={steps}"
        if "repeat" in config.prior:
            advice += " or prior.repeat=true"
        return [f"{lasts}; {advice}"]
    stages = config.curriculum.stages.values()
    disk = prior
    key = "prior"
    tables = [stage.tables for stage in stages]  # of a step, for each stage
    if isinstance(prior, MixSCM):
        disk = prior.priors.get("disk", prior)
        key = "prior.components.disk"
        tables = [stage.tables if prior.mixed(stage.mix).shares.get("disk") else 0 for stage in stages]
    if not isinstance(disk, Disk):
        return []
    of_steps = []
    for stage, count in zip(stages, tables, strict=True):
        of_steps += [count] * stage.steps
    return [f"{key}.{line}" for line in disk.missing_steps(config.seed, of_steps[: config.total_steps])]


def eligible_tables(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> list[str]:
    """Return for each stage how many real tables are long enough, in a line; [] if the prior has no real tables."""
    from priors.real import real_tables

    lines = []
    for name, stage in curriculum.stages.items():
        real = real_tables(prior.mixed(stage.mix))
        if real is None:
            continue
        low, high = stage.rows
        few = real.eligible(low, is_regression)
        many = real.eligible(high, is_regression)
        if few and many:
            counts = f"{few.long_enough} of {few.tables} tables have {low:,} rows, and {many.long_enough} have {high:,}"
            lines.append(f"stage {name}: {counts}")
    return lines
