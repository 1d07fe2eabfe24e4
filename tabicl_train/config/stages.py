"""The curriculum: which tables a run is trained on, in which order, and how it learns from them; the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tabicl_train.config.checks import at_least, one_of, ordered_pair, positive, within

if TYPE_CHECKING:
    from priors import Prior
    from tabicl_train.model.family import NetworkConfig

SCHEDULES = ("cosine", "linear", "wsd", "constant")

ROW_DISTRIBUTIONS = ("uniform", "log_uniform")


@dataclass
class OptimizerConfig:
    """Muon (https://kellerjordan.github.io/posts/muon) and AdamW. Learning rates and weight decay belong to a stage."""

    name: str = "muon"
    """muon (hidden matrices; AdamW for the rest), muon_all (everything, as published) or adamw."""
    momentum: float = 0.9
    """Nesterov momentum of Muon, in [0, 1)."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of AdamW's two moments, each in [0, 1)."""
    eps: float = 1e-8
    """Term added to the denominator of AdamW."""
    cautious_weight_decay: bool = False
    """Decay only the weights that the update itself moves toward zero (arXiv 2510.12402)."""

    def problems(self) -> list[str]:
        from tabicl_train.optimizer import OPTIMIZERS  # on first use, as it imports torch

        problems = one_of("name", self.name, tuple(OPTIMIZERS))
        if not 0 <= self.momentum < 1:
            problems.append(f"momentum is {self.momentum}; it must lie in [0, 1)")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            problems.append(f"betas is {list(self.betas)}; it must be two numbers in [0, 1)")
        return problems + positive(eps=self.eps)


@dataclass
class StageConfig:
    """One stage of the curriculum. The defaults are stage 1 of TabICLv2 (arXiv 2602.11139)."""

    steps: int = 1000
    """Optimizer steps of the stage."""
    rows: list[int] = field(default_factory=lambda: [1024, 1024])
    """Range [lowest, highest] of the rows of a table, labeled and query rows together."""
    row_distribution: str = "log_uniform"
    """Distribution of the rows within their range: uniform or log_uniform."""
    small_share: float = 0.0
    """Share of the groups of tables, 0..1, whose rows are drawn from small_rows instead of rows."""
    small_rows: list[int] = field(default_factory=lambda: [100, 1024])
    """Range [lowest, highest] of the rows of those groups."""
    train_share: list[float] = field(default_factory=lambda: [0.3, 0.9])
    """Range of the labeled share of the rows, drawn uniformly, both ends inside (0, 1)."""
    features: list[int] = field(default_factory=lambda: [1, 100])
    """Range [lowest, highest] of the number of features, drawn uniformly."""
    tables: int = 64
    """Tables of one optimizer step, over all processes."""
    group_size: int = 4
    """Consecutive tables of a step that have the same rows, split and number of features."""
    pack_tokens: int = 2_500_000
    """Largest number of tokens in one forward pass, over all its tables; a single table may have more. With the default
    model a table has a token for each cell and 12 more for each row; its activations take about 45 KB a token
    in fp32, and 25 in bf16 on a GPU."""
    mix: dict[str, float] = field(default_factory=dict)
    """Shares of the components of prior=mix_scm in this stage, in proportion: {tables: 0.5, mlp_scm: 0.3}. A component
    that is not named has none; {} takes the components' weights."""
    learning_rate: float = 8e-4
    """Peak learning rate."""
    schedule: str = "cosine"
    """Learning rate after warmup: cosine, linear, wsd (constant, then a linear decay) or constant."""
    warmup: float = 0.01
    """Share of the stage's steps, 0..1, over which the learning rate rises linearly to its peak."""
    decay: float = 0.2
    """Share of the stage's steps, 0..1, over which the learning rate falls with schedule=wsd."""
    final_learning_rate: float = 1e-7
    """Learning rate at the end of the stage."""
    clip: float = 10.0
    """Largest gradient norm; larger gradients are scaled down to it, and inf never clips."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied by the learning rate at each step."""
    fresh_optimizer: bool = True
    """Start the stage with an empty optimizer state instead of the momenta of the stage before."""
    frozen: list[str] = field(default_factory=list)
    """Parts of the network that keep their weights: column, row, icl; of a sequence model: embedding, blocks, head."""
    checkpoint_rows: int | None = None
    """Recompute activations of tables with more rows than this (0: never); null takes model.checkpoint_rows."""

    @property
    def row_ranges(self) -> dict[str, list[int]]:
        """The ranges that numbers of rows are drawn from, by the names of their settings."""
        ranges = {"rows": self.rows, "small_rows": self.small_rows if self.small_share > 0 else []}
        return {name: rows for name, rows in ranges.items() if rows}

    def problems(self) -> list[str]:
        from priors.table import MIN_ROWS

        problems = at_least(1, steps=self.steps, tables=self.tables, group_size=self.group_size)
        problems += at_least(1, pack_tokens=self.pack_tokens) + at_least(0, checkpoint_rows=self.checkpoint_rows)
        problems += ordered_pair("rows", self.rows, MIN_ROWS) + ordered_pair("small_rows", self.small_rows, MIN_ROWS)
        problems += ordered_pair("features", self.features, 1)
        problems += one_of("row_distribution", self.row_distribution, ROW_DISTRIBUTIONS)
        problems += one_of("schedule", self.schedule, SCHEDULES)
        share = self.train_share
        if len(share) != 2 or not 0 < share[0] <= share[1] < 1:
            rule = "[lowest, highest] inside (0, 1), 0 and 1 excluded"
            problems.append(f"train_share is {list(share)}; it must be {rule}")
        problems += within(0, 1, small_share=self.small_share, warmup=self.warmup, decay=self.decay)
        problems += positive(learning_rate=self.learning_rate, clip=self.clip)
        if self.learning_rate > 0 and not 0 <= self.final_learning_rate <= self.learning_rate:
            problems.append(f"final_learning_rate is {self.final_learning_rate}; it must lie in 0..learning_rate")
        return problems + at_least(0, weight_decay=self.weight_decay)


@dataclass
class CurriculumConfig:
    """The stages of a run."""

    stages: dict[str, StageConfig] = field(default_factory=dict)
    """Stages by name, in the order they run; +curriculum.stages.NAME.KEY=VALUE adds one."""
    start: str | None = None
    """First stage to run, for a run from init_weights; the stages before it are left out."""

    def problems(self) -> list[str]:
        if not self.stages:
            return ["stages is empty; a run needs at least one"]
        problems = one_of("start", self.start, tuple(self.stages)) if self.start is not None else []
        return problems + [f"stages.{name}.{p}" for name, stage in self.stages.items() for p in stage.problems()]

    def unfit(self, model: NetworkConfig) -> list[str]:
        """What the stages ask of a network that its family cannot do."""
        from tabicl_train.model.config import family_of

        family, problems = family_of(model), list[str]()
        for name, stage in self.stages.items():
            found = [line for part in stage.frozen for line in one_of("frozen", part, tuple(family.parts))]
            if set(stage.frozen) == set(family.parts):
                found.append("frozen names every part; nothing would be trained")
            for key, rows in stage.row_ranges.items():
                if stage.features and (line := family.size_problem(model, rows[-1], stage.features[-1])):
                    found.append(f"{key} is {list(rows)}; {line}")
            problems += [f"stages.{name}.{line}" for line in found]
        return problems

    def parts(self, prior: Prior) -> dict[str, Prior]:
        """The parts of a prior, see priors.real.parts, from which the stages draw."""
        from priors.real import parts

        return parts(prior, [stage.mix for stage in self.stages.values()])

    def unserved(self, prior: Prior, is_regression: bool) -> list[str]:
        """What the stages ask of a prior that it does not have: shares of components, and real tables that are long
        enough for the longest tables."""
        from priors import PriorError

        problems = []
        for name, stage in self.stages.items():
            try:
                mixed = prior.mixed(stage.mix)
            except PriorError as error:
                problems.append(f"stages.{name}.mix is {stage.mix}; {error}")
                continue
            for key, rows in stage.row_ranges.items():
                problems += long_enough(f"stages.{name}.{key}", max(rows), mixed, is_regression)
        return problems

    def eligible_tables(self, prior: Prior, is_regression: bool) -> list[str]:
        """For each stage, how many real tables are long enough, in a line; [] if the prior has no real tables."""
        from priors.real import real_tables

        lines = []
        for name, stage in self.stages.items():
            real = real_tables(prior.mixed(stage.mix))
            few, many = (real.eligible(rows, is_regression) if real else None for rows in stage.rows)
            if few and many:
                low, high = stage.rows
                lines.append(
                    f"stage {name}: {few[0]} of {few[1]} tables have {low:,} rows, and {many[0]} have {high:,}"
                )
        return lines

    def drop_skipped(self) -> None:
        """Leave out the stages before `start`."""
        if self.start in self.stages:
            names = list(self.stages)
            self.stages = {name: self.stages[name] for name in names[names.index(self.start) :]}


def long_enough(name: str, rows: int, prior: Prior, is_regression: bool) -> list[str]:
    """The problem with a number of rows that none of a prior's real tables has."""
    from priors.real import real_tables

    real = real_tables(prior)
    eligible = None if real is None else real.eligible(rows, is_regression)
    if eligible is None or eligible[0] > 0:
        return []
    if eligible[1] == 0:  # in validation only: a prior of which no table is drawn in training has a problem of its own
        advice = f"raise the prior's validation_fraction, or choose {name}=[]"
        return [f"{name} asks for real tables, but none is for validation; {advice}"]
    return [f"{name} has tables of {rows} rows; none of the {eligible[1]} real tables for it is that long"]
