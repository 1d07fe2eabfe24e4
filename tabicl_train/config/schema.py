"""The configuration of a run: typed dataclasses, and what is wrong with a given one.

Hydra composes `configs/` over these dataclasses, so a value is declared here and nowhere else. `problems()` of each
lists everything wrong with it; `compose` reports all of them together, before anything heavy is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import compose as hydra_compose
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import priors
from priors.table import MIN_ROWS
from tabicl_train.model.config import TabICLConfig

PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the folder lies inside the package, in a checkout beside it.
CONFIG_DIR = next(d for d in (PACKAGE / "configs", PACKAGE.parent / "configs") if d.is_dir())

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
ROW_DISTRIBUTIONS = ("uniform", "log_uniform")
PARTS = ("column", "row", "icl")  # of the network, as stages can freeze them
OPTIMIZERS = ("muon", "muon_all", "adamw")
GUARD_ACTIONS = ("warn", "stop", "rewind")
SYNTHETIC = "synthetic"  # tables of a validation, as opposed to real ones
BEST = ("real", SYNTHETIC)
WANDB_MODES = ("disabled", "offline", "online")
ACCELERATORS = ("auto", "cpu", "cuda")


# What Hydra raises for a command line it cannot compose; ValueError for GROUP=null.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)


class ConfigError(Exception):
    """A configuration that cannot run; `problems` says why, one line each, in the user's terms.

    everywhere: all processes of a run raise it alike, and the first one prints it
    """

    everywhere = False

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


def install(packages: str, extra: str) -> str:
    """How to get what an extra of this project brings; the project itself is on no package index."""
    return f"pip install {packages}, or pip install '.[{extra}]' in the project's folder"


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError([f"pictures need matplotlib: {install('matplotlib', 'plots')}"])


def unusable_folder(path: Path) -> str | None:
    """Why files cannot be made in a folder, which need not exist yet."""
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def one_of(name: str, value: str, choices: tuple[str, ...]) -> list[str]:
    return [] if value in choices else [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def at_least(bound: float, **values: float) -> list[str]:
    return [f"{name} is {value}; it must be at least {bound}" for name, value in values.items() if value < bound]


def ordered_pair(name: str, value: list, low: float, high: float = float("inf")) -> list[str]:
    """A range [low, high] as YAML gives it: two numbers in order, inside the bounds."""
    if len(value) != 2 or value[0] > value[1]:
        return [f"{name} is {list(value)}; it must be [lowest, highest]"]
    if value[0] < low or value[1] > high:
        upper = "" if high == float("inf") else f"..{high}"
        return [f"{name} is {list(value)}; it must lie in {low}{upper or ' and above'}"]
    return []


@dataclass
class StageConfig:
    """One stage of the curriculum: which tables, how many, and how they are learned from."""

    steps: int = 1000
    rows: list[int] = field(default_factory=lambda: [1024, 1024])  # [lowest, highest] rows of a table
    row_distribution: str = "log_uniform"
    small_share: float = 0.0  # share of the groups whose rows are drawn from small_rows instead
    small_rows: list[int] = field(default_factory=lambda: [100, 1024])
    train_share: list[float] = field(default_factory=lambda: [0.3, 0.9])  # labelled share of the rows, uniform
    features: list[int] = field(default_factory=lambda: [1, 100])  # uniform
    tables: int = 64  # tables of one optimiser step, over all ranks
    group_size: int = 4  # tables that share rows, split and width
    micro_batch_rows: int = 26_000  # rows of one forward pass, at most (one table always fits)
    learning_rate: float = 8e-4  # peak
    schedule: str = "cosine"
    warmup: float = 0.01  # share of the stage's steps
    decay: float = 0.2  # share of the stage's steps over which schedule=wsd falls
    final_learning_rate: float = 1e-7
    clip: float = 10.0  # gradient norm
    weight_decay: float = 0.01
    fresh_optimizer: bool = True  # forget the momenta of the stage before
    frozen: list[str] = field(default_factory=list)  # parts that keep their weights: column, row, icl
    checkpoint_rows: int | None = None  # recompute activations above this many rows; by default the model's value

    def problems(self) -> list[str]:
        found = at_least(1, steps=self.steps, tables=self.tables, group_size=self.group_size)
        found += at_least(1, micro_batch_rows=self.micro_batch_rows)
        found += ordered_pair("rows", self.rows, MIN_ROWS)
        found += ordered_pair("small_rows", self.small_rows, MIN_ROWS)
        found += ordered_pair("features", self.features, 1)
        found += one_of("row_distribution", self.row_distribution, ROW_DISTRIBUTIONS)
        found += one_of("schedule", self.schedule, SCHEDULES)
        share = self.train_share
        if len(share) != 2 or not 0 < share[0] <= share[1] < 1:
            found.append(f"train_share is {list(share)}; it must be [lowest, highest] inside (0, 1), 0 and 1 excluded")
        if not 0 <= self.small_share <= 1:
            found.append(f"small_share is {self.small_share}; it must lie in 0..1")
        for part in self.frozen:
            found += one_of("frozen", part, PARTS)
        if set(self.frozen) == set(PARTS):
            found.append("frozen names every part; nothing would be trained")
        if self.checkpoint_rows is not None:
            found += at_least(0, checkpoint_rows=self.checkpoint_rows)
        for name in ("warmup", "decay"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                found.append(f"{name} is {share}; it is a share of the steps, 0..1")
        if not self.learning_rate > 0:
            found.append(f"learning_rate is {self.learning_rate}; it must be positive")
        elif not 0 <= self.final_learning_rate <= self.learning_rate:
            found.append(f"final_learning_rate is {self.final_learning_rate}; it must lie in 0..learning_rate")
        if not self.clip > 0:
            found.append(f"clip is {self.clip}; it must be positive")
        return found + at_least(0, weight_decay=self.weight_decay)


@dataclass
class CurriculumConfig:
    stages: dict[str, StageConfig] = field(default_factory=dict)  # by name, in the order they run
    start: str | None = None  # the first stage to run, for a run from init_weights; the ones before are left out

    def problems(self) -> list[str]:
        if not self.stages:
            return ["stages is empty; a run needs at least one"]
        found = one_of("start", self.start, tuple(self.stages)) if self.start is not None else []
        return found + [f"stages.{name}.{p}" for name, stage in self.stages.items() for p in stage.problems()]

    def drop_skipped(self) -> None:
        """Leave out the stages before `start`."""
        if self.start in self.stages:
            names = list(self.stages)
            self.stages = {name: self.stages[name] for name in names[names.index(self.start) :]}


@dataclass
class OptimizerConfig:
    """muon: Muon for the hidden matrices, AdamW for the rest; muon_all: Muon for everything; adamw: AdamW alone."""

    name: str = "muon"
    momentum: float = 0.9  # Muon, Nesterov
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str = "auto"  # bf16 on a GPU, fp32 on a CPU; or fp32, bf16
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW
    eps: float = 1e-8
    cautious_weight_decay: bool = False  # decay only the weights that the update moves towards zero

    def problems(self) -> list[str]:
        found = one_of("name", self.name, OPTIMIZERS)
        found += one_of("newton_schulz_dtype", self.newton_schulz_dtype, ("auto", "fp32", "bf16"))
        found += at_least(1, newton_schulz_steps=self.newton_schulz_steps)
        if not 0 <= self.momentum < 1:
            found.append(f"momentum is {self.momentum}; it must lie in [0, 1)")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            found.append(f"betas is {list(self.betas)}; it must be two numbers in [0, 1)")
        if not self.eps > 0:
            found.append(f"eps is {self.eps}; it must be positive")
        return found


@dataclass
class TrainerConfig:
    max_steps: int | None = None  # stops the run early; schedules keep the length of their stages
    precision: str = "auto"  # bf16 on a GPU, fp32 on a CPU; or fp32, bf16, fp16
    accelerator: str = "auto"
    devices: int | None = None  # processes of each machine, one a device; by default what the launcher says, or 1
    nodes: int | None = None  # machines; by default what the launcher says, or 1
    # Threads of a training process on the CPU. Set, since sums round differently with another number; one, since a
    # second one that shares its core with a busy worker made a step 30 times slower (0.13 s -> 4 s on two cores).
    cpu_threads: int = 1
    log_every: int = 10  # steps between rows of metrics.csv
    timeout: float = 600.0  # seconds that a process waits for the others before it gives up
    max_hours: float | None = None  # the run saves and ends by itself after them
    requeue: bool = False  # ask SLURM to start the job again after a stop signal

    def problems(self) -> list[str]:
        found = one_of("precision", self.precision, PRECISIONS)
        found += one_of("accelerator", self.accelerator, ACCELERATORS)
        found += at_least(1, cpu_threads=self.cpu_threads)
        found += at_least(1, **{name: n for name in ("devices", "nodes") if (n := getattr(self, name)) is not None})
        found += at_least(1, log_every=self.log_every, timeout=self.timeout)
        if 1e9 < self.timeout < math.inf:  # beyond what the clocks of torch and Python count
            found.append(f"timeout is {self.timeout}; it must be at most 1e9")
        if self.max_hours is not None and not self.max_hours > 0:
            found.append(f"max_hours is {self.max_hours}; it must be positive")
        return found + (at_least(1, max_steps=self.max_steps) if self.max_steps is not None else [])


@dataclass
class StreamConfig:
    num_workers: int = 1  # processes that draw tables; 0 draws them in the training process
    prefetch: int = 4  # steps ready or being drawn, a worker
    # Tables ready or being drawn, of a training process; 64 tables of 1,024 rows are 14 MB, of up to 60,000 about 100.
    prefetch_gib: float = 2.0

    def problems(self) -> list[str]:
        found = at_least(0, num_workers=self.num_workers) + at_least(1, prefetch=self.prefetch)
        return found if self.prefetch_gib > 0 else [*found, f"prefetch_gib is {self.prefetch_gib}; it must be positive"]


@dataclass
class CheckpointConfig:
    every: int = 500  # steps
    keep: int = 3  # newest checkpoints kept
    permanent_every: int | None = None  # steps; checkpoints of multiples of it are kept for good

    def problems(self) -> list[str]:
        found = at_least(1, every=self.every, keep=self.keep)
        if self.permanent_every is not None and (self.permanent_every < 1 or self.permanent_every % self.every):
            found.append(f"permanent_every is {self.permanent_every}; it must be a multiple of every ({self.every})")
        return found


@dataclass
class GuardConfig:
    """When a run is no longer worth its electricity. The limits are those of the published one-GPU run."""

    skipped_in_a_row: int = 10  # steps of non-finite loss or gradient, after which the run stops
    skipped: int = 1000  # the same, all in all
    action: str = "warn"  # or stop, or rewind, where one of the limits below is passed
    after: int = 5000  # steps from which the limits hold: the published warm-up
    loss: float = 0.9  # moving average of the loss
    multiplier: float = 30.0  # of the first in-context block at 512 labelled rows ...
    multiplier_loss: float = 0.65  # ... while the moving average of the loss is above this
    rewinds: int = 3  # after so many of them, the next one is a stop

    def problems(self) -> list[str]:
        found = at_least(1, skipped_in_a_row=self.skipped_in_a_row, skipped=self.skipped)
        found += one_of("action", self.action, GUARD_ACTIONS)
        return found + at_least(0, after=self.after, rewinds=self.rewinds)


@dataclass
class AveragesConfig:
    """Averages of the weights, kept in the checkpoints; tabicl-export weights=ema|last writes them."""

    ema: float = 0.0  # decay a step of an exponential moving average; 0 keeps none
    last: int = 0  # weights of so many points of the run are averaged; 0 keeps none
    every: int = 500  # steps between these points

    def problems(self) -> list[str]:
        found = at_least(0, last=self.last) + at_least(1, every=self.every)
        return found + ([] if 0 <= self.ema < 1 else [f"ema is {self.ema}; it must lie in [0, 1)"])


@dataclass
class ValidationConfig:
    """How good the network is while it is trained: on synthetic tables that no step has, and on real data."""

    every: int = 0  # steps; 0: never
    rows: list[int] = field(default_factory=lambda: [128, 512, 1024])  # of the synthetic tables; []: none of them
    tables: int = 16  # of each number of rows
    features: list[int] = field(default_factory=lambda: [2, 30])  # uniform
    real_rows: int = 200  # the most that are used of each of scikit-learn's bundled sets; 0: none of them
    best: str = "real"  # or synthetic: the weights that are best by it are kept in checkpoints/best.ckpt

    def problems(self) -> list[str]:
        found = at_least(0, every=self.every) + at_least(1, tables=self.tables) + one_of("best", self.best, BEST)
        found += ordered_pair("features", self.features, 1)
        found += [problem for rows in self.rows for problem in at_least(MIN_ROWS, rows=rows)]
        if self.real_rows != 0:  # of ten classes, a split of 30 % shows each
            found += at_least(50, real_rows=self.real_rows)
        if self.every and not (self.real_rows if self.best == "real" else self.rows):
            found.append(f"best is {self.best!r}, but {'real_rows is 0' if self.best == 'real' else 'rows is empty'}")
        return found


@dataclass
class ProfileConfig:
    """A trace of some steps, and on a GPU a snapshot of its memory, in the run's folder `profile`."""

    step: int | None = None  # the first one, counted from 0; none is profiled without it
    steps: int = 3

    def problems(self) -> list[str]:
        return at_least(1, steps=self.steps) + (at_least(0, step=self.step) if self.step is not None else [])


