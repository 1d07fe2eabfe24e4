"""Where a run begins: at the beginning, or at a checkpoint that all of its processes have.

The first process chooses, and the others follow: two that look for themselves may see different files (a slow view of a
shared folder, an error of one disk), and would exchange the gradients of different steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tabicl_train.config.schema import RunConfig
from tabicl_train.processes.processes import Processes
from tabicl_train.run_dir import checkpoint
from tabicl_train.run_dir.changes import refuse_changes
from tabicl_train.run_dir.checkpoint import DamagedCheckpoint
from tabicl_train.run_dir.console import first_line


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
    refuse_changes(config, content, start.steps)
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
