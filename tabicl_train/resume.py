"""Where a run begins: at the beginning, or at a checkpoint that all of its processes have.

The first process chooses, and the others follow: two that look for themselves may see different files (a slow view of a
shared folder, an error of one disk), and would exchange the gradients of different steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tabicl_train.config.schema import RunConfig, flatten
from tabicl_train.errors import ConfigError
from tabicl_train.processes.processes import Processes
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint
from tabicl_train.run_dir.console import first_line, tell

HARMLESS = ("run_dir", "resume.allow_changes", "trainer.max_steps", "preflight", "preflight_steps", "init_weights")
FREE_TO_CHANGE = ("dropout", "checkpoint_rows", "col_attention_fp32", "scaling_bound")  # weights load all the same


@dataclass(frozen=True)
class Start:
    """steps: optimiser steps done; seed: of the run; checkpoint: the file, and checksum: of its content"""

    steps: int
    seed: int
    checkpoint: Path | None = None
    checksum: str | None = None


def find_start(config: RunConfig) -> tuple[Start, dict | None]:
    """The newest whole checkpoint of the run and its content; raises ConfigError where it belongs to another run."""
    path, content = checkpoint.newest_valid(Path(config.run_dir, "checkpoints")) or (None, None)
    if path is None:
        return Start(0, config.seed), None
    start = Start(checkpoint.step_of(path), config.seed, path, checkpoint.checksum(path))
    refuse_changes(config, content["config"], start.steps)
    return start, content


def follow(start: Start, config: RunConfig, processes: Processes) -> dict | None:
    """The content of the checkpoint that the first process has chosen; raises ConfigError on all processes, naming the
    ranks that cannot follow."""
    content, problem = None, None
    if config.seed != start.seed:
        problem = f"seed is {config.seed}, that of rank 0 {start.seed}"
    elif start.checkpoint is not None and processes.rank > 0:
        try:
            content = checkpoint.read(start.checkpoint)
            if checkpoint.checksum(start.checkpoint) != start.checksum:
                problem = f"{start.checkpoint} is not the file from which rank 0 continues"
        except (DamagedCheckpoint, OSError, MemoryError) as error:
            problem = f"{start.checkpoint}, from which rank 0 continues, cannot be read: {first_line(error)}"
    processes.agree(problem)
    return content


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