@dataclass
class WandbConfig:
    """Weights and Biases, beside metrics.csv."""

    mode: str = "disabled"  # or offline, or online, which becomes offline where there is no account or no network
    project: str = "tabicl-train"
    timeout: float = 30.0  # seconds that its start and its end may take

    def problems(self) -> list[str]:
        found = one_of("mode", self.mode, WANDB_MODES) + at_least(1, timeout=self.timeout)
        if self.mode != "disabled" and importlib.util.find_spec("wandb") is None:
            found.append(f"mode is {self.mode!r}, but wandb is not installed: {install('wandb', 'wandb')}")
        return found


@dataclass
class ResumeConfig:
    allow_changes: bool = False  # continue although the model, the seed, the prior or a started stage is another one


@dataclass
class RunConfig:
    """Everything about a run. `run_dir` is the run: the same command on it continues."""

    name: str = "run"
    seed: int = 0
    run_dir: str = "runs/${name}"
    preflight: bool = False  # train a few steps in fp32 and in the configured precision, compare, and write nothing
    preflight_steps: int = 50
    init_weights: str | None = None  # to start from: a run, a checkpoint, or a file in the public format
    model: TabICLConfig = field(default_factory=TabICLConfig)
    prior: Any = None  # {name, options}; the schema is the prior's dataclass
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    averages: AveragesConfig = field(default_factory=AveragesConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)

    def problems(self) -> list[str]:
        found = at_least(0, seed=self.seed) + at_least(2, preflight_steps=self.preflight_steps)
        if not self.run_dir.strip():
            found.append("run_dir is empty; name the folder of the run")
        for name, part in vars(self).items():
            if hasattr(part, "problems"):
                found += [f"{name}.{problem}" for problem in part.problems()]
        try:
            build_prior(self)
        except priors.PriorError as error:
            found.append(f"prior: {error}")
        else:
            if self.prior["name"] == "disk" and self.validation.every and self.validation.rows:
                found.append("validation.rows must be [] with prior=disk, which has the tables of a run's steps only")
        if self.init_weights is not None and not Path(self.init_weights).exists() and not self.has_checkpoint:
            found.append(f"init_weights is {self.init_weights!r}; there is no such file or run directory")
        return found + self.too_few_tables((self.trainer.devices or 1) * (self.trainer.nodes or 1))

    def too_few_tables(self, processes: int) -> list[str]:
        return [
            f"curriculum.stages.{name}.tables is {stage.tables}, fewer than the {processes} processes"
            for name, stage in self.curriculum.stages.items()
            if stage.tables < processes
        ]

    def start_problems(self) -> list[str]:
        """What keeps the run from starting on this machine, now; `problems` hold on all machines."""
        found = []
        if problem := unusable_folder(Path(self.run_dir)):
            found.append(f"run_dir is {self.run_dir!r}; {problem}")
        if self.trainer.accelerator == "cuda" and not torch.cuda.is_available():
            found.append("trainer.accelerator is 'cuda'; torch finds no GPU on this machine")
        if self.prior["name"] == "disk":
            steps = [stage.tables for stage in self.curriculum.stages.values() for _ in range(stage.steps)]
            found += [f"prior.{line}" for line in build_prior(self).missing_steps(self.seed, steps[: self.total_steps])]
        return found

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has begun, and goes on from a checkpoint of its own."""
        return any(Path(self.run_dir, "checkpoints").glob("step-*.ckpt"))

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run: all stages, cut at trainer.max_steps."""
        steps = sum(stage.steps for stage in self.curriculum.stages.values())
        return steps if self.trainer.max_steps is None else min(steps, self.trainer.max_steps)


