"""Checks of a run as a whole: sections that contradict each other, plug-ins, the prior, and files.

The values of one section are checked by its own `problems()` in schema.py; what needs the prior is in prior_checks.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tabicl_train import plugins, register
from tabicl_train.config.build import build_objective, build_options
from tabicl_train.config.checks import at_least, seed_problems
from tabicl_train.config.finite import not_finite
from tabicl_train.config.prior_checks import prior_problems
from tabicl_train.config.schema import RunConfig, StageConfig, flatten
from tabicl_train.console import is_first
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.weights import no_such_weights, resolve


def run_problems(config: RunConfig) -> list[str]:
    """List everything that is wrong with a configuration."""
    problems = seed_problems("seed", config.seed)
    problems += at_least(2, preflight_steps=config.preflight_steps)
    if not config.run_dir.strip():
        problems.append("run_dir is empty; name a folder for the run")
    for name, section in vars(config).items():
        if hasattr(section, "problems"):
            problems += [f"{name}.{problem}" for problem in section.problems()]

    # What contradicts another section, or this installation.
    if config.tensorboard and not is_installed("tensorboard"):
        problems.append(f"tensorboard is true, but it is not installed: {install('tensorboard', 'tensorboard')}")
    family = getattr(type(config.model), "family", None)
    if family is not None and config.model.family != family:
        problems.append(f"model.family is {config.model.family!r}; it cannot be changed, choose another model instead")
    problems += plugin_problems(config)
    problems += callback_problems(config)
    problems += objective_problems(config)
    problems += prior_problems(config)
    problems += init_weights_problems(config)
    problems += [f"curriculum.{problem}" for problem in config.curriculum.unsupported(config.model)]
    problems += [f"validation.{problem}" for problem in config.validation.unsupported(config.model)]
    if config.profile.step is not None and config.profile.step >= config.total_steps:
        problems.append(f"profile.step is {config.profile.step}, but the run has {config.total_steps} steps")
    if config.trainer.compile and config.model.dropout > 0:
        problems.append(f"trainer.compile is true, which needs model.dropout=0; it is {config.model.dropout}")
    problems += config.too_few_tables(config.trainer.devices or 1)

    # A value that is nan or inf also fails other checks, whose messages about the same key would say less. The prior
    # has been checked already, in `prior_problems`, as its class knows which of its options may be infinite.
    number_problems = not_finite(replace(config, prior=None))
    keys = {key_of(problem) for problem in number_problems}
    return number_problems + [problem for problem in problems if key_of(problem) not in keys]


def settings_without_effect(config: RunConfig) -> list[str]:
    """List settings that are not the defaults but have no effect beside the others; the plan of a run says so."""
    default = StageConfig()
    remarks = []
    for name, stage in config.curriculum.stages.items():
        key = f"curriculum.stages.{name}"
        # A constant learning rate may be written out as the final one.
        as_expected = (default.final_learning_rate, stage.learning_rate)
        if stage.schedule == "constant" and stage.final_learning_rate not in as_expected:
            remarks.append(f"{key}.final_learning_rate has no effect, since schedule is constant")
        if stage.schedule != "wsd" and stage.decay != default.decay:
            remarks.append(f"{key}.decay has no effect, since schedule is {stage.schedule}")
    if config.model.is_regression:
        for key, value in flatten(config.prior, "prior.").items():  # of the prior, or of components of a mixture
            if key.endswith(".realism.imbalance") and value:
                remarks.append(f"{key} has no effect, since the targets of regression have no classes")
    return remarks


def key_of(problem: str) -> str:
    """Return the key with which the line of a problem begins."""
    return problem.partition(" ")[0]


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
        try:
            build_options(register.callback[name], options or {})
        except ConfigError as error:
            problems += [f"callbacks.{name}.{problem}" for problem in error.problems]
    return problems


def objective_problems(config: RunConfig) -> list[str]:
    """List what is wrong with the objective and its options."""
    if config.objective is None:
        return []
    if not isinstance(config.objective, dict):
        return [f"objective: {register.objective.unknown(str(config.objective))}"]
    options = dict(config.objective)
    name = options.pop("name", None)
    if name not in register.objective:
        return [f"objective: {register.objective.unknown(str(name))}"]
    try:
        build_objective(register.objective[name], options)
    except ConfigError as error:
        return [f"objective.{problem}" for problem in error.problems]
    if name == "cross_entropy" and config.model.is_regression:
        return [f"objective is {name}, but the network predicts numbers"]
    if name == "pinball" and not config.model.is_regression:
        return [f"objective is {name}, but the network predicts classes"]
    return []


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
