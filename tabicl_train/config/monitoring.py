"""Options of what keeps and watches a run: checkpoints, guard, averages, validation, profile, Weights and Biases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tabicl_train.config.checks import at_least, one_of, ordered_pair
from tabicl_train.errors import install, is_installed

if TYPE_CHECKING:
    from tabicl_train.model.family import NetworkConfig

GUARD_ACTIONS = ("warn", "stop", "rewind")

# What tables of validation are: of a prior, computed or drawn from real ones (as in priors/real), or public data.
SYNTHETIC, OWN, REAL = "synthetic", "own", "real"
BEST = (REAL, SYNTHETIC, OWN)

CLASS_SCORES = ("loss", "accuracy", "roc_auc", "guess_loss")  # columns of validation.csv; of regression, the next ones
NUMBER_SCORES = ("loss", "crps", "rmse", "r2", "coverage", "guess_loss")
INTERVAL = (0.1, 0.9)  # levels of the ends of the interval whose coverage is measured
QUERY_SHARE = 0.3  # of the rows of a real table
REAL_SCORES = {"roc_auc": "ROC AUC", "r2": "R2"}  # those by which the network is judged on real data, one a task

WANDB_MODES = ("disabled", "offline", "online")


def judged_by(columns: Iterable[str]) -> str:
    """Which of the REAL_SCORES a table of scores with these columns has; raises ValueError if it is not one."""
    (score,) = REAL_SCORES.keys() & set(columns)
    return score


def kind_of(data: str) -> str:
    """What a row of validation.csv is about: synthetic, own or real; data: its column."""
    return data if data in (SYNTHETIC, OWN) else REAL


@dataclass
class CheckpointConfig:
    """When checkpoints are saved and which are kept."""

    every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    permanent_every: int | None = None
    """Keep checkpoints of multiples of this many steps for good; a multiple of checkpoint.every."""

    def problems(self) -> list[str]:
        problems = at_least(1, every=self.every, keep=self.keep)
        if self.permanent_every is not None and (self.permanent_every < 1 or self.permanent_every % self.every):
            problems.append(f"permanent_every is {self.permanent_every}; it must be a multiple of every ({self.every})")
        return problems


@dataclass
class ResumeConfig:
    """What may change when a run is continued."""

    allow_changes: bool = False
    """Continue even if the seed, the prior, the kind of optimizer, a stage that has begun, or a setting of the model to
    which its weights still fit (dropout, checkpoint_rows, col_attention_fp32, scaling_bound) was changed."""


@dataclass
class GuardConfig:
    """When a run counts as failed, and what happens then.

    The limits are those of the published one-GPU run of TabICLv2.
    """

    skipped_in_a_row: int = 10
    """Consecutive steps with a non-finite loss or gradient norm after which the run stops."""
    action: str = "warn"
    """What to do when one of the limits below is passed: warn, stop, or rewind to an earlier checkpoint."""
    after: int = 5000
    """Steps after which the limits below apply; the published run used the length of its warmup."""
    loss: float = 0.9
    """Limit of the moving average of the loss; inf switches it off."""
    multiplier: float = 30.0
    """Limit of the softmax multiplier of the first in-context block at 512 labeled rows; inf switches it off."""
    multiplier_loss: float = 0.65
    """The multiplier's limit applies only while the moving average of the loss is above this."""

    def problems(self) -> list[str]:
        problems = at_least(1, skipped_in_a_row=self.skipped_in_a_row)
        problems += one_of("action", self.action, GUARD_ACTIONS)
        return problems + at_least(0, after=self.after)


@dataclass
class AveragesConfig:
    """Averages of the weights, kept in the checkpoints; `tabicl-export weights=ema` or `weights=last` writes them."""

    ema: float = 0.0
    """Decay per step of an exponential moving average of the weights, in [0, 1); 0 keeps none."""
    last: int = 0
    """Number of latest snapshots of the weights to average (LAWA, arXiv 2209.14981); 0 keeps none."""
    every: int = 500
    """Steps between these snapshots."""

    def problems(self) -> list[str]:
        problems = at_least(0, last=self.last) + at_least(1, every=self.every)
        return problems + ([] if 0 <= self.ema < 1 else [f"ema is {self.ema}; it must lie in [0, 1)"])


