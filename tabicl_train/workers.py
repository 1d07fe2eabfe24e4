"""Processes that draw the stream's items ahead of the training process.

Worker w of W draws the steps start + w, start + w + W, ..., so that items arrive in order. It may draw a step while the
items that are drawn but not yet taken, this step's included, number at most `prefetch` per worker and fit in
`prefetch_gib`. The step that is due may always be drawn, so the bound cannot block a run. The sizes follow from the
step plans, which every worker computes on its own: the training process only sends which step is due.

One socket connects a worker and the training process; when it closes, each knows that the other is gone. An item is
sent through it as the descriptor of a memory file. torch's own sharing would request every tensor from the worker,
which waits for the interpreter lock of a worker that is busy drawing (8 ms per step of the demo), needs space in
/dev/shm, and loses the items of a worker that has died.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from tabicl_train.config.schema import StreamConfig
from tabicl_train.console import info
from tabicl_train.distributed.processes import SIGNALS, Stop, describe_exit, die_with_parent
from tabicl_train.errors import picklable
from tabicl_train.model.pack import Pack, Shape
from tabicl_train.stream import StepItem, StepStream

# Forked workers start in 0.1 s and end with this process. The forkserver of Python 3.14 would start them under another.
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
ALIGNMENT = 64  # bytes, as torch allocates: the rounding of matrix products may depend on the alignment


Content = tuple[StepItem, list[tuple[tuple[Shape, ...], torch.dtype]]]  # shapes and type of the labels of each pack


class WorkerDied(RuntimeError):
    """A worker process ended without an error message: it was killed, or crashed in native code."""


class TablesUnavailable(Exception):
    """The machines that draw the tables are gone; the run can be continued when they are back."""


class StopRequested(Exception):
    """The run was asked to stop while a table was drawn."""


@dataclass
class Worker:
    """A process; `drawing`: the step and table (-1: none) that it is drawing, in shared memory."""

    number: int
    process: BaseProcess
    connection: Connection
    drawing: Any


class Loader:
    """The items of a stream, in order.

    The idle workers start with the constructor, which must run in the main thread; they draw once `start` has given
    them the first step. `close` ends them, and so does the end of that thread.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        self.stream, self.device = stream, device  # items for a GPU are put in pinned memory, one ahead
        self.waited = 0.0  # seconds that the training process has waited for items
        self.unavailable = False  # whether no tables can be drawn any more
        config = config.local()
        self.workers: list[Worker] = []
        for number in range(config.workers):
            connection, worker_end = CONTEXT.Pipe()
            drawing = CONTEXT.RawArray("q", [-1, -1])
            inherited = [connection, *(worker.connection for worker in self.workers)]
            args = (stream, config, number, worker_end, drawing, inherited, os.getpid())
            process = CONTEXT.Process(target=work, args=args, daemon=True)
            process.start()
            worker_end.close()
            self.workers.append(Worker(number, process, connection, drawing))

    @property
    def drawers(self) -> int:
        """The number of processes that draw tables, beside this one."""
        return len(self.workers)

    def start(self, first: int | None = None, stop: Stop | None = None) -> None:
        """Have the tables drawn."""
        self.stop = stop
        if first is not None:
            self.stream = replace(self.stream, steps=range(first, self.stream.steps.stop))
        for worker in self.workers:
            with contextlib.suppress(OSError):  # a dead process is noticed when its step is due
                worker.connection.send(self.stream.steps.start)
        items = map(self.take, self.stream.steps)
        device = self.device
        self.items = pinned(items, device) if device is not None and device.type == "cuda" else items

    def next(self) -> StepItem | None:
        """Wait for the next item; None if the run was asked to stop meanwhile, or no tables are available any more."""
        started = time.perf_counter()
        try:
            return None if self.stop is not None and self.stop.asked else next(self.items)
        except StopRequested:
            return None
        except TablesUnavailable as error:
            info(f"warning   {error}")
            self.unavailable = True
            return None
        finally:
            self.waited += time.perf_counter() - started

    def __iter__(self) -> Iterator[StepItem]:
        """Start, and return all items of the stream."""
        self.start()
        return self.items

    def check_stop(self, _: int = 0) -> None:
        """Raise StopRequested if the run was asked to stop."""
        if self.stop is not None and self.stop.asked:
            raise StopRequested

    def take(self, step: int) -> StepItem:
        """Wait for the item of a step, and tell the workers that the next one is due."""
        if not self.workers:
            return self.stream.draw(step, self.check_stop)
        worker = self.workers[(step - self.stream.steps.start) % len(self.workers)]
        while not wait([worker.connection, worker.process.sentinel], timeout=1.0):
            self.check_stop()
        try:
            if not worker.connection.poll():
                raise EOFError
            item = receive(worker.connection)
        except (EOFError, ConnectionError) as error:
            if error.__cause__ is not None:  # an error of the prior, whose worker lives
                raise
            raise WorkerDied(self.describe_death(worker)) from None
        for other in self.workers:
            with contextlib.suppress(OSError):  # a dead process is noticed when its step is due
                other.connection.send(step + 1)
        return item

    def describe_death(self, worker: Worker) -> str:
        """Say how a worker ended and what it was drawing."""
        worker.process.join()
        code = worker.process.exitcode
        assert code is not None  # as it has ended
        cause = " (out of memory?)" if code == -signal.SIGKILL else ""
        step, table = worker.drawing
        at = f"while drawing {self.stream.describe(step, table)}" if table >= 0 else f"after drawing step {step}"
        return f"worker {worker.number} {describe_exit(code)}{cause} {at}"

    def close(self) -> None:
        """Kill the workers, whatever they are doing: they ignore the signals that the interpreter would send."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.connection.close()

    def __enter__(self) -> Loader:
        """Return the loader."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()


