"""Where a run begins: at step 0, perhaps from given weights, or at its newest checkpoint.

Rank 0 reads the files, and the other ranks get what they need from it: ranks that looked for themselves could see
different files (a slow view of a shared folder, an error of one disk, another machine's folder), and would exchange the
gradients of different steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from tabicl_train.config.schema import RunConfig, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.prediction.export import load_checkpoint
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.console import tell

HARMLESS = ("run_dir", "resume.allow_changes", "trainer.max_steps", "preflight", "preflight_steps", "init_weights")
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # weights load all the same


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    steps: optimiser steps done
    seed: that of rank 0
    checkpoint: the file that rank 0 continues from, if any
    """

    steps: int
    seed: int
    checkpoint: Path | None = None

    def problem(self, config: RunConfig) -> str | None:
        """Why a rank with this configuration cannot take part, if so."""
        return None if config.seed == self.seed else f"seed is {config.seed}, that of rank 0 {self.seed}"


def find_start(config: RunConfig) -> tuple[Start, dict | None]:
    """The newest intact checkpoint of the run and its content; raises ConfigError if it belongs to another run."""
    path, content = checkpoint.newest_valid(Path(config.run_dir, "checkpoints")) or (None, None)
    if path is None:
        return Start(0, config.seed), None
    start = Start(checkpoint.step_of(path), config.seed, path)
    refuse_changes(config, content["config"], start.steps)
    return start, content


def initial_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights of the run, checkpoint or file in the public format that `init_weights` names.

    Raises ConfigError if they cannot be read, or if their model is not the configured one.
    """
    try:
        file_config, weights = load_checkpoint(config.init_weights)
    except ConfigError as error:
        raise ConfigError([f"init_weights: {problem}" for problem in error.problems]) from None
    if different := [
        f"init_weights: the file's model has {key}={value}, the configuration model.{key}={configured}"
        for key, value in dataclasses.asdict(file_config).items()
        if (configured := getattr(config.model, key)) != value and key not in FREE_TO_CHANGE
    ]:
        raise ConfigError(different)
    return weights


def refuse_changes(config: RunConfig, saved: dict, steps: int) -> None:
    """Report what is configured otherwise than in the checkpoint; refuse what would make another run of it.

    saved: the configuration of the checkpoint
    steps: optimiser steps done; a stage of which none is done may change, and stages may follow the last one
    """
    before, now = flatten(saved), flatten(dataclasses.asdict(config))
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key not in HARMLESS]
    started = started_stages(saved["curriculum"]["stages"], steps)
    stages = list(config.curriculum.stages)
    breaking = ("model.", "prior.", "seed", "optimizer.name", *(f"curriculum.stages.{name}." for name in started))
    problems = [f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed if key.startswith(breaking)]
    unfit = [key for key in changed if key.startswith("model.") and key.removeprefix("model.") not in FREE_TO_CHANGE]
    if stages[: len(started)] != started:
        problems.append(f"the stages begun were {', '.join(started)}; now the run begins with {', '.join(stages)}")
    if problems and (unfit or not config.resume.allow_changes):
        advice = "choose a new run_dir" + ("" if unfit else ", or say resume.allow_changes=true")
        raise ConfigError([f"{config.run_dir} is another run: {line}; {advice}" for line in problems])
    for key in changed:
        tell(f"changed   {key} was {before.get(key)}, is {now.get(key)}")
    if config.init_weights not in (None, before.get("init_weights")):
        tell(f"warning   init_weights={config.init_weights} has no effect: the run continues from its own checkpoint")


def started_stages(stages: dict[str, dict], steps: int) -> list[str]:
    """The names of the stages of which a step is among the first `steps`."""
    started = []
    for name, stage in stages.items():
        if steps <= 0:
            break
        started.append(name)
        steps -= stage["steps"]
    return started
