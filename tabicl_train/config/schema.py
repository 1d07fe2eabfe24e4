"""The schema of a run's configuration: every option with its type, default and meaning.

An option is declared here and nowhere else; `configs/` has values. The string under each field documents it: the help
and the site's page of settings are made from these strings. What is known of a single value stands in its declaration
(`option`, in priors/options.py), and `problems()` of a section lists what contradicts other values. `compose` reports
all problems at once. Slow imports, such as torch, are inside the methods that check values, so that the help is fast.

The rest of the folder (names of the files marked * can be imported from here, too, if they are in `__all__`):

compose.py        from a command line to a checked RunConfig
checks.py         the check of a configuration as a whole: of several sections, of plug-ins, of files
on_resume.py      what it means for a run that is continued if an option differs, as the option declares
build.py *        objects from their options: callbacks, objectives, priors
options.py        options of the other commands
documentation.py  the help and the pages of all settings

Names of ../run/plain_values.py and ../run/score_names.py can be imported from here, too.
"""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from priors.errors import MIN_ROWS
from priors.options import build, option
from tabicl_train.config.build import configured_prior, options_class
from tabicl_train.doors import register
from tabicl_train.errors import ConfigError, install, is_installed
from tabicl_train.model.config import TabICLConfig, settings_of
from tabicl_train.run.plain_values import flatten, steps_of_stages
from tabicl_train.run.score_names import (
    CLASS_SCORES,
    INTERVAL,
    NUMBER_SCORES,
    OWN,
    PROBE,
    PROBES,
    QUERY_SHARE,
    REAL,
    REAL_SCORES,
    SYNTHETIC,
    judged_by,
    validation_kind,
)

if TYPE_CHECKING:
    from priors import Prior
    from tabicl_train.model.family import NetworkConfig

__all__ = [
    "CLASS_SCORES",
    "INTERVAL",
    "LARGEST_SEED",
    "NUMBER_SCORES",
    "OWN",
    "PROBE",
    "PROBES",
    "QUERY_SHARE",
    "REAL",
    "REAL_SCORES",
    "SYNTHETIC",
    "RunConfig",
    "StageConfig",
    "configured_prior",
    "flatten",
    "judged_by",
    "one_of",
    "steps_of_stages",
    "validation_kind",
]

LARGEST_SEED = 2**64 - 1  # that torch.manual_seed takes


def one_of(name: str, value: str, choices: Collection[str]) -> list[str]:
    """List the problem with a value that is not among the choices."""
    if value in choices:
        return []
    return [f"{name} is {value!r}; it must be one of {', '.join(choices)}"]


def ordered_pair(name: str, value: list) -> list[str]:
    """List the problem with a range, which must be two numbers in order."""
    if len(value) == 2 and value[0] <= value[1]:
        return []
    return [f"{name} is {list(value)}; it must be [lowest, highest]"]


