"""Checks of a run as a whole: sections that contradict each other, plug-ins, the prior, and files.

What concerns one section is declared in schema.py, or listed by its `problems()`; what needs the prior is in
prior_checks.py.
"""

from __future__ import annotations

from pathlib import Path

from priors.options import build, check, merged
from tabicl_train.config.prior_checks import prior_problems
from tabicl_train.config.schema import OWN, SYNTHETIC, RunConfig, ValidationConfig, options_of_objective
from tabicl_train.console import is_first
from tabicl_train.doors import plugins, register
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.weights import no_such_weights, resolve


def run_problems(config: RunConfig) -> list[str]:
    """List everything that is wrong with a configuration."""
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
        problems.append(f"validation.suites has two tasks of the name {twice[0]!r}")
    return problems


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
