"""Checks of a run that need its prior, and the files and real tables behind it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from tabicl_train.config.build import built_prior, configured_prior, last_prior
from tabicl_train.run.score_names import REAL

if TYPE_CHECKING:
    from priors import Prior
    from tabicl_train.config.schema import CurriculumConfig, RunConfig

MOST_PASSES = 100  # that are suggested


def too_many_rows(name: str, rows: int, prior: Prior, is_regression: bool) -> list[str]:
    """List the problem with a setting whose number of rows none of a prior's real tables has."""
    from priors.real import real_tables, setting

    real = real_tables(prior)
    eligible = None
    if real is not None:
        eligible = real.eligible(rows, is_regression)
    if eligible is None:  # there are no real tables, or their length does not matter
        return []
    if eligible.long_enough > 0:
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
        prior, problems = built_prior(config.prior)
    except PriorError as error:
        return [f"prior: {error}"]
    if problems:
        return problems
    name = config.prior["name"]
    max_classes = config.model.max_classes
    is_regression = config.model.is_regression
    problems = stored_in_validation(config, prior)

    # Its targets.
    if is_regression and not prior.numeric_targets:
        problems.append(f"prior={name} draws classes only, but model.max_classes=0 is regression")
    if not is_regression and not prior.classes:
        problems.append(f"prior={name} draws numbers only, which needs model.max_classes=0")
    real = real_tables(prior)
    if real is not None:
        problems += [f"prior {name}: {line}" for line in real.ineligible(max_classes)]

    # What stages and validation ask of it.
    problems += [f"curriculum.{line}" for line in missing_from_prior(config.curriculum, prior, is_regression)]
    if prior.stored_sizes is not None:
        problems += [f"curriculum.{line}" for line in other_sizes(config.curriculum, prior)]
        if 0 < max_classes < prior.stored_classes:
            most = f"the stored tables of prior={name} have up to {prior.stored_classes} classes"
            problems.append(f"model.max_classes is {max_classes}, but {most}")
    if draws_validation_tables(config):
        problems += missing_from_validation(config, prior)
    return problems


def draws_validation_tables(config: RunConfig) -> bool:
    """Whether the prior draws tables for validation; public real tables need no prior."""
    return config.validation.every > 0 and bool(config.validation.rows)


def stored_in_validation(config: RunConfig, prior: Prior) -> list[str]:
    """List the problem with validation tables of a prior that has stored the tables of training, and no others."""
    if not draws_validation_tables(config) or prior.stored_sizes is None:
        return []
    return [f"validation.rows must be [] with prior={config.prior['name']}, which only has the tables of steps"]


def other_sizes(curriculum: CurriculumConfig, prior: Prior) -> list[str]:
    """List the stages in whose ranges the sizes of their stored tables do not lie, which training uses in any case.

    The stages decide the trained range in exports, the estimate of memory and the plan that is printed.
    """
    import numpy as np

    problems = []
    first = 0  # table of the stage
    for name, stage in curriculum.stages.items():
        count = stage.steps * stage.tables
        sizes = prior.sizes_of_stage(first, count)
        first += count
        if sizes is None or len(sizes) == 0:  # those that are missing are reported elsewhere
            continue
        rows, labeled, features = sizes.T
        shares = labeled / rows
        lowest_share = round(float(shares.min()), 3)
        highest_share = round(float(shares.max()), 3)
        stored: dict[str, list] = {
            "rows": [int(rows.min()), int(rows.max())],
            "features": [int(features.min()), int(features.max())],
            "train_share": [max(0.001, lowest_share), min(0.999, highest_share)],  # a stage takes neither 0 nor 1
        }
        corrections = []
        for key, bounds in stored.items():
            asked = getattr(stage, key)
            if len(asked) != 2:  # which is refused elsewhere
                continue
            low, high = asked
            match key:
                case "rows":
                    fits = (rows >= low) & (rows <= high)
                case "features":
                    fits = features <= high  # there may be fewer, since constant columns are dropped
                case _:
                    # Labeled rows, rounded as by the curriculum; 1 % of the rows for shares that a line has rounded.
                    fewest = np.minimum(np.round(rows * low), rows - 2)
                    most = np.maximum(np.round(rows * high), 2)
                    fits = (labeled >= fewest - 0.01 * rows) & (labeled <= most + 0.01 * rows)
            if not fits.all():
                corrections.append(f"curriculum.stages.{name}.{key}=[{bounds[0]},{bounds[1]}]")
        if corrections:
            problems.append(f"stages.{name}: the stored tables have other sizes; set {' '.join(corrections)}")
    return problems


def missing_from_prior(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> list[str]:
    """List what a prior lacks for the stages: components of their mixes, and real tables that are long enough."""
    from priors import PriorError

    problems = []
    for name, stage in curriculum.stages.items():
        try:
            prior_of_stage = prior.mixed(stage.mix)
        except PriorError as error:
            problems.append(f"stages.{name}.mix is {stage.mix}; {error}")
            continue
        if stage.rows:  # [] has been reported
            problems += too_many_rows(f"stages.{name}.rows", max(stage.rows), prior_of_stage, is_regression)
    return problems


def missing_from_validation(config: RunConfig, prior: Prior) -> list[str]:
    """List what a prior lacks for validation: real tables that are long enough, and tables of the kind that decides."""
    from priors.real import real_tables

    problems = []
    by_kind = config.curriculum.priors_by_kind(prior)
    rows = min(config.validation.rows)  # larger numbers than any table has are left out
    for prior_of_kind in by_kind.values():
        drawn = prior_of_kind
        real = real_tables(prior_of_kind)
        if real is not None:
            drawn = real.for_validation()
        problems += too_many_rows("validation.rows", rows, drawn, config.model.is_regression)
    best = config.validation.best
    if best != REAL and best not in by_kind:
        only = next(iter(by_kind))  # there are two kinds
        advice = f"set validation.best={only}"
        problems.append(f"validation.best is {best!r}, but all tables of the prior are {only}; {advice}")
    return problems


def missing_steps(config: RunConfig) -> list[str]:
    """List why a prior of stored tables has none for some steps: they end too early, or files are missing."""
    prior = configured_prior(config.prior)
    steps = config.curriculum.whole_steps(prior)
    if steps >= config.total_steps:
        return []
    lacking = f"prior: its stored tables end after {steps:,} of the run's {config.total_steps:,} steps"
    advice = [f"set trainer.max_steps={steps}"] if steps else []
    again = copy.copy(prior)
    for passes in range(2, MOST_PASSES + 1) if "passes" in config.prior else ():
        again.passes = passes  # type: ignore[attr-defined]
        if config.curriculum.whole_steps(again) >= config.total_steps:
            advice.append(f"prior.passes={passes}")
            break
    return [f"{lacking}; {' or '.join([*advice, 'dump more'])}"]


def eligible_tables(curriculum: CurriculumConfig, prior: Prior, is_regression: bool) -> list[str]:
    """Return for each stage how many real tables are long enough, in a line; [] if the prior has no real tables."""
    from priors.real import real_tables

    lines = []
    for name, stage in curriculum.stages.items():
        real = real_tables(prior.mixed(stage.mix))
        if real is None:
            continue
        lowest, highest = stage.rows
        with_lowest = real.eligible(lowest, is_regression)
        with_highest = real.eligible(highest, is_regression)
        if with_lowest is None or with_highest is None:  # their length does not matter
            continue
        lines.append(
            f"stage {name}: {with_lowest.long_enough} of {with_lowest.tables} tables have {lowest:,} rows, "
            f"and {with_highest.long_enough} have {highest:,}"
        )
    return lines