def flatten(values: dict, prefix: str = "") -> dict:
    """Nested values by their dotted names."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def build_prior(config: RunConfig) -> priors.Prior:
    if not isinstance(config.prior, dict) or "name" not in config.prior:
        raise priors.PriorError(f"none is chosen; say prior=NAME, one of {', '.join(priors.prior_names())}")
    options = dict(config.prior)
    return priors.build_prior(options.pop("name"), **options)


def register() -> None:
    """Tell Hydra the schemas: the run's, and one a prior, from the prior's own fields."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for name in priors.prior_names():
        cls = priors.prior_class(name)
        schema = dataclasses.make_dataclass(cls.__name__, [("name", str, field(default=name))], bases=(cls,))
        store.store(group="prior/schema", name=name, node=schema, package="prior")


def compose(
    overrides: list[str],
    config_name: str = "train",
    config_path: str | None = None,
    config_dir: str | None = None,
    also: Collection[str] = (),
) -> RunConfig:
    """The checked configuration of a command line; raises ConfigError with every problem found.

    config_name, config_path, config_dir: Hydra's options of these names
    also: keys that are no settings of a run, but that the command takes as well
    """
    with config_files(config_name, config_path, config_dir):
        return compose_one(config_name, add_stages(overrides), also)


def compose_sweep(
    overrides: list[str], config_name: str, config_path: str | None, config_dir: str | None
) -> list[RunConfig]:
    """The checked configurations of all jobs of a sweep; raises ConfigError with their problems, each once."""
    configs: list[RunConfig] = []
    found: dict[str, None] = {}
    with config_files(config_name, config_path, config_dir):
        for combination in combinations(add_stages(overrides)):
            try:
                configs.append(compose_one(config_name, combination))
            except ConfigError as error:
                if found.keys() >= set(error.problems):
                    break  # a typo is in every job; to sort one out takes a second
                found |= dict.fromkeys(error.problems)
    if found:
        raise ConfigError(list(found))
    return configs


