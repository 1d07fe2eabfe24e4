"""What a run measures about itself: a row of metrics.csv per logged step, and the progress line."""

from __future__ import annotations

import resource
import sys
import time

import torch
from torch import Tensor

from tabicl_train.callbacks.loggers import Log, training_values
from tabicl_train.callbacks.progress import Progress
from tabicl_train.compiling import count_graphs, too_many_graphs
from tabicl_train.config.schema import RunConfig, build_prior
from tabicl_train.console import counted, info
from tabicl_train.curriculum import stage_at
from tabicl_train.distributed.ranks import Ranks
from tabicl_train.model.families import family_of
from tabicl_train.model.family import NetworkConfig
from tabicl_train.model.pack import Pack
from tabicl_train.module import Pretraining
from tabicl_train.planning.flops import peak_flops
from tabicl_train.run_dir.records import Records
from tabicl_train.run_dir.tables_seen import TablesSeen
from tabicl_train.schedules import learning_rate
from tabicl_train.stream import StepItem
from tabicl_train.workers import Loader

SEEN_EVERY = 600.0  # seconds between lines about the real tables that were drawn
SECONDS = 10.0  # of training or drawing, before the two are compared

COLUMNS = (
    "step", "stage", "loss", "grad_norm", "lr", "tables_per_s", "cells_per_s", "data_wait", "accept_rate", "skipped",
    "clipped", "tflops_per_s", "peak_share", "memory_gb",
)  # fmt: skip


class Metrics:
    """Writes metrics.csv and shows progress, on rank 0.

    step                       optimizer steps done
    loss, grad_norm, lr        of that step
    tables_per_s, cells_per_s  of all ranks, since the previous row
    data_wait, accept_rate     since the previous row: share of the time spent waiting for tables, and of the prior's
                               draws that were accepted (this rank)
    skipped                    steps with a non-finite loss or gradient norm so far
    clipped                    share of the steps since the previous row whose gradient was clipped
    tflops_per_s               of the model on all ranks, 10^12 operations per second, without recomputed activations
    peak_share                 share of the device's peak performance, where that is known
    memory_gb                  peak of this process so far, on the device or, on a CPU, resident
    """

    def __init__(self, config: RunConfig, records: Records, loader: Loader, ranks: Ranks, log: Log) -> None:
        self.config, self.records, self.loader, self.ranks, self.log = config, records, loader, ranks, log
        self.feeding = Feeding()
        self.seen, self.told_seen = TablesSeen(build_prior(config).sources()), time.perf_counter()
        self.step = 0

    def state_dict(self) -> dict:
        """The tables that were seen, added up over all ranks."""
        if not self.seen.sizes:
            return {}
        self.keep_seen()
        return {"tables_seen": self.seen.text()}

    def load_state_dict(self, state: dict) -> None:
        """Also called with an earlier state, to which the guard goes back."""
        self.seen.load(state.get("tables_seen", "[]"))

    def keep_seen(self, is_end: bool = False) -> None:
        """Add up what was drawn, on all ranks alike, and print it every ten minutes and at the end."""
        self.seen.merge(self.ranks.sum)
        now = time.perf_counter()
        if (is_end or now - self.told_seen >= SEEN_EVERY) and (line := self.seen.line()):
            self.told_seen = now
            info(f"seen      {line}")

    def on_train_batch_start(self, item: StepItem, **_) -> None:
        self.seen.add(item.sources)  # before the guard, after the step, may go back to earlier counts

    def on_train_start(self, step: int, **_) -> None:
        self.step = step
        self.graphs, self.many_graphs = count_graphs(), False
        self.start_window()
        if self.ranks.rank == 0:
            self.progress = Progress(self.config, step)

    def start_window(self) -> None:
        self.started, self.waited = time.perf_counter(), self.loader.waited
        self.tables = self.cells = self.drawn = self.rejected = self.steps = 0
        self.flops = self.drawing = 0.0
        self.clipped: Tensor | int = 0

    def on_train_batch_end(self, step: int, item: StepItem, module: Pretraining, **_) -> None:
        self.step = step
        self.tables += item.tables
        self.drawing += item.seconds
        self.cells += sum(pack.cells for pack in item.packs) * self.ranks.size
        self.drawn += sum(map(len, item.packs))
        self.rejected += item.rejections.total()
        self.flops += sum(step_flops(self.config.model, pack) for pack in item.packs) * self.ranks.size
        _, stage, stage_step = stage_at(self.config.curriculum, item.step)
        self.clipped = self.clipped + (module.grad_norm > stage.clip)  # stays on the device
        self.steps += 1
        if is_logged(self.config, step):
            seconds = time.perf_counter() - self.started
            peak = peak_flops(module.device, module.precision.name)
            row = {
                "step": step,
                "stage": item.stage,
                "loss": module.loss.item(),
                "grad_norm": module.grad_norm.item(),
                "lr": learning_rate(stage, stage_step),
                "tables_per_s": self.tables / seconds,
                "cells_per_s": self.cells / seconds,
                "data_wait": (self.loader.waited - self.waited) / seconds,
                "accept_rate": self.drawn / (self.drawn + self.rejected),
                "skipped": int(module.skipped),
                "clipped": int(self.clipped) / self.steps,
                "tflops_per_s": self.flops / seconds / 1e12,
                "peak_share": "" if peak is None else self.flops / seconds / (peak * self.ranks.size),
                "memory_gb": peak_memory(module.device) / 1e9,
            }
            if self.ranks.rank == 0:
                self.records.append_rows("metrics.csv", {column: row[column] for column in COLUMNS})
                self.log(training_values(row), step)
                self.progress.show(row)
                busy = seconds * (1 - row["data_wait"])
                self.feeding.add(item.stage, self.tables, busy, self.drawing, self.loader.drawers)
                self.watch_graphs()
            self.start_window()

    def watch_graphs(self) -> None:
        if self.config.trainer.compile and not self.many_graphs:
            line = too_many_graphs(count_graphs() - self.graphs)
            self.many_graphs = line is not None
            if line is not None:
                info(line)

    def on_train_end(self, **_) -> None:
        if self.seen.sizes:
            self.keep_seen(is_end=True)
        if self.ranks.rank == 0:
            self.progress.close()