@dataclass
class StageConfig:
    """One stage of the curriculum. The defaults are stage 1 of TabICLv2 (arXiv 2602.11139)."""

    steps: int = option(1000, at_least=1)
    """Optimizer steps of the stage."""
    rows: list[int] = option([1024, 1024], at_least=MIN_ROWS)
    """Range [lowest, highest] of the rows of a table, labeled and query rows together."""
    row_distribution: str = option("log_uniform", choices=("uniform", "log_uniform"))
    """Distribution of the rows within their range: uniform or log_uniform."""
    train_share: list[float] = option([0.3, 0.9])
    """Range of the labeled share of the rows, drawn uniformly; both ends lie inside (0, 1)."""
    features: list[int] = option([1, 100], at_least=1)
    """Range [lowest, highest] of the number of features, drawn uniformly. Long tables have fewer features, as in
    tabicl 2.2.0: at most 80 with more than 10,240 rows, 60 with more than 20,000, 40 with more than 30,000, 30 with
    more than 40,000, 20 with more than 50,000, 15 with more than 60,000, and 10 with more than 65,000."""
    tables: int = option(64, at_least=1)
    """Tables of one optimizer step, over all processes."""
    group_size: int = option(4, at_least=1)
    """Consecutive tables of a step that have the same rows, split and number of features."""
    pack_tokens: int = option(2_500_000, at_least=1, resume="told")  # it only changes the rounding of sums
    """Largest number of tokens in one forward pass, summed over its tables; a single table may exceed it. With the
    default model a table has one token per cell and 12 more per row. The activations of a token take about 45 KB in
    fp32, and 25 KB in bf16 on a GPU."""
    mix: dict[str, float] = option({})
    """Shares of the components of prior=mix_scm in this stage, in proportion: {tables: 0.5, mlp_scm: 0.3}. A component
    that is not named is not drawn. Default: the weights of the components."""
    learning_rate: float = option(8e-4, above=0)
    """Peak learning rate."""
    schedule: str = "cosine"
    """Learning rate after warmup: cosine, linear, wsd (constant, then a linear decay) or constant; or that of a
    plug-in."""
    schedule_options: dict[str, Any] = option({}, inf=True)  # each says which of its options may be inf
    """Options of the schedule, if it has any: {power: 2}."""
    warmup: float = option(0.01, at_least=0, at_most=1)
    """Share of the stage's steps, 0..1, over which the learning rate rises linearly to its peak."""
    decay: float = option(0.2, at_least=0, at_most=1)
    """Share of the stage's steps, 0..1, over which the learning rate falls with schedule=wsd."""
    final_learning_rate: float = 1e-7
    """Learning rate at the end of the stage; it has no effect with schedule=constant."""
    clip: float = option(10.0, above=0, inf=True)
    """Largest gradient norm; larger gradients are scaled down to it, and inf never clips."""
    weight_decay: float = option(0.01, at_least=0)
    """Decoupled weight decay, multiplied by the learning rate at each step."""
    fresh_optimizer: bool = True
    """Start the stage with an empty optimizer state instead of that of the stage before."""
    frozen: list[str] = option([])
    """Parts of the network that keep their weights; of a TabICL: column, row, icl."""
    checkpoint_rows: int | None = option(None, at_least=0)
    """Recompute activations of tables with more rows than this; 0 never recomputes. Default: model.checkpoint_rows."""
    col_attention_fp32: Any = None
    """Compute column attention in fp32 in this stage, whatever the precision: true, false, or auto (fp32 for PyTorch's
    attention, trainer.precision for the kernels of trainer.attention). Default: model.col_attention_fp32."""

    def problems(self) -> list[str]:
        """List the contradictions among the values."""
        problems = ordered_pair("rows", self.rows) + ordered_pair("features", self.features)
        if not isinstance(self.col_attention_fp32, bool) and self.col_attention_fp32 not in ("auto", None):
            problems.append(f"col_attention_fp32 is {self.col_attention_fp32}; it must be true, false, auto or null")
        share = self.train_share
        if len(share) != 2 or not 0 < share[0] <= share[1] < 1:
            rule = "[lowest, highest] inside (0, 1), 0 and 1 excluded"
            problems.append(f"train_share is {list(share)}; it must be {rule}")
        if self.schedule not in register.schedule:
            problems.append(f"schedule: {register.schedule.unknown(self.schedule)}")
        else:
            options = options_class(register.schedule[self.schedule])
            problems += build(options, self.schedule_options, "schedule_options")[1]
        if self.learning_rate > 0 and not 0 <= self.final_learning_rate <= self.learning_rate:
            problems.append(f"final_learning_rate is {self.final_learning_rate}; it must lie in 0..learning_rate")
        return problems