@contextlib.contextmanager
def config_files(config_name: str, config_path: str | None, config_dir: str | None) -> Iterator[None]:
    """Within it Hydra composes from the folders that its options name; raises ConfigError where there are none."""
    for option, folder in (("--config-path", config_path), ("--config-dir", config_dir)):
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError([f"{option} is {folder!r}; there is no such folder"])
    register()
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    search_path = create_config_search_path(os.path.abspath(config_path or CONFIG_DIR))
    if config_dir is not None:  # where Hydra's own main puts it
        search_path.prepend("command-line", f"file://{os.path.abspath(config_dir)}", SearchPathQuery(provider="schema"))
    try:
        loader = Hydra.create_main_hydra2("tabicl-train", search_path).config_loader
        if not loader.repository.config_exists(config_name):
            raise ConfigError([f"--config-name is {config_name!r}; there is no such file in the folders searched"])
        yield
    finally:
        GlobalHydra.instance().clear()


STAGES = "curriculum.stages"
NEW_STAGE = re.compile(r"\+{1,2}(curriculum\.stages\.([^.=]+)[.=].*)", re.DOTALL)


def add_stages(overrides: list[str]) -> list[str]:
    """+curriculum.stages.NAME.KEY=VALUE as Hydra understands it: a new stage with its defaults, and values of it.

    Hydra cannot add to a typed dictionary key by key, but it merges an entry into it.
    """
    matches = [NEW_STAGE.fullmatch(text) for text in overrides]
    if not any(matches):
        return overrides
    names = dict.fromkeys(match[2] for match in matches if match)
    first = next(index for index, match in enumerate(matches) if match)
    plain = [match[1] if match else text for match, text in zip(matches, overrides, strict=True)]
    return [*plain[:first], f"+{STAGES}={{{','.join(f'{name}:{{}}' for name in names)}}}", *plain[first:]]


