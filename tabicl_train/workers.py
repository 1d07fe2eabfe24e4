"""Processes that draw the stream's items ahead of the training process.

Worker w of W draws the steps start + w, start + w + W, ..., so that items come in order. It may draw a step when the
items drawn and not yet taken, that step's included, are at most `prefetch` a worker and fit in `prefetch_gib`; the
step that is due may always be drawn, so the bound cannot stop a run. The sizes follow from the step plans, which every
worker computes for itself: the training process only says which step is due. Worker and training process are joined by
one socket, whose end tells each that the other is gone. An item goes through it as the descriptor of a memory file:
torch's own sharing would ask the worker for every tensor, which waits for the interpreter lock of a worker that is busy
drawing (8 ms a step of the demo), needs room in /dev/shm, and loses the items of a worker that has died.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import multiprocessing
import os
import pickle
import signal
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
from tabicl_train.processes.signals import SIGNALS, die_with_parent
from tabicl_train.stream import StepItem, StepStream, TableBatch

ALIGNMENT = 64  # bytes, as torch allocates: matrix products may round by alignment


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
    """The items of a stream, in order. The workers are at work from the moment it is made; `close` ends them, and so
    does the end of the thread that made it: that must be the main one.

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
            arguments = (stream, config, number, theirs, drawing, others, os.getpid())
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
            item, error, trace = receive(worker.connection)
        except (EOFError, OSError):
            raise WorkerDied(self.tell_death(worker)) from None
        if error is not None:
            raise error from RuntimeError(f"in worker {worker.number}:\n{trace}")
        for each in self.workers:
            with contextlib.suppress(OSError):  # a dead one is noticed when its step is due
                each.connection.send(step + 1)
        return item

    def tell_death(self, worker: Worker) -> str:
        worker.process.join()
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cause = " (out of memory?)" if code == -signal.SIGKILL else ""
        step, table = worker.drawing
        at = f"while drawing {self.stream.describe(step, table)}" if table >= 0 else f"after drawing step {step}"
        return f"worker {worker.number} {how}{cause} {at}"

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
    stream: StepStream,
    config: StreamConfig,
    number: int,
    connection: Connection,
    drawing: Any,
    others: list[Connection],
    parent: int,
) -> None:
    """A worker's life. Stop signals reach the whole process group; the training process decides when workers end."""
    die_with_parent(parent)
    for stop in SIGNALS:
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
                item = stream.draw(step, functools.partial(note, drawing, step))
            except Exception as error:
                connection.send((None, sendable(error), traceback.format_exc()))
            else:
                note(drawing, step, -1)
                send(connection, item)
        while True:  # nothing more to draw
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


def send(connection: Connection, item: StepItem) -> None:
    shapes = [(batch.X.shape, batch.train_size) for batch in item.batches]
    with memory_file() as file:
        for batch in item.batches:
            for values in (batch.X, batch.y):
                file.write(values.numpy())
                file.write(bytes(-file.tell() % ALIGNMENT))
        file.flush()
        connection.send(((replace(item, batches=[]), shapes), None, ""))
        send_handle(connection, file.fileno(), None)


def receive(connection: Connection) -> tuple[StepItem | None, Exception | None, str]:
    """An item, in memory that is freed with its last tensor; or the error of a worker and its stack trace."""
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
    """The tensor at a position, and the position of the next."""
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape), end + -end % ALIGNMENT


def memory_file() -> IO[bytes]:
    """A file without a name, in memory where the system has such."""
    return open(os.memfd_create("tables"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


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
