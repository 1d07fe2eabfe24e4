"""The settings of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tabicl_train.config.checks import at_least, one_of
from tabicl_train.config.options import SubmitOptions
from tabicl_train.errors import ConfigError, install, is_installed

SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("none", "median", "hyperband")


@dataclass
class SweepConfig:
    """Many runs of `tabicl-train`, one for each point of a space and each seed."""

    name: str = "sweep"
    """Name of the sweep; its folder is runs/NAME unless run_dir is set."""
    settings: list[str] = field(default_factory=list)
    """Settings of every run, as on the command line of tabicl-train; those given on the command line win over them and
    over those in `space`."""
    space: dict[str, Any] = field(default_factory=dict)
    """What varies: KEY: [VALUE, ...] for a setting or a group; KEY: {low: , high: , log: , step: } for a range, whole
    numbers if both ends are; or NAME: {LABEL: [SETTING=VALUE, ...], ...} for settings that change together."""
    sampler: str = "grid"
    """Optuna's sampler of points: grid (all combinations), random, or tpe (which learns from the points before)."""
    trials: int = 20
    """Number of points that random and tpe try."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """Each point is run with each of these seeds, and judged by the mean."""
    metric: str | None = None
    """What points are compared by: real/loss, real/roc_auc, real/accuracy, the loss or accuracy of validation tables
    (synthetic/loss, synthetic/accuracy, own/loss, own/accuracy), or loss (of training); for regression also real/r2,
    synthetic/r2 and own/r2, but no ROC AUC and accuracy. null takes real/loss, or loss without validation on real
    data."""
    pruner: str = "none"
    """Optuna's pruner, which stops points that do worse than others after as many steps, judged by their first seed:
    none, median, or hyperband."""
    jobs: int | None = None
    """Runs at once; null takes as many as there are devices, or cores for them, or on SLURM all."""
    submit: SubmitOptions = field(default_factory=lambda: SubmitOptions(cluster="local"))
    """Where the runs go: the options of tabicl-submit, such as sweep.submit.cluster=slurm sweep.submit.hours=4."""

    def problems(self) -> list[str]:
        problems = one_of("sampler", self.sampler, SAMPLERS) + one_of("pruner", self.pruner, PRUNERS)
        problems += at_least(1, trials=self.trials, jobs=self.jobs)
        problems += [f"seeds holds {seed}; a seed must be at least 0" for seed in self.seeds if seed < 0]
        problems += [f"submit.{problem}" for problem in self.submit.problems()]
        if not self.seeds:
            problems.append("seeds is empty; name at least one")
        if self.pruner != "none" and self.metric == "loss":
            problems.append(f"pruner is {self.pruner!r}, which needs a metric of validation; metric is 'loss'")
        if self.submit.cluster == "local" and self.submit != SubmitOptions(cluster="local"):
            problems.append("submit.cluster is 'local', where the other options of submit have no effect")
        if self.submit.cluster == "slurm" and self.jobs is None and self.sampler == "tpe":
            problems.append("jobs is null; set how many runs of a search on SLURM are submitted at once")
        return problems


def require_sweep_packages() -> None:
    """Raise ConfigError if a package that sweeps need is not installed."""
    if missing := [name for name in ("optuna", "submitit", "matplotlib", "jinja2") if not is_installed(name)]:
        raise ConfigError([f"sweeps need {', '.join(missing)}: {install(' '.join(missing), 'sweep')}"])
