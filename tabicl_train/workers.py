"""Processes that draw the stream's items ahead of the training process.

Worker w of W draws the steps start + w, start + w + W, ..., so that items come in order. It may draw a step when the
items drawn and not yet taken, that step's included, are at most `prefetch` a worker and fit in `prefetch_gib`; the
step that is due may always be drawn, so the bound cannot stop a run. The sizes follow from the step plans, which every
worker computes for itself: the training process only says which step is due. Worker and training process are joined by
one pipe, whose end tells each that the other is gone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing  # tensors go through pipes as handles of shared memory
from torch import Tensor

from tabicl_train.config import StreamConfig
from tabicl_train.stream import StepItem, StepStream, TableBatch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ALIGNMENT = 16  # elements: 64 bytes or more, as torch allocates; matrix products may round by alignment


class WorkerDied(RuntimeError):
    """A worker process ended without a word: killed, or crashed in native code."""


@dataclass
class Worker:
    """number: w; drawing: step and table (-1: none) that it is at, in shared memory"""

    number: int
    process: BaseProcess
    connection: Connection
    drawing: Any


class Loader:
    """The items of a stream, in order. The workers are at work from the moment it is made; `close` ends them.

    device: where the items will go; for a GPU they are put in pinned memory, by a thread that is one item ahead.
    waited: seconds that the taker of the items has waited for them
    Raises the error of a worker, and WorkerDied naming the table when one is gone.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        self.stream, self.waited = stream, 0.0
        self.workers: list[Worker] = []
        for number in range(config.num_workers):
            ours, theirs = multiprocessing.Pipe()
            drawing = multiprocessing.RawArray("q", [-1, -1])
            others = [ours, *(worker.connection for worker in self.workers)]
            arguments = (stream, config, number, theirs, drawing, others)
            process = multiprocessing.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.workers.append(Worker(number, process, ours, drawing))
        items = map(self.take, stream.steps) if self.workers else iter(stream)
        self.items = pinned(items, device) if device is not None and device.type == "cuda" else items

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepItem:
        started = time.perf_counter()
        try:
            return next(self.items)
        finally:
            self.waited += time.perf_counter() - started

    def take(self, step: int) -> StepItem:
        worker = self.workers[(step - self.stream.steps.start) % len(self.workers)]
        wait([worker.connection, worker.process.sentinel])
        try:
            if not worker.connection.poll():
                raise EOFError
            packed, error, trace = worker.connection.recv()
        except (EOFError, OSError):
            raise WorkerDied(self.tell_death(worker)) from None
        if error is not None:
            raise error from RuntimeError(f"in worker {worker.number}:\n{trace}")
        for each in self.workers:
            with contextlib.suppress(OSError):  # a dead one is noticed when its step is due
                each.connection.send(step + 1)
        return unpack(packed)

    def tell_death(self, worker: Worker) -> str:
        worker.process.join()
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        causes = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (no room left in /dev/shm?)"}
        step, table = worker.drawing
        at = f"while drawing {self.stream.describe(step, table)}" if table >= 0 else f"after drawing step {step}"
        return f"worker {worker.number} {how}{causes.get(-code, '')} {at}"

    def close(self) -> None:
        """End the workers, whatever they are doing: they ignore the signals by which the interpreter would."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def work(
    stream: StepStream, config: StreamConfig, number: int, connection: Connection, drawing: Any, others: list
) -> None:
    """A worker's life. Stop signals reach the whole process group; the training process decides when workers end."""
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    for other in others:  # a fork inherits them, and would keep a pipe open whose training process is gone
        other.close()
    torch.set_num_threads(1)
    size = functools.lru_cache(4096)(stream.size)
    most = config.prefetch * config.num_workers
    limit = config.prefetch_gib * 2**30
    due = stream.steps.start
    with contextlib.suppress(EOFError, ConnectionError):  # the training process is gone
        for step in stream.steps[number :: config.num_workers]:
            while step > due and (step - due >= most or sum(map(size, range(due, step + 1))) > limit):
                due = connection.recv()
            while connection.poll():
                due = connection.recv()
            try:
                message = (pack(stream.draw(step, functools.partial(note, drawing, step))), None, "")
            except Exception as error:
                message = (None, sendable(error), traceback.format_exc())
            note(drawing, step, -1)
            connection.send(message)
        while True:  # the memory of its items is shared from here until they are taken
            connection.recv()


def note(drawing: Any, step: int, table: int) -> None:
    drawing[:] = [step, table]


def sendable(error: Exception) -> Exception:
    """The error, or one that says the same, if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def pack(item: StepItem) -> tuple[StepItem, list[tuple[torch.Size, int]], Tensor, Tensor]:
    """An item as two tensors, one of all features and one of all labels: a tensor sent costs 0.1 ms."""
    shapes = [(batch.X.shape, batch.train_size) for batch in item.batches]
    features, labels = (join([getattr(batch, name) for batch in item.batches]) for name in ("X", "y"))
    return replace(item, batches=[]), shapes, features, labels


def unpack(packed: tuple[StepItem, list[tuple[torch.Size, int]], Tensor, Tensor]) -> StepItem:
    item, shapes, features, labels = packed
    batches = zip(
        divide(features, [shape for shape, _ in shapes]), divide(labels, [shape[:2] for shape, _ in shapes]), shapes,
        strict=True,
    )  # fmt: skip
    item.batches = [TableBatch(X, y, train_size) for X, y, (_, train_size) in batches]
    return item


def join(tensors: list[Tensor]) -> Tensor:
    """One flat tensor of them all, each at a multiple of ALIGNMENT."""
    return torch.cat([torch.nn.functional.pad(t.flatten(), (0, -t.numel() % ALIGNMENT)) for t in tensors])


def divide(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    pieces = flat.split([size + -size % ALIGNMENT for size in sizes])
    return [piece[:size].view(shape) for piece, size, shape in zip(pieces, sizes, shapes, strict=True)]


def pinned(items: Iterator[StepItem], device: torch.device) -> Iterator[StepItem]:
    """The items in pinned memory. The thread starts with the first one, so that workers fork before CUDA does."""
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as executor:
        ahead = executor.submit(pin_next, items)
        while (item := ahead.result()) is not None:
            ahead = executor.submit(pin_next, items)
            yield item


def pin_next(items: Iterator[StepItem]) -> StepItem | None:
    if (item := next(items, None)) is None:
        return None
    batches = [TableBatch(b.X.pin_memory(), b.y.pin_memory(), b.train_size) for b in item.batches]
    return replace(item, batches=batches)