class Feeding:
    """Compares, once in a stage, the tables that its workers draw with those that training takes.

    On rank 0, which speaks for all ranks: their shares of a step are about the same work.
    """

    def __init__(self) -> None:
        self.stage: str | None = None

    def add(self, stage: str, tables: int, training: float, drawing: float, drawers: int) -> None:
        """Count the steps since the previous row; those up to a stage's first row are left out, as kernels are made.

        tables: of these steps, over all ranks
        training: seconds, without those of waiting for tables
        drawing: seconds of drawing, over all `drawers` processes that draw tables for a rank
        """
        if stage != self.stage:
            self.stage, self.told = stage, drawers == 0
            self.tables, self.training, self.drawing = 0, 0.0, 0.0
            return
        self.tables += tables
        self.training += training
        self.drawing += drawing / max(1, drawers)
        if not self.told and max(self.training, self.drawing) >= SECONDS:
            self.told = True
            self.tell(self.tables / self.drawing, self.tables / self.training, drawers)

    def tell(self, drawn: float, taken: float, drawers: int) -> None:
        """drawn, taken: tables/s"""
        workers = f"{counted(drawers, 'worker')} {'draws' if drawers == 1 else 'draw'}"
        info(f"feeding   {workers} {drawn:.3g} tables/s, training takes {taken:.3g} ({self.stage})")
        if drawn < taken:
            info(
                "warning   training waits for tables; more cores for more workers (stream.num_workers), other machines "
                "(stream=ray), or tables drawn beforehand (tabicl-prior dump, prior=disk) make it faster"
            )


def step_flops(config: NetworkConfig, pack: Pack) -> float:
    """FLOPs of a pack, forward and backward pass."""
    return 3 * sum(family_of(config).forward_flops(config, N, n, M) for N, n, M in pack.shapes)


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_logged(config: RunConfig, step: int) -> bool:
    """Whether the files of a run get rows after this many steps."""
    return step % config.trainer.log_every == 0 or step == config.total_steps
