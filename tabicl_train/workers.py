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

import torch
from torch import Tensor

from tabicl_train.config.schema import StreamConfig
from tabicl_train.errors import picklable
from tabicl_train.processes.launch import describe_exit
from tabicl_train.processes.signals import SIGNALS, die_with_parent
from tabicl_train.stream import StepItem, StepStream, TableBatch

# Forked workers start in 0.1 s and end with this process. The forkserver of Python 3.14 would start them under another.
CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
ALIGNMENT = 64  # bytes, as torch allocates: the rounding of matrix products may depend on the alignment


class WorkerDied(RuntimeError):
    """A worker process ended without an error message: it was killed, or crashed in native code."""


@dataclass
class Worker:
    """number: w; drawing: the step and table (-1: none) that it is drawing, in shared memory"""

    number: int
    process: BaseProcess
    connection: Connection
    drawing: Any


class Loader:
    """The items of a stream, in order.

    The workers start with the constructor, which must run in the main thread. `close` ends them, and so does the end of
    that thread.

    device: where the items will go; for a GPU they are put in pinned memory, by a thread that is one item ahead
    waited: seconds that the training process has waited for items

    Iterating raises the error of a worker, and WorkerDied naming the table if a worker is gone.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        self.stream, self.waited = stream, 0.0
        self.workers: list[Worker] = []
        for number in range(config.num_workers):
            connection, worker_end = CONTEXT.Pipe()
            drawing = CONTEXT.RawArray("q", [-1, -1])
            inherited = [connection, *(worker.connection for worker in self.workers)]
            args = (stream, config, number, worker_end, drawing, inherited, os.getpid())
            process = CONTEXT.Process(target=work, args=args, daemon=True)
            process.start()
            worker_end.close()
            self.workers.append(Worker(number, process, connection, drawing))
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
            item, error, trace = receive(worker.connection)
        except (EOFError, OSError):
            raise WorkerDied(self.describe_death(worker)) from None
        if error is not None:
            raise error from RuntimeError(f"in worker {worker.number}:\n{trace}")
        for worker in self.workers:
            with contextlib.suppress(OSError):  # a dead worker is noticed when its step is due
                worker.connection.send(step + 1)
        assert item is not None  # as there is no error
        return item

    def describe_death(self, worker: Worker) -> str:
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def work(
    stream: StepStream,
    config: StreamConfig,
    number: int,
    connection: Connection,
    drawing: Any,
    inherited: list[Connection],
    parent: int,
) -> None:
    """What a worker process does.

    It ignores stop signals, which reach the whole process group: the training process decides when workers end.
    inherited: connections of other processes, copied by the fork
    """
    die_with_parent(parent)
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    for other in inherited:  # they would keep a pipe open when the training process is gone
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
                item = stream.draw(step, functools.partial(note, drawing, step))
            except Exception as error:
                connection.send((None, picklable(error), traceback.format_exc()))
            else:
                note(drawing, step, -1)
                send(connection, item)
        while True:  # nothing more to draw
            connection.recv()


def note(drawing: Any, step: int, table: int) -> None:
    drawing[:] = [step, table]


def send(connection: Connection, item: StepItem) -> None:
    shapes = [(batch.X.shape, batch.train_size) for batch in item.batches]
    with memory_file() as file:
        for batch in item.batches:
            for values in (batch.X, batch.y):
                file.write(values.numpy().data)
                file.write(bytes(-file.tell() % ALIGNMENT))
        file.flush()
        connection.send(((replace(item, batches=[]), shapes), None, ""))
        send_handle(connection, file.fileno(), None)


def receive(connection: Connection) -> tuple[StepItem | None, Exception | None, str]:
    """An item, in memory that is freed with its last tensor, or the error of a worker and its stack trace."""
    content, error, trace = connection.recv()
    if error is not None:
        return None, error, trace
    item, shapes = content
    descriptor = recv_handle(connection)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    start = 0
    for shape, train_size in shapes:
        X, start = tensor_in(memory, start, shape, torch.float32)
        y, start = tensor_in(memory, start, shape[:2], torch.int64)
        item.batches.append(TableBatch(X, y, train_size))
    return item, None, ""


def tensor_in(memory: mmap.mmap, start: int, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The tensor at a position, and the position of the next one."""
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape), end + -end % ALIGNMENT


def memory_file() -> IO[bytes]:
    """A file without a name, in memory where the system supports it."""
    return open(os.memfd_create("tables"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def pinned(items: Iterator[StepItem], device: torch.device) -> Iterator[StepItem]:
    """The items in pinned memory. The thread starts with the first item, so that workers fork before CUDA starts."""
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
