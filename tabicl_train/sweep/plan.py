"""From the command line of a sweep to its jobs, checked all at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from priors.random import STREAM_VERSION
from tabicl_train.config.compose import (
    compose_jobs,
    compose_sweep,
    config_files,
    is_of_sweep,
    split_values,
)
from tabicl_train.config.schema import RunConfig, flatten
from tabicl_train.config.sweep import SweepConfig, hydra_sweep_problems
from tabicl_train.errors import ConfigError
from tabicl_train.sweep.metric import problem as metric_problem
from tabicl_train.sweep.ranking import hydra_text, short_names
from tabicl_train.sweep.space import (
    Axis,
    Choices,
    Point,
    Range,
    axis_of_override,
    axis_of_space,
    example_points,
    grid,
    label,
    random_point,
    settings_of,
)

REAL = "real/loss"

# Settings that leave the weights of a run and its scores as they are; checkpoints unless the run may go back to them.
HARMLESS = (
    *("run_dir", "name", "preflight", "wandb.", "tensorboard", "profile.", "stream.", "resume."),
    *("trainer.log_every", "trainer.timeout", "trainer.max_hours", "trainer.requeue"),
)


@dataclass(eq=False)
class Job:
    """A run of a sweep.

    params: the point, a value for each axis
    overrides: the arguments of tabicl-train, without run_dir
    config: what they are composed into; None if that fails, and `problem` says why
    """

    name: str
    folder: Path
    params: Point
    seed: int
    overrides: list[str]
    config: RunConfig | None
    problem: str = ""

    @property
    def arguments(self) -> list[str]:
        """The arguments of tabicl-train."""
        return [*self.overrides, f"run_dir={hydra_text(str(self.folder))}"]


@dataclass
class Plan:
    """A sweep, ready to run.

    settings: overrides of every job
    own: those of the command line, which win over all others
    files: Hydra's options --config-name, --config-path and --config-dir
    points: of a grid or random points; None if a search decides them one after another
    names: of the jobs in the folder and of those planned, by their fingerprints
    """

    sweep: SweepConfig
    folder: Path
    axes: list[Axis]
    settings: list[str]
    own: list[str]
    files: tuple[str, str | None, str | None]
    points: list[Point] | None = None
    names: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """The options of Hydra among the arguments of every job."""
        name, path, folder = self.files
        options = {"--config-name": None if name == "train" else name, "--config-path": path, "--config-dir": folder}
        return [text for option, value in options.items() if value is not None for text in (option, value)]

    def text(self, jobs: list[Job]) -> str:
        """The sweep, and the commands of its jobs, which a search has not yet."""
        settings = yaml.safe_dump(dataclasses.asdict(self.sweep), sort_keys=False)
        return "\n".join([settings, *(shlex.join(["tabicl-train", *job.arguments]) for job in jobs)])

    def overrides(self, point: Point, seed: int) -> list[str]:
        return last_of_each([*self.settings, *settings_of(self.axes, point), *self.own, f"seed={seed}"])

    def jobs(self, points: list[Point]) -> list[Job]:
        """A job for each point and seed, in this order; raises ConfigError with everything wrong with any of them."""
        pairs = [(point, seed) for point in points for seed in self.sweep.seeds]
        with config_files(*self.files):
            texts = [self.overrides(point, self.sweep.seeds[0]) for point in points]
            configs = compose_jobs(self.files[0], texts, self.sweep.seeds)
        return [self.job(*pair, config) for pair, config in zip(pairs, configs, strict=True)]

    def jobs_of(self, point: Point) -> list[Job]:
        """The jobs of a point; one that cannot be composed has a problem."""
        try:
            return self.jobs([point])
        except ConfigError as error:
            problem = "; ".join(error.problems)
            return [self.job(point, seed, None, problem) for seed in self.sweep.seeds]

    def job(self, point: Point, seed: int, config: RunConfig | None, problem: str = "") -> Job:
        overrides = self.overrides(point, seed)
        end = fingerprint(overrides if config is None else settings_that_count(config))
        if end not in self.names:
            words = label(self.axes, point, short_names(list(point)))
            self.names[end] = f"{words}{'_' if words else ''}seed-{seed}-{end}"
        name = self.names[end]
        folder = self.folder / name
        if config is not None:
            if config.wandb.mode != "disabled" and config.wandb.group is None:
                overrides.append(f"wandb.group={hydra_text(self.sweep.name)}")
            config = dataclasses.replace(config, run_dir=str(folder))
        return Job(name, folder, point, seed, [*self.options, *overrides], config, problem)


def last_of_each(overrides: list[str]) -> list[str]:
    """The overrides without those that a later one of the same key replaces: Hydra takes a group only once."""
    kept: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        kept.pop(key, None)
        kept[key] = text
    return list(kept.values())


def settings_that_count(config: RunConfig) -> dict[str, Any]:
    """What decides the results of a run."""
    harmless = HARMLESS if config.guard.action == "rewind" else (*HARMLESS, "checkpoint.")
    flat = flatten(dataclasses.asdict(config))
    kept = {key: value for key, value in flat.items() if not key.startswith(harmless)}
    return kept | {"version of the stream": STREAM_VERSION}


def fingerprint(values: Any) -> str:
    """Eight digits that differ between jobs of different settings."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]


