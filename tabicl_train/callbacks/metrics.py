"""What a run measures about itself: a row of metrics.csv for each logged step, and the progress line.

step, stage                of optimizer steps done, with this one; stage of the curriculum
loss, grad_norm, lr        of this step: mean loss of the tables, gradient norm before clipping, learning rate
guess_loss                 mean loss of guessing the tables of this step from labels alone
tables_per_s, cells_per_s  of all ranks, since the previous row
data_wait                  share of the time spent waiting for tables since the previous row, on rank 0
accept_rate                share of the prior's draws that were accepted since the previous row, on all ranks
skipped                    steps with a non-finite loss or gradient norm so far
clipped                    share of the steps since the previous row whose gradient was clipped
tflops_per_s               of the model on all ranks, 10^12 operations per second, without recomputed activations
peak_share                 share of the peak performance of the devices, where that is known
memory_gb                  peak of rank 0 so far, on its device or, on a CPU, resident
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tabicl_train.callbacks.loggers import Log
from tabicl_train.callbacks.progress import Progress
from tabicl_train.config.schema import CurriculumConfig
from tabicl_train.console import info
from tabicl_train.curriculum import stage_at
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.model.families import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.module import Pretraining
from tabicl_train.precision import peak_flops
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.tables_seen import TablesSeen
from tabicl_train.schedules import learning_rate
from tabicl_train.stream import StepItem
from tabicl_train.workers import Loader

__all__ = ["LoggedSteps"]


COLUMNS = (
    "step", "stage", "loss", "guess_loss", "grad_norm", "lr", "tables_per_s", "cells_per_s", "data_wait",
    "accept_rate", "skipped", "clipped", "tflops_per_s", "peak_share", "memory_gb",
)  # fmt: skip


@dataclass(frozen=True)
class LoggedSteps:
    """The steps after which the files of a run get rows, as in ``step in logged``.

    Parameters
    ----------
    every : int
        `trainer.log_every`.
    last : int
        Optimizer steps of the run.
    """

    every: int
    last: int

    def __contains__(self, step: int) -> bool:
        """Whether the files get rows after this step."""
        return step % self.every == 0 or step == self.last


class Metrics:
    """Write metrics.csv and show progress on rank 0, and count the real tables that all ranks draw."""

    def __init__(
        self,
        curriculum: CurriculumConfig,
        logged: LoggedSteps,
        records: Records,
        loader: Loader,
        ranks: Ranks,
        seen: TablesSeen,
        progress: Progress,
        log: Log,
    ) -> None:
        self.curriculum, self.logged, self.records, self.loader, self.ranks = curriculum, logged, records, loader, ranks
        self.seen, self.progress, self.log = seen, progress, log

    def state_dict(self) -> dict:
        """Return the counts of real tables, added up over all ranks."""
        if not self.seen.sizes:
            return {}
        self.seen.merge(self.ranks.sum)
        return {"tables_seen": self.seen.text()}

    def load_state_dict(self, state: dict) -> None:
        """Also called with an earlier state, to which the guard goes back."""
        self.seen.load(state.get("tables_seen", "[]"))

    def on_train_start(self, step: int, **_) -> None:
        self.start_window()
        if self.ranks.rank == 0:
            self.progress.start(step)

    def start_window(self) -> None:
        self.started, self.waited = time.perf_counter(), self.loader.waited
        self.tables = self.cells = self.drawn = self.rejected = self.steps = 0
        self.flops = 0.0
        self.clipped: Tensor | int = 0

    def on_train_batch_start(self, item: StepItem, **_) -> None:
        """Count the real tables of a step."""
        self.seen.add(item.sources)  # before the guard, after the step, may go back to earlier counts

    def on_train_batch_end(self, step: int, item: StepItem, module: Pretraining, **_) -> None:
        self.steps += 1
        self.tables += item.tables
        self.cells += sum(pack.cells for pack in item.packs)
        self.drawn += sum(map(len, item.packs))
        self.rejected += item.rejections.total()
        self.flops += sum(step_flops(module.model.config, pack) for pack in item.packs)
        _, stage, stage_step = stage_at(self.curriculum, item.step)
        self.clipped = self.clipped + (module.grad_norm > stage.clip)  # stays on the device
        if step in self.logged:
            row = self.row(step, item, module) | {"lr": learning_rate(stage, stage_step)}
            if self.ranks.rank == 0:
                row = {column: row[column] for column in COLUMNS}
                self.records.append_rows("metrics.csv", row)
                self.log({column: value for column, value in row.items() if column != "step" and value != ""}, step)
                self.progress.show(row)
            self.start_window()

    def row(self, step: int, item: StepItem, module: Pretraining) -> dict[str, object]:
        """Return the row of a logged step; all ranks call this."""
        seconds = time.perf_counter() - self.started
        guess = sum(guess_losses(module, item))
        own = torch.tensor([self.cells, self.flops, self.drawn, self.rejected, guess], dtype=torch.float64)
        cells, flops, drawn, rejected, guess = self.ranks.sum(own).tolist()
        peak = peak_flops(module.device, module.precision.name)
        return {
            "step": step,
            "stage": item.stage,
            "loss": module.loss.item(),
            "guess_loss": guess / item.tables,
            "grad_norm": module.grad_norm.item(),
            "tables_per_s": self.tables / seconds,
            "cells_per_s": cells / seconds,
            "data_wait": (self.loader.waited - self.waited) / seconds,
            "accept_rate": drawn / (drawn + rejected),
            "skipped": int(module.skipped),
            "clipped": int(self.clipped) / self.steps,
            "tflops_per_s": flops / seconds / 1e12,
            "peak_share": "" if peak is None else flops / seconds / (peak * self.ranks.size),
            "memory_gb": peak_memory(module.device) / 1e9,
        }

    def on_train_end(self, **_) -> None:
        """Print which real tables were seen, and end the progress line."""
        if self.seen.sizes:
            self.seen.merge(self.ranks.sum)
        if self.ranks.rank == 0:
            self.progress.close()
            if line := self.seen.line():
                info(f"seen      {line}")


def guess_losses(module: Pretraining, item: StepItem) -> list[float]:
    """Return the loss of guessing each table of this rank from labels alone; waits for the device for each pack."""
    return [
        module.model.guess_loss(y, n)
        for pack in item.packs
        for (_, n, _), y in zip(pack.shapes, pack.y.cpu().split([N for N, _, _ in pack.shapes]), strict=True)
    ]


def step_flops(config: NetworkConfig, pack: Pack) -> float:
    """FLOPs of a pack, forward and backward pass."""
    return 3 * sum(family_of(config).forward_flops(config, N, n, M) for N, n, M in pack.shapes)


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
