"""The schema of a run's configuration: every option with its type, default and meaning.

Hydra composes `configs/` over these dataclasses, so an option is declared here and nowhere else. The string under each
field documents it: `tabicl-train --help` and `configs/README.md` are made from these strings. `problems()` of each
dataclass lists everything wrong with its values; `compose` reports all of it at once. What takes long to import, such
as torch, is imported where values are checked, so that the help needs none of it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabicl_train.config.checks import at_least, one_of, positive
from tabicl_train.config.monitoring import (
    REAL,
    AveragesConfig,
    CheckpointConfig,
    GuardConfig,
    ProfileConfig,
    ResumeConfig,
    ValidationConfig,
    WandbConfig,
)
from tabicl_train.config.stages import CurriculumConfig, OptimizerConfig, StageConfig, long_enough
from tabicl_train.console import is_first
from tabicl_train.errors import install, is_installed, unusable_folder
from tabicl_train.model.config import TabICLConfig

if TYPE_CHECKING:
    from priors import Prior

__all__ = ["RunConfig", "StageConfig"]

PRECISIONS = ("auto", "fp32", "bf16", "fp16")

ACCELERATORS = ("auto", "cpu", "cuda")

STREAMS = ("local", "ray")
STUDY = "study.log"  # Optuna's journal, in the folder of a sweep
CONNECT = 5.0  # seconds in which the head of a Ray cluster must answer


@dataclass
class TrainerConfig:
    """Devices, processes, precision and time."""

    max_steps: int | None = None
    """Stop the run after this many steps; schedules keep the length of their stages."""
    precision: str = "auto"
    """fp32, bf16, fp16, or auto (bf16 on a GPU, fp32 on a CPU); weights are fp32 in all of them."""
    tf32: bool = True
    """On a GPU, multiply fp32 matrices in TF32: with the range of fp32, 10 bits of its fraction, and many times its
    speed. It matters for all of a run in fp32, and for the scalable softmax and Muon in the others."""
    compile: bool = False
    """Compile the blocks of the network, for all sizes of tables at once; the first steps take minutes longer."""
    triton: bool = False
    """On a GPU, rescale queries of the query-aware scalable softmax by one Triton kernel, not some forty of torch's. No
    GPU has run it yet: it was compared with torch's operations in Triton's interpreter only."""
    accelerator: str = "auto"
    """cpu, cuda, or auto (a GPU where torch finds one)."""
    devices: int | None = None
    """Ranks on this machine, one per device; null takes torchrun's number, or 1."""
    # The number is fixed because another one rounds sums differently. It is 1 because a second thread that shares its
    # core with a busy worker made a step 30 times slower (0.13 s -> 4 s on two cores).
    cpu_threads: int = 1
    """Threads of each training process on the CPU; another number changes results in the last bits."""
    log_every: int = 10
    """Steps between rows of metrics.csv."""
    timeout: float = 600.0
    """Seconds that ranks wait for each other in a step before they fail."""
    max_hours: float | None = None
    """Hours after which the run saves and ends, to be continued by the same command; null sets no limit."""
    requeue: bool = False
    """Ask SLURM to start the job again when the run is preempted."""

    def problems(self) -> list[str]:
        problems = one_of("precision", self.precision, PRECISIONS)
        problems += one_of("accelerator", self.accelerator, ACCELERATORS)
        problems += at_least(1, max_steps=self.max_steps, devices=self.devices, cpu_threads=self.cpu_threads)
        problems += at_least(1, log_every=self.log_every, timeout=self.timeout) + positive(max_hours=self.max_hours)
        return problems