def make_plan(
    overrides: list[str], config_name: str = "train", config_path: str | None = None, config_dir: str | None = None
) -> tuple[Plan, list[Job]]:
    """The plan of a command line, and the jobs of a grid or of random points; raises ConfigError with every problem.

    For a search, whose points are not known, the jobs of points that have every value are checked instead.
    """
    files = (config_name, config_path, config_dir)
    problems = hydra_sweep_problems(overrides)
    if problems:
        raise ConfigError(problems)
    with config_files(*files):
        try:
            sweep = compose_sweep([text for text in overrides if is_of_sweep(text)])
        except ConfigError as error:
            sweep, problems = None, list(error.problems)
        plan = read_settings(
            sweep or SweepConfig(), [text for text in overrides if not is_of_sweep(text)], files, problems
        )
    plan.names = folder_names(plan.folder)
    if sweep is not None:
        choose_points(plan, problems)
    jobs = check_jobs(plan, problems) if all(not axis.problems() for axis in plan.axes) else []
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return plan, jobs if plan.points is not None else []


def read_settings(
    sweep: SweepConfig, command_line: list[str], files: tuple[str, str | None, str | None], problems: list[str]
) -> Plan:
    """The plan without its points; adds to the problems."""
    axes: dict[str, Axis] = {}
    for key, entry in sweep.space.items():
        axis = axis_of_space(key, entry)
        if isinstance(axis, str):
            problems.append(f"sweep.space.{axis}")
        elif key in ("seed", "run_dir"):
            problems.append(
                f"sweep.space has {key}; " + ("use sweep.seeds" if key == "seed" else "each job has its own")
            )
        else:
            axes[key] = axis
    settings: list[str] = []
    own: list[str] = []
    folder, seeds = f"runs/{sweep.name}", list(sweep.seeds)
    for number, (text, override) in enumerate(split_values([*sweep.settings, *command_line])):
        plain = settings if number < len(sweep.settings) else own
        axis = axis_of_override(override) if override is not None else None
        key = override.key_or_group if override is not None else ""
        named = axes.get(key)
        if override is None:
            plain.append(text)
        elif key == "run_dir":
            folder = str(override.value() or "")
            if not folder.strip():
                problems.append(f"{text}: run_dir is empty; name the folder of the sweep")
            if axis is not None:
                problems.append(f"{text}: run_dir is the folder of the whole sweep; put a name with commas in quotes")
        elif key == "seed":
            seeds = list(axis.values.values()) if isinstance(axis, Choices) else [override.value()]
            if wrong := [seed for seed in seeds if type(seed) is not int or seed < 0]:
                problems.append(f"{text}: a seed must be a whole number, at least 0")
                seeds = [seed for seed in seeds if seed not in wrong] or [0]
        elif isinstance(named, Choices) and named.has_labels:
            chosen = list(axis.values) if isinstance(axis, Choices) else [str(override.value())]
            problems += [f"{text}: {named.key} has {', '.join(named.values)}" for c in chosen if c not in named.values]
            named.values = {label: label for label in chosen if label in named.values}
        elif axis is not None:
            axes[key] = axis
        else:
            axes.pop(key, None)
            plain.append(text)
    problems += [f"sweep.space.{line}" for axis in axes.values() for line in axis.problems()]
    seeds = list(dict.fromkeys(seeds))
    return Plan(dataclasses.replace(sweep, seeds=seeds), Path(folder), list(axes.values()), settings, own, files)


def choose_points(plan: Plan, problems: list[str]) -> None:
    """Set the points of a grid, and random ones; adds to the problems."""
    sweep = plan.sweep
    if sweep.method == "grid":
        ranges = [axis.key for axis in plan.axes if isinstance(axis, Range)]
        problems += [f"{key} is a range; sweep.method=grid needs a list of values" for key in ranges]
        plan.points = list(grid(plan.axes)) if not ranges else None
    elif not plan.axes:
        problems.append(f"sweep.method is {sweep.method!r}, but nothing varies; set sweep.space")
    elif sweep.method == "random" and all(not axis.problems() for axis in plan.axes):
        plan.points = [random_point(plan.axes, index) for index in range(sweep.trials)]


def check_jobs(plan: Plan, problems: list[str]) -> list[Job]:
    """The jobs of the plan's points, or of examples; sets the metric, and adds to the problems."""
    sweep = plan.sweep
    try:
        jobs = plan.jobs(example_points(plan.axes) if plan.points is None else plan.points)
    except ConfigError as error:
        problems += error.problems
        return []
    configs = [job.config for job in jobs if job.config is not None]
    if sweep.metric is None:
        has_real = all(metric_problem(REAL, config) is None for config in configs)
        plan.sweep = dataclasses.replace(sweep, metric=REAL if has_real else "loss")
    else:
        problems += [f"sweep.{p}" for config in configs if (p := metric_problem(sweep.metric, config))]
    problems += [line for config in configs for line in unfit_for_a_sweep(config)]
    if sweep.executor == "local":
        problems += [line for config in configs for line in config.start_problems() if not line.startswith("run_dir ")]
    if (plan.folder / "config.yaml").exists():
        problems.append(f"run_dir is {str(plan.folder)!r}, the folder of a run; a sweep needs one of its own")
    if "WORLD_SIZE" in os.environ:
        problems.append("a sweep is one process, which starts those of its jobs; start it without torchrun")
    return jobs


def unfit_for_a_sweep(config: RunConfig) -> list[str]:
    problems = ["preflight is true, but a sweep trains"] if config.preflight else []
    if config.trainer.requeue:
        problems.append("trainer.requeue is true, but a sweep itself starts its jobs again")
    if (config.trainer.nodes or 1) > 1:
        problems.append(f"trainer.nodes is {config.trainer.nodes}; a job of a sweep runs on one machine")
    return problems


def folder_names(folder: Path) -> dict[str, str]:
    """The names of the jobs in a sweep's folder by the fingerprints at their ends."""
    names = [path.name for path in folder.glob("*") if re.fullmatch(r".+-[0-9a-f]{8}", path.name)]
    return {name[-8:]: name for name in sorted(names)}