@dataclass
class CurriculumConfig:
    """The stages of a run."""

    stages: dict[str, StageConfig] = option({})
    """Stages by name, in the order they run; +curriculum.stages.NAME.KEY=VALUE adds one."""
    start: str | None = None
    """First stage to run, for a run that starts from init_weights; earlier stages are left out."""
    rank_costs: list[float] = option([], at_least=0, resume="told")  # it only changes the rounding of sums
    """Cost of a table for balancing ranks, in any unit: per cell, per row, and per pair of a row and a labeled row. []
    balances FLOPs; on a GPU, cells and rows are bound by memory instead."""
    scale_steps: float = option(1.0, above=0)
    """Factor for the steps of all stages, with at least one step in each: 0.1 runs the recipe in a tenth of the time.
    The saved configuration of a run has the products, and 1 here."""
    scale_rates: float = option(1.0, above=0)
    """Factor for the learning rates of all stages, including the final ones. As with scale_steps, the saved
    configuration of a run has the products, and 1 here."""

    def problems(self) -> list[str]:
        if not self.stages:
            return ["stages is empty; a run needs at least one"]
        problems = []
        if self.start is not None:
            problems += one_of("start", self.start, tuple(self.stages))
        costs = self.rank_costs
        if costs and (len(costs) != 3 or max(costs) == 0):
            problems.append(f"rank_costs is {list(costs)}; it must be [] or three numbers, for cells, rows and pairs")
        return problems

    def unsupported(self, model: NetworkConfig) -> list[str]:
        """List what the stages ask of a network that its family does not support."""
        from tabicl_train.model.config import family_of

        family = family_of(model)
        problems: list[str] = []
        for name, stage in self.stages.items():
            stage_problems: list[str] = []
            for part in stage.frozen:
                stage_problems += one_of("frozen", part, tuple(family.parts))
            if stage.frozen and set(stage.frozen) == set(family.parts):
                stage_problems.append("frozen names every part; nothing would be trained")
            if stage.col_attention_fp32 is not None and not hasattr(family, "set_col_attention_fp32"):
                why = "since this model has no column attention"
                stage_problems.append(f"col_attention_fp32 is {stage.col_attention_fp32}; it must be null, {why}")
            if stage.rows and stage.features:  # [] has been reported
                too_large = family.size_problem(model, stage.rows[-1], stage.features[-1])
                if too_large:
                    stage_problems.append(f"rows is {list(stage.rows)}; {too_large}")
            problems += [f"stages.{name}.{problem}" for problem in stage_problems]
        return problems

    def priors_by_kind(self, prior: Prior) -> dict[str, Prior]:
        """Return the priors of the synthetic and of the real tables from which the stages draw."""
        from priors.real import priors_by_kind

        return priors_by_kind(prior, [stage.mix for stage in self.stages.values()])

    def tables_before(self, step: int) -> int:
        """Count the tables of all steps before a step."""
        tables = 0
        steps_left = step
        for stage in self.stages.values():
            steps = min(steps_left, stage.steps)
            tables += steps * stage.tables
            steps_left -= steps
        return tables

    def whole_steps(self, prior: Prior) -> int:
        """Count the steps, from the first one on, for which a prior has enough tables."""
        steps = 0
        first = 0  # table of the stage
        for stage in self.stages.values():
            count = stage.steps * stage.tables
            possible = prior.stored_tables(first, count) // stage.tables
            steps += possible
            if possible < stage.steps:
                break
            first += count
        return steps

    def drop_skipped(self) -> None:
        """Leave out the stages before `start`."""
        if self.start in self.stages:
            names = list(self.stages)
            self.stages = {name: self.stages[name] for name in names[names.index(self.start) :]}

    def apply_scales(self) -> None:
        """Multiply steps and learning rates of the stages, and set the factors to 1: a second call changes nothing."""
        if not (0 < self.scale_steps < math.inf and 0 < self.scale_rates < math.inf):
            return  # `problems` and the check of finite numbers say so
        for name, stage in self.stages.items():
            fewest_steps = min(1, stage.steps)  # 1, but a number of steps that is wrong, such as 0, stays wrong
            final_rate = stage.final_learning_rate
            # The default has no effect if the rate is constant; scaled, `settings_without_effect` would take it for a
            # changed one.
            if stage.schedule != "constant" or final_rate != StageConfig.final_learning_rate:
                final_rate *= self.scale_rates
            self.stages[name] = replace(
                stage,
                steps=max(fewest_steps, round(stage.steps * self.scale_steps)),
                learning_rate=stage.learning_rate * self.scale_rates,
                final_learning_rate=final_rate,
            )
        self.scale_steps = 1.0
        self.scale_rates = 1.0