@dataclass
class StreamConfig:
    """The processes that draw tables ahead of training."""

    name: str = "local"
    """local (worker processes of this machine) or ray (actors of a Ray cluster; the tables are the same)."""
    num_workers: int | None = None
    """Workers (or Ray actors) that draw tables, for each training process; with 0 workers, it draws them itself. null
    takes all cores that the process may use but one, divided by the processes that share them; at least one worker."""
    prefetch: int = 4
    """Largest number of steps whose tables each worker draws ahead."""
    # 64 tables of 1,024 rows are 14 MB, of up to 60,000 rows about 100 MB.
    prefetch_gib: float = 2.0
    """Largest amount of memory in GiB for tables drawn ahead, for each training process; inf sets no limit."""
    address: str | None = None
    """Ray cluster to draw on: HOST:PORT of its head; null starts Ray on this machine until the run ends."""

    def problems(self) -> list[str]:
        problems = one_of("name", self.name, STREAMS)
        if self.num_workers is not None:
            problems += at_least(int(self.name == "ray"), num_workers=self.num_workers)
        elif self.name == "ray":
            problems.append("num_workers is null; stream=ray needs a number")
        problems += at_least(1, prefetch=self.prefetch) + positive(prefetch_gib=self.prefetch_gib)
        if self.address is not None and self.name != "ray":
            problems.append(f"address is {self.address!r}, which only stream=ray uses")
        elif self.address is not None and not re.fullmatch(r"[^\s:/]+:\d+", self.address):
            problems.append(f"address is {self.address!r}; it must be HOST:PORT of the head of a Ray cluster")
        return problems

    def start_problems(self) -> list[str]:
        """List what keeps tables from being drawn here and now."""
        if self.name != "ray":
            return []
        if not is_installed("ray"):
            return [f"stream=ray needs Ray: {install('ray', 'ray')}"]
        if self.address is None:
            return []
        try:
            with socket.create_connection(address_of(self.address), timeout=CONNECT):
                return []
        except OSError as error:
            return [f"stream.address is {self.address!r}; no Ray cluster answers there ({error})"]

    @property
    def workers(self) -> int:
        """num_workers, once it is a number: `local` or `with_workers` decides where it is null."""
        assert self.num_workers is not None
        return self.num_workers

    def local(self, processes: int = 1) -> StreamConfig:
        """Return the same for workers of this machine, whose cores this number of processes share."""
        if self.num_workers == 0:
            return self
        from joblib import cpu_count

        cores = cpu_count() // processes
        workers = max(1, cores - 1 if self.num_workers is None else min(self.num_workers, cores))
        return replace(self, name="local", num_workers=workers, address=None)


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, taken apart."""
    host, _, port = text.rpartition(":")
    return host, int(port)


@dataclass
class RunConfig:
    """Everything about a run. `run_dir` identifies it: the same command on the same folder continues it."""

    name: str = "run"
    """Name of the run, from which run_dir is made."""
    seed: int = 0
    """Seed of the weights and of the tables: table i of step s is a function of (seed, s, i)."""
    run_dir: str = "runs/${name}"
    """Folder of the run; a run that lives there already is continued."""
    preflight: bool = False
    """Instead of training, compare a few steps in fp32 with the configured precision; and the ranks, if several."""
    preflight_steps: int = 50
    """Steps of the preflight."""
    init_weights: str | None = None
    """Weights to start from: the folder of a run, a checkpoint, or an export (a public file or a hub folder)."""
    model: Any = field(default_factory=TabICLConfig)  # the settings of any family, see model/family.py
    """The network."""
    prior: Any = None
    """The distribution that tables are drawn from: its name and its options."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """The stages of training."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Devices, processes, precision and time."""
    stream: StreamConfig = field(default_factory=StreamConfig)
    """The processes that draw tables."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Which checkpoints are saved and kept."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """When a run counts as failed, and what happens then."""
    averages: AveragesConfig = field(default_factory=AveragesConfig)
    """Averages of the weights."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """Scores during training."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights and Biases."""
    tensorboard: bool = False
    """Write the curves for TensorBoard to `tensorboard` in the run directory; it needs the extra `tensorboard`."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """A trace of a few steps."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """What may change when a run is continued."""

    def problems(self) -> list[str]:
        """List what is wrong with the values."""
        problems = at_least(0, seed=self.seed) + at_least(2, preflight_steps=self.preflight_steps)
        if not self.run_dir.strip():
            problems.append("run_dir is empty; name the folder of the run")
        for name, part in vars(self).items():
            if hasattr(part, "problems"):
                problems += [f"{name}.{problem}" for problem in part.problems()]
        if self.tensorboard and not is_installed("tensorboard"):
            problems.append(f"tensorboard is true, but it is not installed: {install('tensorboard', 'tensorboard')}")
        problems += self.prior_problems()
        no_start = self.init_weights is not None and not Path(self.init_weights).exists() and not self.has_checkpoint
        if no_start and is_first():  # which reads it for all
            problems.append(f"init_weights is {self.init_weights!r}; there is no such file or run directory")
        problems += [f"curriculum.{problem}" for problem in self.curriculum.unfit(self.model)]
        problems += [f"validation.{problem}" for problem in self.validation.unfit(self.model)]
        if self.trainer.compile and self.model.dropout > 0:
            problems.append(f"trainer.compile is true, which needs model.dropout=0; it is {self.model.dropout}")
        return problems + self.too_few_tables(self.trainer.devices or 1)

    def prior_problems(self) -> list[str]:
        """List what is wrong with the prior, or contradicts it. It is built here, anew, for the whole process."""
        from priors import PriorError
        from priors.mix_scm import MixSCM
        from priors.real import real_tables

        last_prior.cache_clear()  # the files behind it may have changed
        try:
            prior = build_prior(self.prior)
        except PriorError as error:
            return [str(error) if str(error).startswith("prior ") else f"prior: {error}"]
        parts, name, is_regression = self.curriculum.parts(prior), self.prior["name"], self.model.is_regression
        problems = []
        mixtures = [part for part in parts.values() if isinstance(part, MixSCM)]
        has_disk = name == "disk" or any("disk" in mixture.priors for mixture in mixtures)
        validates = self.validation.every > 0 and bool(self.validation.rows)
        if has_disk and validates:
            problems.append("validation.rows must be [] with prior=disk, which only has the tables of steps")
        if is_regression and not prior.numeric_targets:
            problems.append(f"prior={name} draws classes only, but model.max_classes=0 is regression")
        if not is_regression and not prior.classes:
            problems.append(f"prior={name} draws numbers only, which needs model.max_classes=0")
        if real := real_tables(prior):
            problems += [f"prior {name}: {line}" for line in real.ineligible(self.model.max_classes)]
        problems += [f"curriculum.{line}" for line in self.curriculum.unserved(prior, is_regression)]
        if validates:
            rows = max(self.validation.rows)
            for part in parts.values():
                drawn = real.for_validation() if (real := real_tables(part)) else part
                problems += long_enough("validation.rows", rows, drawn, is_regression)
            if (best := self.validation.best) != REAL and best not in parts:
                problems.append(f"validation.best is {best!r}, but all tables of the prior are {next(iter(parts))}")
        return problems

    def too_few_tables(self, processes: int) -> list[str]:
        """List the stages with fewer tables in a step than there are processes."""
        return [
            f"curriculum.stages.{name}.tables is {stage.tables}, fewer than the {processes} processes"
            for name, stage in self.curriculum.stages.items()
            if stage.tables < processes
        ]

    def start_problems(self) -> list[str]:
        """List what keeps the run from starting here and now; `problems` are the same on every machine."""
        import torch

        problems = []
        if is_first() and (problem := unusable_folder(Path(self.run_dir))):  # it need not be shared
            problems.append(f"run_dir is {self.run_dir!r}; {problem}")
        elif os.path.exists(os.path.join(self.run_dir, STUDY)):
            problems.append(f"run_dir is {self.run_dir!r}; it is the folder of a sweep, whose runs lie in it")
        bf16_on_gpu = self.trainer.precision == "bf16" and self.trainer.accelerator != "cpu"
        if self.trainer.accelerator == "cuda" and not torch.cuda.is_available():
            problems.append("trainer.accelerator is 'cuda'; torch finds no GPU on this machine")
        elif bf16_on_gpu and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            problems.append("trainer.precision is 'bf16', which the GPU of this machine lacks; use fp16 or fp32")
        if self.prior["name"] == "one_table" and self.init_weights is None and not self.has_checkpoint:
            problems.append("init_weights is not set; prior=one_table fine-tunes weights, on a single table")
        problems += self.stream.start_problems()
        return problems + self.missing_steps()

    def missing_steps(self) -> list[str]:
        """List the steps whose tables a prior=disk lacks, alone or in a mixture."""
        from priors.disk import Disk
        from priors.mix_scm import MixSCM

        prior, stages = build_prior(self.prior), self.curriculum.stages.values()
        disk, key, tables = prior, "prior", [stage.tables for stage in stages]
        if isinstance(prior, MixSCM):
            disk, key = prior.priors.get("disk", prior), "prior.components.disk"
            tables = [stage.tables if prior.mixed(stage.mix).shares.get("disk") else 0 for stage in stages]
        if not isinstance(disk, Disk):
            return []
        steps = [count for count, stage in zip(tables, stages, strict=True) for _ in range(stage.steps)]
        return [f"{key}.{line}" for line in disk.missing_steps(self.seed, steps[: self.total_steps])]

    @property
    def cores(self) -> int:
        """Cores of this machine that a training process and its workers keep busy.

        The actors of a Ray cluster have cores of their own; Ray's processes on this machine take one.
        """
        return self.trainer.cpu_threads + (self.stream.workers if self.stream.address is None else 1)

    def with_workers(self, number: int) -> tuple[RunConfig, list[str]]:
        """Set the number of workers of a job that shares its machine, since by default a run takes all cores.

        Returns the configuration, and arguments of its command that do the same.
        """
        if self.stream.num_workers is not None:
            return self, []
        return replace(self, stream=replace(self.stream, num_workers=number)), [f"stream.num_workers={number}"]

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has begun and will continue from a checkpoint of its own."""
        return any(Path(self.run_dir, "checkpoints").glob("step-*.ckpt"))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run: all stages, cut at trainer.max_steps."""
        steps = sum(stage.steps for stage in self.curriculum.stages.values())
        return steps if self.trainer.max_steps is None else min(steps, self.trainer.max_steps)


# Settings that leave the weights of a run and its scores as they are: the first words of their names.
HARMLESS = (
    *("name", "run_dir", "preflight", "tensorboard", "wandb.", "profile.", "stream.", "resume.", "checkpoint."),
    *(f"trainer.{name}" for name in ("log_every", "devices", "timeout", "max_hours", "requeue")),
)


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """Nested values by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def build_prior(settings: dict[str, Any] | None) -> Prior:
    """Build the prior with these settings, or return the one that was built last, if for the same settings.

    Checking a configuration builds its prior anew; all who ask for it later in the same process get that one.
    """
    import priors

    if not isinstance(settings, dict) or "name" not in settings:
        raise priors.PriorError(f"none is chosen; set prior=NAME to one of {', '.join(priors.prior_names())}")
    return last_prior(json.dumps(settings))


@functools.lru_cache(maxsize=1)
def last_prior(settings: str) -> Prior:
    import priors

    options = json.loads(settings)
    return priors.build_prior(options.pop("name"), **options)
