"""The settings of a sweep, and what tabicl-sweep has in place of Hydra's launchers and sweepers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tabicl_train.config.checks import at_least, one_of
from tabicl_train.errors import install, is_installed

EVENTS, SETTINGS = "jobs.jsonl", "sweep.yaml"  # files in the folder of a sweep; sweep/journal.py describes them

METHODS = ("grid", "random", "tpe")

PRUNERS = ("none", "median", "halving")

EXECUTORS = ("local", "slurm", "ray")


@dataclass
class SweepConfig:
    """Many runs of `tabicl-train`, one for each point of a space and each seed."""

    name: str = "sweep"
    """Name of the sweep; its folder is runs/NAME unless run_dir is set."""
    settings: list[str] = field(default_factory=list)
    """Settings of every job, as on the command line of tabicl-train; those given on the command line win over them and
    over those in `space`."""
    space: dict[str, Any] = field(default_factory=dict)
    """What varies: KEY: [VALUE, ...] for a setting or a group; KEY: {low: , high: } with log: true or integer: true if
    wanted, for random and tpe; or NAME: {LABEL: [SETTING=VALUE, ...], ...} for settings that change together."""
    method: str = "grid"
    """grid (all combinations), random, or tpe (Optuna's search, which learns from the points before)."""
    trials: int = 20
    """Number of points that random and tpe try."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Each point is run with each of these seeds, and judged by the mean."""
    metric: str | None = None
    """What jobs are compared by: real/loss, real/roc_auc, real/accuracy, the loss or accuracy of held-out tables
    (synthetic/loss, synthetic/accuracy, own/loss, own/accuracy), or loss (of training); for regression also real/r2,
    synthetic/r2 and own/r2, but no ROC AUC and accuracy. null takes real/loss, or loss without validation on real
    data."""
    pruner: str = "none"
    """Stops jobs that do worse than others at the same step: none, median, or halving (successive halving)."""
    jobs: int | None = None
    """Jobs that run at once; null takes as many as there are devices, or cores for them; slurm and ray then
    get all jobs of a grid at once."""
    executor: str = "local"
    """Where jobs run: local (this machine), slurm (through submitit), or ray (the cluster of RAY_ADDRESS, or this
    machine)."""
    slurm: dict[str, Any] = field(default_factory=dict)
    """What submitit requests for a job, such as {slurm_partition: gpu, timeout_min: 600, gpus_per_node: 1}."""
    max_hours: float | None = None
    """Hours after which the sweep stops; its jobs save, and the same command continues it."""
    retry_failed: bool = False
    """Start failed jobs again."""

    def problems(self) -> list[str]:
        problems = one_of("method", self.method, METHODS) + one_of("pruner", self.pruner, PRUNERS)
        problems += one_of("executor", self.executor, EXECUTORS) + at_least(1, trials=self.trials)
        problems += at_least(1, jobs=self.jobs) if self.jobs is not None else []
        problems += [f"seeds holds {seed}; a seed must be at least 0" for seed in self.seeds if seed < 0]
        if not self.seeds:
            problems.append("seeds is empty; name at least one")
        if self.max_hours is not None and not self.max_hours > 0:
            problems.append(f"max_hours is {self.max_hours}; it must be positive")
        if self.slurm and self.executor != "slurm":
            problems.append("slurm has no effect with executor=" + self.executor)
        if self.method == "tpe" and self.executor != "local" and self.jobs is None:
            problems.append(f"jobs is null; set how many jobs of a search run at once with executor={self.executor}")
        return problems + self.missing_packages()

    def missing_packages(self) -> list[str]:
        needed = {}
        if self.method == "tpe" or self.pruner != "none":
            setting = "method=tpe" if self.method == "tpe" else f"pruner={self.pruner}"
            needed["optuna"] = (setting, "sweep")
        if self.executor == "slurm":
            needed["submitit"] = ("executor=slurm", "slurm")
        if self.executor == "ray":
            needed["ray"] = ("executor=ray", "ray")
        return [
            f"{setting} needs {package}: {install(package, extra)}"
            for package, (setting, extra) in needed.items()
            if not is_installed(package)
        ]


@dataclass
class SweepRoot:
    """What Hydra composes a sweep into."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """The sweep."""


LAUNCHERS = {"submitit_slurm": "sweep.executor=slurm", "joblib": "sweep.jobs=N", "ray": "sweep.executor=ray"}


def hydra_sweep_problems(overrides: list[str]) -> list[str]:
    """Refuses Hydra's own way to run several jobs, naming the setting that does the same here."""
    problems = []
    for text in overrides:
        key, _, value = text.partition("=")
        key = key.lstrip("+~")
        if key == "hydra/launcher":
            same = next((ours for name, ours in LAUNCHERS.items() if value.startswith(name)), "sweep.executor=local")
        elif key == "hydra/sweeper":
            same = "sweep.method=grid" if value == "basic" else "sweep.method=tpe"
        elif key == "hydra.mode":
            same = "-m, or tabicl-sweep," if "MULTIRUN" in value else "tabicl-train without -m"
        elif key.startswith("hydra.launcher"):
            same = "sweep.jobs=N or sweep.slurm={...}"
        elif key.startswith("hydra.sweeper"):
            same = "sweep.trials=N, sweep.method=... or sweep.space"
        elif key.startswith("hydra.sweep"):
            same = "run_dir=FOLDER"
        else:
            continue
        problems.append(f"{text}: sweeps do not use Hydra's launchers and sweepers; {same} does the same")
    return problems