class Ahead:
    """Which steps may be drawn while an earlier one is due."""

    def __init__(self, stream: StepStream, config: StreamConfig) -> None:
        self.size = functools.lru_cache(4096)(stream.size)
        self.steps = config.prefetch * config.workers
        self.bytes = config.prefetch_gib * 2**30

    def allows(self, step: int, due: int) -> bool:
        if step <= due:
            return True
        return step - due < self.steps and sum(map(self.size, range(due, step + 1))) <= self.bytes


def work(
    stream: StepStream,
    config: StreamConfig,
    number: int,
    connection: Connection,
    drawing: Any,
    inherited: list[Connection],
    parent: int,
) -> None:
    """Do what a worker process does.

    It ignores stop signals, which reach the whole process group: the training process decides when workers end.
    `inherited`: connections of other processes, copied by the fork.
    """
    die_with_parent(parent)
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    for other in inherited:  # they would keep a pipe open when the training process is gone
        other.close()
    torch.set_num_threads(1)
    ahead = Ahead(stream, config)
    with contextlib.suppress(EOFError, ConnectionError):  # the training process is gone
        due = connection.recv()  # the first step
        for step in range(due + number, stream.steps.stop, config.workers):
            while not ahead.allows(step, due):
                due = connection.recv()
            while connection.poll():
                due = connection.recv()
            try:
                item = stream.draw(step, functools.partial(note, drawing, step))
            except Exception as error:
                connection.send((None, picklable(error), f"in worker {number}:\n{traceback.format_exc()}"))
            else:
                note(drawing, step, -1)
                send(connection, *packed(item))
        while True:  # nothing more to draw
            connection.recv()


def note(drawing: Any, step: int, table: int) -> None:
    drawing[:] = [step, table]


def packed(item: StepItem) -> tuple[Content, list[np.ndarray]]:
    """Return an item without its tables, the shapes of these and the types of their labels, and their values."""
    shapes = [(pack.shapes, pack.y.dtype) for pack in item.packs]
    arrays = [values.numpy() for pack in item.packs for values in (pack.X, pack.y, pack.sizes)]
    return (replace(item, packs=[]), shapes), arrays


def send(connection: Connection, content: Content, arrays: list[np.ndarray]) -> None:
    with memory_file() as file:
        for values in arrays:
            file.write(values.data)
            file.write(bytes(-file.tell() % ALIGNMENT))
        file.flush()
        connection.send((content, None, ""))
        send_handle(connection, file.fileno(), None)


def receive(connection: Connection) -> StepItem:
    """Receive an item, in memory that is freed with its last tensor; raises the error of a worker."""
    content, error, trace = connection.recv()
    if error is not None:
        raise error from RuntimeError(trace)
    item, shapes = content
    descriptor = recv_handle(connection)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    start = 0
    for tables, labels in shapes:
        X, start = tensor_in(memory, start, (sum(N * M for N, _, M in tables),), torch.float32)
        y, start = tensor_in(memory, start, (sum(N for N, _, _ in tables),), labels)
        sizes, start = tensor_in(memory, start, (len(tables), 3), torch.int64)
        item.packs.append(Pack(X, y, sizes, tables))
    return item


def tensor_in(memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    """Return the tensor at a position, and the position of the next one."""
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape), end + -end % ALIGNMENT


def memory_file() -> IO[bytes]:
    """Open a file without a name, in memory where the system supports it."""
    return open(os.memfd_create("tables"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def pinned(items: Iterator[StepItem], device: torch.device) -> Iterator[StepItem]:
    """Pin the items, in a thread that starts with the first one, so that workers fork before CUDA starts."""
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as executor:
        ahead = executor.submit(pin_next, items)
        while (item := ahead.result()) is not None:
            ahead = executor.submit(pin_next, items)
            yield item


def pin_next(items: Iterator[StepItem]) -> StepItem | None:
    if (item := next(items, None)) is None:
        return None
    return replace(item, packs=[pack.pin_memory() for pack in item.packs])
