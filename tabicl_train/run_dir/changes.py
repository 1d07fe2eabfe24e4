"""What a run is configured to do, compared with the checkpoint from which it continues."""

from __future__ import annotations

import dataclasses

from tabicl_train.config.schema import RunConfig, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.run_dir.console import tell

HARMLESS = ("run_dir", "resume.allow_changes", "trainer.max_steps", "preflight", "preflight_steps", "init_weights")
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # weights load all the same


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