def combinations(overrides: list[str]) -> Iterator[list[str]]:
    """The overrides of every job of a sweep. Of an interval, which a sampling sweeper draws from, its start."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    choices = []
    for text in overrides:
        choices.append([text])
        with contextlib.suppress(HydraException):  # what cannot be read is told where it is composed
            override = parser.parse_overrides([text])[0]
            if override.is_discrete_sweep():
                choices[-1] = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            elif override.is_interval_sweep():
                choices[-1] = [f"{override.get_key_element()}={override.value().start}"]
    return map(list, itertools.product(*choices))


def compose_one(config_name: str, overrides: list[str], also: Collection[str] = ()) -> RunConfig:
    try:
        tree = hydra_compose(config_name, overrides)
    except COMPOSE_ERRORS as error:
        raise ConfigError(sort_out(config_name, overrides, also) or [first_lines(error)]) from None
    return to_config(tree)


def to_config(tree: DictConfig) -> RunConfig:
    """The composed tree as checked dataclasses; raises ConfigError."""
    if found := find_problems(tree):
        raise ConfigError(found)
    return to_dataclasses(tree)


def from_values(values: dict) -> RunConfig:
    """The configuration that a checkpoint keeps as plain values."""
    return to_config(OmegaConf.merge(OmegaConf.structured(RunConfig), values))


def find_problems(tree: DictConfig) -> list[str]:
    if OmegaConf.get_type(tree) is not RunConfig:
        return ["the configuration has no schema; its file must begin with defaults: [run_schema, ...]"]
    try:
        config = to_dataclasses(tree)
        infinite = not_finite(config)
        others = [p for p in config.problems() if not p.startswith(tuple(f"{key} " for key in infinite))]
        return unknown_keys(tree, RunConfig, every_key(tree)) + list(infinite.values()) + others
    except OmegaConfBaseException as error:
        return [first_lines(error)]


# Limits that inf switches off. Anywhere else it is a mistake, and nan always is: comparisons with it pass unnoticed.
UNLIMITED = (".clip", "guard.loss", "guard.multiplier", "guard.multiplier_loss", "stream.prefetch_gib")


def not_finite(config: RunConfig) -> dict[str, str]:
    """What is wrong with the numbers that are nan or infinite, by their keys."""
    found = {}
    for key, value in flatten(dataclasses.asdict(config)).items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, float) or math.isfinite(number):
                continue
            if number != math.inf or not key.endswith(UNLIMITED):
                found[key] = f"{key} is {value}; it must be a finite number"
    return found


def to_dataclasses(tree: DictConfig) -> RunConfig:
    config = OmegaConf.to_object(tree)
    config.curriculum.drop_skipped()
    config.prior = OmegaConf.to_container(tree.prior, resolve=True) if tree.prior is not None else None
    return config


def sort_out(config_name: str, overrides: list[str], also: Collection[str]) -> list[str]:
    """Everything that is wrong with overrides that Hydra cannot compose: it stops at the first problem.

    Each is tried by itself: first what says where configurations lie, then the choices of groups, then the values.
    """
    found, parsed = [], []
    usable: list[str] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            found.append(f"{text!r} is not of the form key=value")
            continue
        if override.key_or_group == "hydra.searchpath":
            usable.append(text)
        else:
            parsed.append((text, override))
    options = {text: group_options(config_name, override.key_or_group, usable) for text, override in parsed}
    groups = [(text, override) for text, override in parsed if options[text]]
    values = [(text, override) for text, override in parsed if not options[text]]
    added_stages = [text for text, override in values if override.is_add() and override.key_or_group == STAGES]
    wrong = set()
    for text, override in groups:
        try:
            hydra_compose(config_name, [*usable, text])
            usable.append(text)
        except COMPOSE_ERRORS as error:
            wrong.add(override.key_or_group)
            found.append(wrong_choice(override, options[text]) or first_lines(error))
    try:
        tree = hydra_compose(config_name, [*usable, *added_stages])
    except COMPOSE_ERRORS as error:
        return [*found, first_lines(error)]
    # A wrong choice leaves open which stages there are and which options the prior has, and nearly all else.
    open_keys = tuple(f"{group}." for group in (STAGES, "prior") if wrong & {"experiment", group.partition(".")[0]})
    for text, override in values:
        try:
            hydra_compose(config_name, [*usable, text])
            usable.append(text)
        except COMPOSE_ERRORS as error:
            missing = None if override.is_add() else missing_key(tree, override.key_or_group, also)
            if missing is None or not override.key_or_group.startswith(open_keys):
                found.append(missing or wrong_value(override, error))
    with contextlib.suppress(*COMPOSE_ERRORS):
        others = find_problems(hydra_compose(config_name, usable))
        found += [p for p in others if not p.startswith(("",) if "experiment" in wrong else tuple(wrong))]
    return list(dict.fromkeys(found))


def group_options(config_name: str, key: str, search_path: list[str]) -> list[str]:
    """The choices of a group of configurations; none where the key is not a group's."""
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(key, config_name=config_name, overrides=search_path))


