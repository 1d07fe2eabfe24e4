"""The plan of a sweep, made from its command line with all checks."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tabicl_train.config.compose import Composer, hydra_text, is_of_sweep, typed
from tabicl_train.config.on_resume import Severity, severity_of
from tabicl_train.config.options import SweepConfig
from tabicl_train.config.schema import LARGEST_SEED, RunConfig
from tabicl_train.doors import plugins
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.outputs import expand_home
from tabicl_train.stream.schedules import schedule_problems
from tabicl_train.sweep.comparable import incomparable
from tabicl_train.sweep.metric import compared_data_sets, metric_problem
from tabicl_train.sweep.space import (
    MOST_RUNS,
    Axis,
    Point,
    axis_of_override,
    axis_of_space,
    examples,
    grid,
    label,
)
from tabicl_train.training.checks import check_machine
from tabicl_train.training.distributed.processes import Launch, srun_problems

REAL = "real/loss"


@dataclass
class Plan:
    """A sweep, ready to run."""

    sweep: SweepConfig
    folder: Path
    axes: list[Axis]
    settings: list[str]  # overrides of every run, from sweep.settings
    command_line: list[str]  # overrides of the command line, which win over all others
    config_dir: str | None = None  # the option --config-dir
    configs: list[RunConfig] = field(default_factory=list)  # of `points`, with the first seed
    data_sets: dict[str, bool] | None = None  # of a metric of public data, and whether they count
    incomparable: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by metric, see comparable.py

    @property
    def points(self) -> list[Point]:
        """All points of a grid; for a search, points that cover every choice and both ends of each range."""
        if self.sweep.sampler == "grid":
            return list(grid(self.axes))
        return examples(self.axes)

    @property
    def total(self) -> int:
        """Number of points that the sweep tries."""
        if self.sweep.sampler != "grid":
            return self.sweep.trials
        return math.prod(len(axis.choices) for axis in self.axes)

    def overrides(self, point: Point, seed: int) -> list[str]:
        """Return the overrides of a run, each key once: those of the command line win, then those that vary."""
        varied = []
        for axis in self.axes:
            varied += axis.overrides(point[axis.key])
        return last_of_each([*self.settings, *varied, *self.command_line, f"seed={seed}"])

    def arguments(self, point: Point, seed: int) -> list[str]:
        """Return the arguments of tabicl-train, without run_dir."""
        arguments = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        arguments += self.overrides(point, seed)
        wandb = self.configs[0].wandb
        if wandb.mode != "disabled" and wandb.group is None:
            arguments.append(f"wandb.group={hydra_text(self.sweep.name)}")
        if wandb.mode != "disabled" and wandb.name is None:
            arguments.append(f"wandb.name={hydra_text(self.run_name(point, seed))}")
        return arguments

    def run_name(self, point: Point, seed: int) -> str:
        """Return the name of a run, made from its point and seed."""
        point_label = label(point)
        return f"{point_label}_seed-{seed}" if point_label else f"seed-{seed}"

    def run_dir(self, number: int, point: Point, seed: int) -> Path:
        """Return the run directory of a trial and a seed."""
        return self.folder / f"{number:03}_{self.run_name(point, seed)}"

    def identity(self) -> dict[str, Any]:
        """Return the settings that must not change from one call of a sweep to the next."""
        sweep = self.sweep
        settings = [setting for setting in [*self.settings, *self.command_line] if not is_free(setting)]
        identity = {
            "sampler": sweep.sampler,
            "pruner": sweep.pruner,
            "seeds": sweep.seeds,
            "metric": sweep.metric,
            "space": {axis.key: [str(axis.distribution), axis.settings] for axis in self.axes},
            "settings": sorted(settings),
        }
        return json.loads(json.dumps(identity))  # as the study returns it

    def text(self) -> str:
        """Format the sweep and, for a grid, the commands of its runs."""
        parts = [yaml.safe_dump(dataclasses.asdict(self.sweep), sort_keys=False)]
        if self.sweep.sampler == "grid":
            plugin_arguments = plugins.arguments(hashes=False)
            for point in self.points:
                for seed in self.sweep.seeds:
                    parts.append(shlex.join(["tabicl-train", *self.arguments(point, seed), *plugin_arguments]))
        return "\n".join(parts)


def is_free(override: str) -> bool:
    """Whether a setting changes neither the weights of a run nor its scores, as its declaration says."""
    key = override.lstrip("+~").partition("=")[0]
    if key == "stream":  # the identities of existing sweeps hold stream=ray
        return False
    return severity_of(key, RunConfig) is Severity.FREE


def last_of_each(overrides: list[str]) -> list[str]:
    """Keep only the last override of each key, since Hydra accepts a group only once."""
    kept: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        kept.pop(key, None)
        kept[key] = text
    return list(kept.values())


def make_plan(overrides: list[str], config_dir: str | None = None) -> Plan:
    """Make the plan of a command line, with the configuration of each of its points.

    All points of a grid are composed and checked. The points of a search are not known in advance, so the checks take
    points that together cover every choice and both ends of each range.

    Parameters
    ----------
    overrides : list of str
        The arguments of tabicl-sweep: settings of the sweep, such as ``sweep.trials=20``, and of its runs, which may
        have several values, such as ``model.embed_dim=32,64``.
    config_dir : str, optional
        A folder of configurations that Hydra searches, too.

    Returns
    -------
    Plan

    Raises
    ------
    ConfigError
        With every problem, each once.
    """
    # Read the command line. If settings of the sweep are wrong, the default ones serve to find further problems.
    overrides = plugins.take(overrides)  # for calls from Python; a command has taken them already
    composer = Composer(config_dir)
    problems: list[str] = []
    try:
        sweep = composer.compose_sweep([text for text in overrides if is_of_sweep(text)])
    except ConfigError as error:
        sweep = SweepConfig()
        problems += error.problems
    plan = read_settings(sweep, [text for text in overrides if not is_of_sweep(text)], composer, problems)

    # A grid needs lists of values and has a limit, at 11 ms to compose a point; a search needs something to search.
    if plan.sweep.sampler == "grid":
        for axis in plan.axes:
            if not axis.settings:
                problems.append(f"{axis.key} is a range; sweep.sampler=grid needs a list of values")
        runs = plan.total * len(plan.sweep.seeds)
        if runs > MOST_RUNS:
            problems.append(f"the grid has {runs:,} runs; it must have at most {MOST_RUNS:,}")
            raise ConfigError(problems)  # at once, since composing that many points takes minutes or more
    elif not plan.axes:
        problems.append(f"sweep.sampler is {plan.sweep.sampler!r}, but nothing varies; set sweep.space")

    # Compose the points. Checks that concern all of them wait until each one is valid.
    for point in plan.points:
        try:
            plan.configs.append(composer.compose(plan.overrides(point, plan.sweep.seeds[0])))
        except ConfigError as error:
            problems += error.problems
    if len(plan.configs) == len(plan.points):
        check_configs(plan, problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # most problems are the same at every point

    plan.incomparable = incomparable(plan.configs)
    return plan


def read_settings(sweep: SweepConfig, command_line: list[str], composer: Composer, problems: list[str]) -> Plan:
    """Read what varies in a sweep, and what all of its runs share.

    Parameters
    ----------
    sweep : SweepConfig
        The settings ``sweep.*``.
    command_line : list of str
        The other settings of the command line.
    composer : Composer
        The parser of settings.
    problems : list of str
        The list to which problems are added.

    Returns
    -------
    Plan
        The plan without the configurations of its points.
    """
    # Axes from sweep.space.
    axes: dict[str, Axis] = {}
    for key, entry in sweep.space.items():
        try:
            axes[key] = axis_of_space(key, entry)
        except ValueError as error:
            problems.append(f"sweep.space.{error}")
    for key, instead in RESERVED.items():
        if axes.pop(key, None):
            problems.append(f"sweep.space has {key}; use {instead}")

    # Axes and single values from sweep.settings, then from the command line, which wins. Several values become an axis
    # and replace an earlier axis of the same key; a single value removes it. For an axis with labels, the values are
    # labels and choose among them.
    folder = f"runs/{sweep.name}"
    seeds = list(sweep.seeds)
    sweep_overrides, problems_of_sweep = composer.read(sweep.settings)
    command_overrides, problems_of_command = composer.read(command_line)
    problems += problems_of_sweep + problems_of_command
    plain_of_sweep: list[str] = []  # settings with one value
    plain_of_command: list[str] = []
    for index, (text, override) in enumerate(sweep_overrides + command_overrides):
        plain = plain_of_sweep if index < len(sweep_overrides) else plain_of_command
        key = override.key_or_group
        try:
            axis = axis_of_override(override)
        except ValueError as error:
            problems.append(f"{text}: {error}")
            continue
        if key == "run_dir":
            folder = str(typed(text, override.value()))
            if axis is not None or not folder.strip():
                problems.append(f"{text}: run_dir is the folder of the whole sweep; quote a name that has commas")
            elif "${" in folder:  # it would be resolved with the settings of each run
                problems.append(f"{text}: run_dir is the folder of the whole sweep; write it without ${{...}}")
        elif key == "seed":
            seeds = axis.choices if axis is not None else [override.value()]
            is_range = axis is not None and not axis.settings
            if is_range or any(type(seed) is not int or not 0 <= seed <= LARGEST_SEED for seed in seeds):
                problems.append(f"{text}: a seed must be a whole number in 0..{LARGEST_SEED}")
                seeds = [0]
        elif key in axes and axes[key].has_labels:
            labels = axis.choices if axis is not None else [override.value()]
            unknown = [str(label) for label in labels if label not in axes[key].choices]
            if unknown:
                known = ", ".join(axes[key].choices)
                problems.append(f"{text}: {key} has no label {', '.join(unknown)}; it must be one of {known}")
            else:
                axes[key] = axes[key].only(labels)
        elif axis is not None:
            axes[key] = axis
        else:
            axes.pop(key, None)
            plain.append(text)

    sweep = dataclasses.replace(sweep, seeds=list(dict.fromkeys(seeds)))
    try:
        folder = expand_home(folder)
    except ConfigError as error:
        problems.append(f"run_dir is {error}")
    return Plan(sweep, Path(folder), list(axes.values()), plain_of_sweep, plain_of_command, composer.config_dir)


RESERVED = {"seed": "sweep.seeds", "run_dir": "the setting run_dir for the folder of the sweep"}


def check_configs(plan: Plan, problems: list[str]) -> None:
    """Set the metric if none is chosen, and check the configurations as runs of one sweep.

    Parameters
    ----------
    plan : Plan
        A plan with the configurations of its points; its metric and data sets are set.
    problems : list of str
        The list to which problems are added.
    """
    sweep = plan.sweep
    configs = plan.configs

    # The default metric is the loss on real data if all runs have it and some data set counts.
    if sweep.metric is None:
        has_real = all(metric_problem(REAL, config) is None for config in configs)
        has_real = has_real and any((compared_data_sets(REAL, configs) or {}).values())
        plan.sweep = dataclasses.replace(sweep, metric=REAL if has_real else "loss")
        problems += [f"sweep.{line}" for line in plan.sweep.problems() if line.startswith("pruner")]

    # All runs must write the metric and, for real data, share a data set inside their trained ranges.
    metric = plan.sweep.metric or ""
    problems_of_metric = [metric_problem(metric, config) for config in configs]
    problems += [f"sweep.{problem}" for problem in problems_of_metric if problem]
    if not any(problems_of_metric):
        plan.data_sets = compared_data_sets(metric, configs)
        if plan.data_sets is not None and not any(plan.data_sets.values()):
            why = "no public data set lies inside the trained range of all runs"
            problems.append(f"sweep.metric is {metric!r}, but {why}; choose synthetic/loss, or train on larger tables")

    # Where the runs are started.
    problems += srun_problems()
    for config in configs:
        if config.trainer.requeue:
            problems.append("trainer.requeue is true, but a sweep restarts its runs itself")
        if sweep.submit.cluster == "local":
            devices = config.trainer.devices or 1
            problems += check_machine(config, Launch(size=devices, local_size=devices), uses_folder=False)
            continue
        problems += schedule_problems(config.curriculum)  # before the job waits in a queue
        if config.trainer.devices is not None:
            problems.append(f"trainer.devices is {config.trainer.devices}; leave it out: sweep.submit.gpus sets it")
    if sweep.submit.cluster == "slurm" and not is_installed("submitit"):
        problems.append(f"sweep.submit.cluster is 'slurm', which needs submitit: {install('submitit', 'slurm')}")
    if (plan.folder / "config.yaml").exists():
        problems.append(f"run_dir is {str(plan.folder)!r}, a run directory; a sweep needs a folder of its own")
