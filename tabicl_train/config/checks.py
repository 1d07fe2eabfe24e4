"""The check of a configuration: what its values contradict in other sections, in plug-ins, the prior and files.

What concerns one section is declared in schema.py, or listed by its `problems()`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from priors.options import build, check, merged
from tabicl_train.config.build import built_prior, last_prior
from tabicl_train.config.schema import (
    OWN,
    REAL,
    SYNTHETIC,
    CurriculumConfig,
    RunConfig,
    ValidationConfig,
    options_of_objective,
)
from tabicl_train.console import is_first
from tabicl_train.doors import plugins, register
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.weights import no_such_weights, resolve

if TYPE_CHECKING:
    from priors import Prior


def check_values(config: RunConfig) -> list[str]:
    """List everything that is wrong with a configuration, on whatever machine it may run."""
    problems = []
    if not config.run_dir.strip():
        problems.append("run_dir is empty; name a folder for the run")

    # What contradicts another section, or this installation.
    if config.tensorboard and not is_installed("tensorboard"):
        problems.append(f"tensorboard is true, but it is not installed: {install('tensorboard', 'tensorboard')}")
    problems += plugin_problems(config)
    problems += callback_problems(config)
    problems += objective_problems(config)
    problems += suite_problems(config)
    problems += prior_problems(config)
    problems += init_weights_problems(config)
    problems += [f"curriculum.{problem}" for problem in config.curriculum.unsupported(config.model)]
    problems += [f"validation.{problem}" for problem in config.validation.unsupported(config.model)]
    if config.profile.step is not None and config.profile.step >= config.total_steps:
        problems.append(f"profile.step is {config.profile.step}, but the run has {config.total_steps} steps")
    if config.trainer.compile and config.model.dropout > 0:
        problems.append(f"trainer.compile is true, which needs model.dropout=0; it is {config.model.dropout}")
    problems += config.too_few_tables(config.trainer.devices or 1)
    return merged(check(config), problems)


def plugin_problems(config: RunConfig) -> list[str]:
    """List the plug-ins that a configuration file asks for and nobody has named."""
    named = {plugin.module for plugin in plugins.named()}
    missing = []
    for name in config.requires_plugins:
        module = Path(name).stem  # of a file, ./gp.py
        if name not in named and module not in named:
            missing.append(name)
    if not missing:
        return []
    return [f"the configuration needs plug-ins; if you trust them, add plugins=[{','.join(missing)}]"]


def callback_problems(config: RunConfig) -> list[str]:
    """List what is wrong with the callbacks and their options."""
    problems = []
    for name, options in config.callbacks.items():
        if name not in register.callback:
            problems.append(f"callbacks.{name}: {register.callback.unknown(name)}")
            continue
        if register.callback.plugin(name) is None:
            problems.append(f"callbacks.{name}: it is one of ours, which settings of the run choose; leave it out")
            continue
        problems += build(register.callback[name], options or {}, f"callbacks.{name}")[1]
    return problems


def objective_problems(config: RunConfig) -> list[str]:
    """List what is wrong with the objective and its options."""
    if config.objective is None:
        return []
    options = dict(config.objective)
    cls = options_of_objective(options)
    name = options.pop("name")
    problems = build(cls, options, "objective")[1]
    if problems:
        return problems
    if name == "cross_entropy" and config.model.is_regression:
        return [f"objective is {name}, but the network predicts numbers"]
    if name == "pinball" and not config.model.is_regression:
        return [f"objective is {name}, but the network predicts classes"]
    return []


def suite_problems(config: RunConfig) -> list[str]:
    """List what is wrong with the suites of validation."""
    suites = config.validation.suites
    if suites in ([], ValidationConfig().suites):  # scikit-learn is slow to import
        return []
    problems = []
    names = [SYNTHETIC, OWN]  # what else is in the column of the tasks
    for suite in suites:
        if suite not in register.suite:
            problems.append(f"validation.suites: {register.suite.unknown(suite)}")
            continue
        if not config.validation.every:  # its tasks are not scored, and need not be there
            continue
        try:
            names += [source.name for source in register.suite[suite](None, config.model.is_regression)]
        except ConfigError as error:  # such as one that needs a folder or a package
            problems += [f"validation.suites: {problem}" for problem in error.problems]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        problems.append(f"validation.suites has two tasks called {twice[0]!r}")
    return problems


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
    if config.validation.draws_tables:
        problems += missing_from_validation(config, prior)
    return problems


def stored_in_validation(config: RunConfig, prior: Prior) -> list[str]:
    """List the problem with validation tables of a prior that has stored the tables of training, and no others."""
    if not config.validation.draws_tables or prior.stored_sizes is None:
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


def init_weights_problems(config: RunConfig) -> list[str]:
    """List what is wrong with the weights to start from."""
    path = config.init_weights
    if path is None:
        return []
    if not is_first() or config.has_checkpoint:  # rank 0 reads them for all, at the first start only
        return []
    if not path.strip():
        choices = "a run directory, a checkpoint, an export, or weights of the package, such as mini"
        return [f"init_weights is empty; name {choices}, or leave it out"]
    if not resolve(path, config.model.is_regression).exists():
        return [no_such_weights("init_weights", path)]
    return []