def wrong_choice(override: Override, choices: list[str]) -> str | None:
    if override.value() in choices:
        return None
    return f"{override.key_or_group}={override.value()}: there is no such choice; there are {', '.join(choices)}"


def missing_key(tree: DictConfig, key: str, also: Collection[str]) -> str | None:
    """The message for a key that the configuration does not have, with the nearest one that it has."""
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            known = list(node) if isinstance(node, DictConfig) else []
            prefix = ".".join(parts[:depth])
            if prefix == STAGES:
                adding = "" if depth + 1 == len(parts) else f" (+{prefix}.{part}.KEY=VALUE adds a stage)"
                return unknown(prefix, part, known) + adding
            return unknown(prefix, part, [*known, *also] if depth == 0 else known, parts[-1], every_key(tree))
        node = node[part]
    return None


def every_key(tree: DictConfig) -> list[str]:
    return list(flatten(OmegaConf.to_container(tree)))


def unknown(prefix: str, key: str, known: list[str], last: str | None = None, everywhere: Collection[str] = ()) -> str:
    """The message for a key that is not among the `known` ones under `prefix`, with what may have been meant.

    last: the last part of the whole key, which may be the name of a setting elsewhere
    everywhere: the dotted keys of all settings
    """
    where = f"{prefix}." if prefix else ""
    by_name: dict[str, list[str]] = {}
    for path in everywhere:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    last = last or key
    siblings = [where + name for name in closest(key, known)]
    near = [*siblings, *by_name.get(last, [])] if last == key else by_name.get(last, siblings)
    near = near or [path for name in closest(last, by_name) for path in by_name[name]]
    if near:
        return f"{where}{key}: no such setting; did you mean {' or '.join(near[:3])}?"
    return f"{where}{key}: no such setting; there are {', '.join(map(str, known))}"