@dataclass
class OptimizerConfig:
    """Muon (https://kellerjordan.github.io/posts/muon) and AdamW. Learning rates and weight decay belong to a stage."""

    name: str = option("muon", resume="refused")
    """muon (hidden matrices; AdamW for the rest), muon_all (everything, as published), adamw, or an optimizer of a
    plug-in, with options of its own: optimizer=NAME."""
    momentum: float = option(0.9, at_least=0, below=1)
    """Nesterov momentum of Muon, in [0, 1); AdamW uses betas instead."""
    betas: list[float] = option([0.9, 0.95], at_least=0, below=1)
    """Decay rates of AdamW's two moments, each in [0, 1)."""
    eps: float = option(1e-8, above=0)
    """Term added to the denominator of AdamW."""
    adamw_factor: float = option(1.0, above=0)
    """Learning rate of the weights that AdamW updates, as a multiple of the learning rate of the stage."""

    def problems(self) -> list[str]:
        if len(self.betas) == 2:
            return []
        return [f"betas is {list(self.betas)}; it must be two numbers in [0, 1)"]


@dataclass
class TrainerConfig:
    """Devices, processes, precision and time."""

    max_steps: int | None = option(None, at_least=1, resume="start")
    """Stop the run after this many steps; schedules keep the length of their stages."""
    precision: str = option("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """fp32, bf16, fp16, or auto (bf16 on a GPU, fp32 on a CPU); weights are fp32 in all of them."""
    tf32: bool = True
    """On a GPU, multiply fp32 matrices in TF32, which has the range of fp32, a fraction of 10 bits, and many times the
    speed. It affects every product of a run in fp32; in bf16 and fp16, those of the scalable softmax and Muon."""
    deterministic: bool = False
    """On a GPU, use only deterministic algorithms, so that a resumed run equals an uninterrupted one bit for bit, as
    it always does on a CPU. The backward pass of attention is slower."""
    compile: bool | None = None
    """Compile the blocks of the network with torch.compile, for all sizes of tables at once; the first step takes a
    minute longer. Default: compile where it pays, which is on a GPU, with more than 5 million parameters and 2,000
    steps, if Triton, a compiler and Python.h are installed."""
    attention: str = option("auto", choices=("auto", "torch"))
    """On a GPU, auto uses the Triton kernels of this package for attention in rows and columns, and for the query-aware
    scalable softmax outside columns, if they agree with float64 at the start of the run. torch always uses PyTorch's
    operations. The kernels were tested in Triton's interpreter, not yet on a GPU."""
    cuda_graphs: str = option("auto", choices=("auto", "never"))
    """On a GPU, auto replays whole steps of a small network as CUDA graphs, with packs padded to a few sizes; padding
    changes rounding. With several ranks, compiled blocks, dropout or plug-ins it replays only the steps of the
    optimizer, and the run says why. never replays nothing. Whole steps were tested without a GPU, not yet on one."""
    accelerator: str = option("auto", choices=("auto", "cpu", "cuda"))
    """cpu, cuda, or auto (a GPU if torch finds one)."""
    plan_memory_gb: float = option(80.0, at_least=1, at_most=100_000, resume="free")
    """Memory of the GPU, in gigabytes, that `--cfg job trainer.accelerator=cuda` assumes on a machine without one."""
    devices: int | None = option(None, at_least=1, resume="free")
    """Ranks on this machine, one per device. Default: the number that torchrun started, or 1."""
    log_every: int = option(10, at_least=1, resume="free")
    """Steps between rows of metrics.csv."""
    timeout: float = option(600.0, at_least=1, at_most=1_000_000, resume="free")
    """Seconds that ranks wait for each other in a step before they fail."""
    max_hours: float | None = option(None, above=0, resume="free")
    """Hours after which the run saves a checkpoint and ends; the same command continues it. Default: no limit."""
    requeue: bool = option(False, resume="free")
    """Requeue the SLURM job when the run is preempted."""


@dataclass
class StreamConfig:
    """The processes that draw tables ahead of training."""

    name: str = option("local", choices=("local", "ray"))
    """local (worker processes of this machine) or ray (actors of a Ray cluster; the tables are the same)."""
    num_workers: int | None = option(None, at_least=0)
    """Workers (or Ray actors) that draw tables, per training process; with 0, the training process draws them itself.
    Default: one worker less than the cores available to the process, and at least one."""
    prefetch: int = option(4, at_least=1, at_most=1000)  # above it, short tables take 14 GB for each worker
    """Steps that each worker draws ahead, 1 to 1000. 64 tables of 1,024 rows take 14 MB; of 60,000 rows, about
    100 MB."""
    address: str | None = None
    """Ray cluster to draw on: HOST:PORT of its head. Default: Ray is started on this machine until the run ends."""

    def problems(self) -> list[str]:
        problems = []
        if self.name == "ray" and self.num_workers == 0:
            problems.append("num_workers is 0; it must be at least 1")
        if self.name == "ray" and self.num_workers is None:
            advice = "write stream=ray, which sets one, or stream.num_workers=4"
            problems.append(f"num_workers is null, but Ray needs a number: {advice}")
        if self.address is not None and self.name != "ray":
            problems.append(f"address is {self.address!r}, which only stream=ray uses")
        elif self.address is not None and not re.fullmatch(r"[^\s:/]+:\d+", self.address):
            problems.append(f"address is {self.address!r}; it must be HOST:PORT of the head of a Ray cluster")
        return problems

    @property
    def workers(self) -> int:
        """The number of workers, after `local` or `with_workers` has chosen one if num_workers is null."""
        assert self.num_workers is not None
        return self.num_workers

    def local(self, processes: int = 1) -> StreamConfig:
        """Return the settings of workers on this machine, whose cores are shared by this number of processes."""
        if self.num_workers == 0:
            return self
        from joblib import cpu_count

        cores = cpu_count() // processes
        workers = cores - 1  # one trains
        if self.num_workers is not None:
            workers = min(self.num_workers, cores)
        return replace(self, name="local", num_workers=max(1, workers), address=None)


@dataclass
class CheckpointConfig:
    """When checkpoints are saved and which are kept."""

    every: int = option(500, at_least=1)
    """Steps between checkpoints."""
    keep: int = option(3, at_least=1)
    """Number of newest checkpoints to keep; those saved at a preemption are deleted first."""
    permanent_every: int | None = option(None, at_least=1)
    """Never delete checkpoints of multiples of this many steps, which must be a multiple of checkpoint.every."""

    def problems(self) -> list[str]:
        wanted = self.permanent_every
        if wanted is None or self.every < 1 or wanted % self.every == 0:
            return []
        return [f"permanent_every is {wanted}; it must be a multiple of every ({self.every})"]


@dataclass
class ResumeConfig:
    """What may change when a run is continued."""

    allow_changes: bool = False
    """Continue although the seed, the prior, the kind of optimizer, a stage that has begun, or a setting of the model
    that leaves the shapes of its weights alone (dropout, checkpoint_rows, col_attention_fp32, scaling_bound) has
    changed."""


@dataclass
class GuardConfig:
    """When a run counts as failed, and what happens then.

    The limits are those of the published one-GPU run of TabICLv2, except `other_multiplier`.
    """

    skipped_in_a_row: int = option(10, at_least=1)
    """Consecutive steps with a non-finite loss or gradient norm after which the run stops."""
    action: str = option("warn", choices=("warn", "stop", "rewind"))
    """What to do when one of the limits below is exceeded: warn, stop, or rewind to an earlier checkpoint."""
    after: int = option(5000, at_least=0)
    """Steps after which the limits below apply. The published run used the length of its warmup, 1 % of 500,000."""
    loss: float = option(0.9, inf=True)
    """Limit of the moving average of the loss; inf switches it off."""
    multiplier: float = option(30.0, inf=True)
    """Limit of the softmax multiplier of the first in-context block at 512 labeled rows; inf switches it off."""
    # The largest multipliers at 512 labeled rows outside the first in-context block:
    # - 5.9 in the weights of `mini`, in column.0,
    # - 5.4 in those of its regressor, in column.0,
    # - 6.8 among the initial weights of all recipes with ten seeds each, in icl.6 of tabicl_v2.
    other_multiplier: float = option(20.0, inf=True)
    """The same limit for all other layers with a scaling rule: about three times the largest multiplier in the shipped
    weights and in the initial weights of all recipes, 6.8; inf switches it off."""
    multiplier_loss: float = 0.65
    """The limits of multipliers apply only while the moving average of the loss is above this."""


@dataclass
class AveragesConfig:
    """An average of the weights, kept in the checkpoints and exported by `tabicl-export weights=ema`."""

    ema: float = option(0.0, at_least=0, below=1)
    """Decay per step of an exponential moving average of the weights, in [0, 1); 0 keeps none."""


@dataclass
class ValidationConfig:
    """Scoring of the network during training, on validation tables of the prior and on tasks of suites."""

    every: int = option(0, at_least=0)
    """Steps between validations; 0 never validates."""
    rows: list[int] = option([128, 512, 1024], at_least=MIN_ROWS)
    """Rows of the validation tables, one set of tables for each number; [] uses no validation tables."""
    tables: int = option(16, at_least=1)
    """Validation tables for each number of rows; a mixture with your own tables has as many of each kind."""
    features: list[int] = option([2, 30], at_least=1)
    """Range [lowest, highest] of the features of the validation tables, drawn uniformly. In long tables the
    caps of `curriculum.stages.NAME.features` apply."""
    suites: list[str] = option(["sklearn"])
    """Suites of tabicl-evaluate whose tasks are also scored, with at most 200 rows, one split and one ensemble member;
    [] scores none. sklearn has four data sets, or one for regression. probes (one draw of each, with 200 labeled rows;
    smooth with 1,000) have a curve of their own, which never decides which weights are kept."""
    best: str = option(SYNTHETIC, choices=(REAL, SYNTHETIC, OWN))
    """Score that decides which weights are kept in checkpoints/best.ckpt: synthetic, own (validation tables drawn from
    real ones), or real (the tasks of suites inside the trained range, without probes). Even small networks predict
    most tasks of sklearn perfectly."""
    patience: int = option(0, at_least=0)
    """Consecutive validations without a better score after which the run ends; 0 never ends it."""

    def problems(self) -> list[str]:
        problems = ordered_pair("features", self.features)
        if self.every:  # the score that decides needs tables
            if self.best == REAL and not self.real_suites:
                problems.append(f"best is {self.best!r}, but suites is {self.suites}; set validation.best={SYNTHETIC}")
            if self.best != REAL and not self.rows:
                problems.append(f"best is {self.best!r}, but rows is empty; set validation.best={REAL}")
        if self.patience > 0 and not self.every:
            problems.append(f"patience is {self.patience}, but every is 0, which never validates")
        return problems

    @property
    def draws_tables(self) -> bool:
        """Whether the prior draws tables for validation; public real tables need no prior."""
        return self.every > 0 and bool(self.rows)

    @property
    def real_suites(self) -> list[str]:
        """The suites whose tasks count as real data."""
        return [suite for suite in self.suites if suite != PROBES]

    def unsupported(self, model: NetworkConfig) -> list[str]:
        """List what a validation asks of a network that its family does not support."""
        if not self.every:
            return []
        from tabicl_train.model.config import family_of

        family = family_of(model)
        problems = []
        if self.features:  # [] has been reported
            for rows in self.rows:
                too_large = family.size_problem(model, rows, self.features[-1])
                if too_large:
                    problems.append(f"rows is {list(self.rows)}; {too_large}")
        if self.suites and not family.predicts_real_tables:
            problems.append(f"suites is {self.suites}; it must be [], since this model predicts no real tables")
        return problems


@dataclass
class ProfileConfig:
    """A trace of a few steps, and on a GPU a snapshot of its memory, in the folder `profile` of the run."""

    step: int | None = option(None, at_least=0)
    """First step to profile, counted from 0. Default: no step is profiled."""
    steps: int = option(3, at_least=1)
    """Number of steps to profile."""


@dataclass
class WandbConfig:
    """Logging to Weights and Biases; needs the extra `wandb`."""

    mode: str = option("disabled", choices=("disabled", "offline", "online"))
    """disabled, offline, or online, which falls back to offline without an account or a network."""
    project: str = "tabicl-train"
    """Project of the wandb run."""
    name: str | None = None
    """Name of the wandb run. Default: the setting `name`."""
    group: str | None = None
    """Group of the wandb run, such as a sweep."""

    def problems(self) -> list[str]:
        if self.mode == "disabled" or is_installed("wandb"):
            return []
        return [f"mode is {self.mode!r}, but wandb is not installed: {install('wandb', 'wandb')}"]


def options_of_model(values: Mapping[str, Any]) -> Any:
    """Return the dataclass of the settings of a network by its family, or a message why there is none."""
    try:
        return settings_of(dict(values))
    except ConfigError as error:
        return f"model: {error.problems[0]}; if a plug-in registers it, add plugins=[...] to the command"


def options_of_prior(values: Mapping[str, Any]) -> Any:
    """Return the class of a prior by its name, or a message why there is none."""
    import priors

    if "name" not in values:
        return f"prior: none is chosen; set prior=NAME to one of {', '.join(priors.prior_names())}"
    try:
        return priors.prior_class(str(values["name"]))
    except priors.PriorError as error:
        return f"prior: {error}"


def options_of_objective(values: Mapping[str, Any]) -> Any:
    """Return the dataclass of the options of an objective by its name, or a message why there is none."""
    if "name" not in values:
        return f"objective: none is chosen; set objective=NAME to one of {', '.join(register.objective)}"
    name = str(values["name"])
    if name not in register.objective:
        return f"objective: {register.objective.unknown(name)}"
    return options_class(register.objective[name])


def options_of_optimizer(values: Mapping[str, Any]) -> Any:
    """Return the dataclass of the settings of an optimizer by its name, or a message why there is none."""
    name = values.get("name", "muon")
    if name in register.optimizer:
        return register.optimizer[name].settings(name)
    return f"optimizer.name is {name!r}; it must be one of {', '.join(register.optimizer)}"


@dataclass
class RunConfig:
    """Configuration of a run. `run_dir` identifies the run: the same command on the same folder continues it."""

    name: str = option("run", resume="free")
    """Name of the run, from which run_dir is made."""
    seed: int = option(0, at_least=0, at_most=LARGEST_SEED, resume="refused")
    """Seed of the weights and of the tables: table i of step s is a function of (seed, s, i)."""
    run_dir: str = option("runs/${name}", resume="free")
    """Run directory. If it contains a run, that run is continued."""
    init_weights: str | None = option(None, resume="start")
    """Weights to start from: a run directory, a checkpoint, an export, or the name of weights in the package, such as
    mini. With a name, the network is that of the weights unless `model=` is given. A warning names each setting that
    differs from that of the weights and changes what they predict, such as model.scaling_bound."""
    model: Any = option(TabICLConfig, chosen=options_of_model, resume="never")  # the settings of any family
    """The network."""
    prior: Any = option(None, chosen=options_of_prior, resume="refused")
    """Distribution from which tables are drawn: its name and its options."""
    curriculum: CurriculumConfig = option(CurriculumConfig)
    optimizer: Any = option(OptimizerConfig, chosen=options_of_optimizer)
    objective: Any = option(None, chosen=options_of_objective, resume="refused")
    """Training objective: its name and its options. Default: the loss of the network (cross entropy for classes,
    pinball loss for quantiles), which validation reports in any case."""
    auxiliary_losses: dict[str, float] = option({}, resume="refused")
    """Weights of the auxiliary losses that a network returns with its predictions, by name: {load_balance: 0.01}."""
    trainer: TrainerConfig = option(TrainerConfig)
    stream: StreamConfig = option(StreamConfig, resume="free")
    checkpoint: CheckpointConfig = option(CheckpointConfig, resume="free")
    guard: GuardConfig = option(GuardConfig)
    averages: AveragesConfig = option(AveragesConfig)
    validation: ValidationConfig = option(ValidationConfig)
    wandb: WandbConfig = option(WandbConfig, resume="free")
    tensorboard: bool = option(False, resume="free")
    """Write curves for TensorBoard to `tensorboard` in the run directory; needs the extra `tensorboard`."""
    profile: ProfileConfig = option(ProfileConfig, resume="free")
    callbacks: dict[str, Any] = option({}, inf=True, resume="free")  # each says which of its options may be inf
    """Additional callbacks, by the names of `register.callback`, with their options: +callbacks.NAME={KEY: VALUE}."""
    requires_plugins: list[str] = option([], resume="free")
    """Plug-ins that a configuration file needs. Whoever starts the command names them: plugins=[MODULE]."""
    resume: ResumeConfig = option(ResumeConfig, resume="free")

    def named_parts(self) -> Iterator[tuple[str, str]]:
        """Yield what the run uses by name: the kind, as in `tabicl_train.register`, and the name."""
        from tabicl_train.model.config import named_parts

        yield "prior", self.prior["name"]
        for component in self.prior.get("components") or ():
            yield "prior", component
        yield from named_parts(self.model)
        yield "optimizer", self.optimizer.name
        if self.objective is not None:
            yield "objective", self.objective["name"]
        for stage in self.curriculum.stages.values():
            yield "schedule", stage.schedule
        for name in self.callbacks:
            yield "callback", name
        if self.validation.every:
            of_plugins = register.suite.of_plugins()  # ours are slow to import
            yield from (("suite", name) for name in self.validation.suites if name in of_plugins)

    def plugins_used(self) -> list[dict[str, Any]]:
        """Return what a checkpoint records about the plug-ins that the run needs, each with what it is needed for."""
        return register.plugins_used(self.named_parts())

    def too_few_tables(self, processes: int) -> list[str]:
        """List the stages with fewer tables in a step than there are processes."""
        problems = []
        for name, stage in self.curriculum.stages.items():
            if stage.tables < processes:
                key = f"curriculum.stages.{name}.tables"
                problems.append(f"{key} is {stage.tables}; it must be at least {processes}, the number of processes")
        return problems

    @property
    def table_inputs(self) -> list[tuple[str, Path]]:
        """The files and folders of real tables that the prior reads, each with its setting."""
        inputs = []
        for key, value in flatten(self.prior, "prior.").items():
            if key.endswith((".file", ".folder")) and bool(value):
                inputs.append((key, Path(value)))
        return inputs

    @property
    def cores(self) -> int:
        """Cores of this machine that a training process and its workers keep busy."""
        if self.stream.address is not None:  # the workers run on a Ray cluster, whose processes here take one core
            return 1 + 1
        return 1 + self.stream.workers

    def with_workers(self, number: int) -> tuple[RunConfig, list[str]]:
        """Return the configuration with this number of workers, unless it has one, and the arguments that set it."""
        if self.stream.num_workers is not None:
            return self, []
        stream = replace(self.stream, num_workers=number)
        return replace(self, stream=stream), [f"stream.num_workers={number}"]

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has begun and will continue from its own checkpoint."""
        return bool(glob.glob("step-*.ckpt", root_dir=Path(self.run_dir, "checkpoints")))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: those of all stages, but at most trainer.max_steps."""
        steps = sum(stage.steps for stage in self.curriculum.stages.values())
        if self.trainer.max_steps is None:
            return steps
        return min(steps, self.trainer.max_steps)