@dataclass
class ValidationConfig:
    """How good the network is during training: on validation tables of the prior, which are synthetic or your own, and
    on public real data."""

    every: int = 0
    """Steps between validations; 0 never validates."""
    rows: list[int] = field(default_factory=lambda: [128, 512, 1024])
    """Rows of the validation tables, one set of tables for each number; [] leaves them out."""
    tables: int = 16
    """Validation tables for each number of rows; a mixture of synthetic tables with your own has as many of both."""
    features: list[int] = field(default_factory=lambda: [2, 30])
    """Range [lowest, highest] of the features of the validation tables, drawn uniformly."""
    real_rows: int = 200
    """Largest number of rows to use of each of scikit-learn's four bundled data sets, or for regression of its set
    diabetes; 0 leaves real data out."""
    best: str = "real"
    """Which score decides the weights kept in checkpoints/best.ckpt: real, synthetic or own (validation tables
    that a prior draws from real ones)."""
    patience: int = 0
    """Validations without a better score, in a row, after which the run ends; 0 never ends it."""

    def problems(self) -> list[str]:
        from priors.table import MIN_ROWS

        problems = at_least(0, every=self.every) + at_least(1, tables=self.tables) + one_of("best", self.best, BEST)
        problems += ordered_pair("features", self.features, 1)
        problems += [problem for rows in self.rows for problem in at_least(MIN_ROWS, rows=rows)]
        if self.real_rows != 0:  # with fewer than 50, a 30 % split of ten classes could miss one
            problems += at_least(50, real_rows=self.real_rows)
        if self.every and not (self.real_rows if self.best == REAL else self.rows):
            empty = "real_rows is 0" if self.best == REAL else "rows is empty"
            problems.append(f"best is {self.best!r}, but {empty}")
        problems += at_least(0, patience=self.patience)
        if self.patience > 0 and not self.every:
            problems.append(f"patience is {self.patience}, but every is 0, which never validates")
        return problems

    def unfit(self, model: NetworkConfig) -> list[str]:
        """What a validation asks of a network that its family cannot do."""
        if not self.every:
            return []
        from tabicl_train.model.config import family_of

        family = family_of(model)
        sizes = (family.size_problem(model, rows, self.features[-1]) for rows in self.rows if self.features)
        problems = [f"rows is {list(self.rows)}; {line}" for line in sizes if line]
        if self.real_rows and not family.predicts_real_tables:
            problems.append(f"real_rows is {self.real_rows}; it must be 0, since this model predicts no real tables")
        return problems


@dataclass
class ProfileConfig:
    """A trace of a few steps, and on a GPU a snapshot of its memory, in the folder `profile` of the run."""

    step: int | None = None
    """First step to profile, counted from 0; null profiles none."""
    steps: int = 3
    """Number of steps to profile."""

    def problems(self) -> list[str]:
        return at_least(1, steps=self.steps) + at_least(0, step=self.step)


@dataclass
class WandbConfig:
    """Logging to Weights and Biases; it needs the extra `wandb`."""

    mode: str = "disabled"
    """disabled, offline, or online, which becomes offline without an account or a network."""
    project: str = "tabicl-train"
    """Project of the wandb run, which has the name of the setting `name` there."""
    group: str | None = None
    """Group of the wandb run, such as a sweep."""

    def problems(self) -> list[str]:
        problems = one_of("mode", self.mode, WANDB_MODES)
        if self.mode != "disabled" and not is_installed("wandb"):
            problems.append(f"mode is {self.mode!r}, but wandb is not installed: {install('wandb', 'wandb')}")
        return problems