def closest(name: str, names: Collection[str]) -> list[str]:
    """The most similar one, if any; at a similarity of 0.5 tabel was taken for trainer."""
    return difflib.get_close_matches(name, names, n=1, cutoff=0.7)


def wrong_value(override: Override, error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{override.key_or_group}: {str(cause).splitlines()[0]}"


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines[:3] if not line.startswith("object_type"))


def unknown_keys(tree: DictConfig, cls: type, everywhere: Collection[str], prefix: str = "") -> list[str]:
    """Keys that `+key=value` added to a typed node; Hydra lets them through, and nothing would ever read them."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    found = []
    for key in tree:
        path = f"{prefix}{key}"
        if key not in fields:
            elsewhere = [name for name in everywhere if not f"{name}.".startswith(f"{path}.")]
            found.append(unknown(prefix.rstrip("."), str(key), list(fields), None, elsewhere))
        elif path == "curriculum":
            for name, stage in tree.curriculum.stages.items():
                found += unknown_keys(stage, StageConfig, everywhere, f"{path}.stages.{name}.")
        elif isinstance(tree._get_node(key), DictConfig) and path != "prior":
            node_type = OmegaConf.get_type(tree, key)
            if dataclasses.is_dataclass(node_type):
                found += unknown_keys(tree[key], node_type, everywhere, f"{path}.")
    return found
