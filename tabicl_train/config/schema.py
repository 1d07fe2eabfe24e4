"""The configuration of a run: typed dataclasses, and what is wrong with a given one.

Hydra composes `configs/` over these dataclasses, so a value is declared here and nowhere else. `problems()` of each
lists everything wrong with it; `compose` reports all of them together, before anything heavy is imported.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import priors
from priors.table import MIN_ROWS
from tabicl_train.config.checks import at_least, one_of, ordered_pair
from tabicl_train.errors import install, unusable_folder
from tabicl_train.model.config import TabICLConfig
from tabicl_train.run_dir.console import is_first

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
        no_start = self.init_weights is not None and not Path(self.init_weights).exists() and not self.has_checkpoint
        if no_start and is_first(self.trainer.nodes):  # which reads it for all
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
        if is_first(self.trainer.nodes) and (problem := unusable_folder(Path(self.run_dir))):  # it need not be shared
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
