"""Processes that draw the stream's items ahead of the training process, and hand them over in order.

The processes are those of torch's DataLoader: worker w of W draws the steps start + w, start + w + W, ... An item is
sent as NumPy arrays in one message. Tensors in shared memory would be requested from the worker one by one, and wait
for the interpreter lock of a process that is busy drawing: 8 ms for a step of the demo.

Compared with our own pipes and memory files, five paired runs of the demo on two cores trained 1.01 to 1.09 times as
many tables per second (one pair 1.8).
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import active_children, get_context
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tabicl_train.config.schema import StreamConfig
from tabicl_train.console import info
from tabicl_train.doors import plugins
from tabicl_train.errors import picklable
from tabicl_train.model.pack import FlatLayout, Pack, Shape
from tabicl_train.signals import SIGNALS, Stop, die_with_parent
from tabicl_train.stream.steps import StepItem, StepStream

# Forked workers start in 0.1 s, and are children of this process rather than of the fork server, Python 3.14's default.
CONTEXT = get_context("fork" if sys.platform == "linux" else None)

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[Shape, ...], Any]  # of a pack, with its layout
Content = tuple[StepItem, list[Arrays]]

POLL = 1.0  # seconds between checks of stop signals (and of a Ray cluster) while waiting for an item


class WorkerDied(RuntimeError):
    """Raised if a process that draws tables ended without an error: it was killed, or crashed in native code."""


class TablesUnavailable(Exception):
    """Raised if the machines that draw tables are gone; the run can be continued once they are back."""


class StopRequested(Exception):
    """Raised if the run is asked to stop while it draws or waits for an item."""


class Steps(IterableDataset):
    """The items of a stream as a worker sends them: the two arguments of `unpacked`, or an error and its stack trace.

    Parameters
    ----------
    stream : StepStream
        The stream.
    first_step : Value
        The step to begin with, in memory that is shared with the training process. A worker waits for its lock, which
        the training process holds until the step is known. Later, the step after the last one tells workers to end.
    """

    def __init__(self, stream: StepStream, first_step: Any) -> None:
        self.stream: StepStream | bytes = stream  # pickled in a worker that was spawned
        self.first_step = first_step

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which must import plug-ins before it can unpickle the stream."""
        needed = plugins.Needed(tuple(plugins.named()))
        return {"stream": pickle.dumps((needed, self.stream)), "first_step": self.first_step}

    def __iter__(self) -> Iterator[Content | tuple[Exception, str]]:
        # The stream, which is pickled in a spawned worker.
        worker = get_worker_info()
        assert worker is not None
        stream = self.stream
        if isinstance(stream, bytes):
            try:
                _, stream = pickle.loads(stream)
            except Exception as error:
                # A plug-in may have changed, for example.
                yield picklable(error), f"in worker {worker.id}:\n{traceback.format_exc()}"
                return
        assert isinstance(stream, StepStream)

        # Wait for the first step.
        with self.first_step.get_lock():
            first = self.first_step.value
        stop = stream.steps.stop

        def check_close(_: int) -> None:
            # Read without the lock, since a killed process would not release it.
            if self.first_step.get_obj().value == stop:
                raise StopRequested

        # Draw this worker's share of the steps.
        for step in range(first + worker.id, stop, worker.num_workers):
            try:
                yield packed(stream.draw(step, check_close))
            except StopRequested:
                return
            except (Exception, SystemExit) as error:
                # A prior of a plug-in may raise anything.
                yield picklable(error), f"in worker {worker.id}:\n{traceback.format_exc()}"


def start_worker(parent: int, number: int) -> None:
    """Prepare a worker: it ends with its parent, and ignores stop signals, which reach the whole process group."""
    die_with_parent(parent)
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    # With low priority, a worker uses the time in which training processes wait: two ranks on two cores trained 8 to
    # 28 % more tables per second.
    os.nice(19)


class Loader(AbstractContextManager):
    """The items of a stream, in order.

    1. The constructor forks workers, before this process has threads or a CUDA context; it must run in the main thread.
       The workers wait, since no checkpoint has been read and the first step is not known yet.
    2. `start` tells them the first step.
    3. `next` hands over the items.
    4. `close` ends the workers.

    Parameters
    ----------
    stream : StepStream
        The stream.
    config : StreamConfig
        The number of workers, and how many items each draws ahead. Without workers, this process draws.
    device : torch.device, optional
        Where the items will be used; for a GPU they are pinned.

    Attributes
    ----------
    drawers : int
        The number of other processes that draw tables.
    workers : set of Process
        Those that this object has started.
    waited : float
        Seconds that the training process has waited for items.
    unavailable : bool
        Whether no more tables can be drawn.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        config = config.local()
        self.stream = stream
        self.device = device
        self.drawers = config.workers
        self.waited = 0.0
        self.unavailable = False
        self.stop: Stop | None = None
        self.from_workers: Any = None  # iterator over what workers send; None without workers, or after their end
        self.workers: set[Any] = set()
        if config.workers:
            self.open_workers(config)

    def open_workers(self, config: StreamConfig) -> None:
        """Start the workers; they wait for the lock of `first_step` until `begin` releases it."""
        # Import the loops of the prior once, before forking: that takes 2 CPU seconds, and more if they are compiled.
        self.stream.prior.import_loops()

        # Start the workers, and find out which processes they are.
        self.first_step = CONTEXT.Value("q", -1)  # unknown
        self.first_step.get_lock().acquire()
        others = set(active_children())
        self.from_workers = iter(
            DataLoader(
                Steps(self.stream, self.first_step),
                batch_size=None,
                collate_fn=as_it_is,
                num_workers=config.workers,
                prefetch_factor=config.prefetch,
                timeout=POLL,
                multiprocessing_context=CONTEXT,
                worker_init_fn=functools.partial(start_worker, os.getpid()),
            )
        )
        self.workers = set(active_children()) - others

    def start(self, first: int | None = None, stop: Stop | None = None) -> None:
        """Start drawing.

        Parameters
        ----------
        first : int, optional
            The first step. Default: that of the stream.
        stop : Stop, optional
            Whether the run was asked to stop; then `next` returns None.
        """
        self.stop = stop
        if first is not None:
            self.stream = replace(self.stream, steps=range(first, self.stream.steps.stop))
        if self.from_workers is not None:
            self.begin(self.stream.steps.start)
        items: Iterator[StepItem] = map(self.take, self.stream.steps)
        if self.device is not None and self.device.type == "cuda":
            items = pinned(items, self.device)
        self.items = items

    def begin(self, first: int) -> None:
        """Tell the workers their first step; further calls do nothing."""
        if self.first_step.value < 0:
            self.first_step.value = first
            self.first_step.get_lock().release()

    def next(self) -> StepItem | None:
        """Wait for the next item; None if the run was asked to stop meanwhile, or no more tables are available."""
        # All time in here counts as waiting, whether or not there is an item.
        started = time.perf_counter()
        try:
            self.check_stop()
            return next(self.items)
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
        """Wait for the item of a step, or raise the error of its worker."""
        if self.from_workers is None:
            return self.stream.draw(step, self.check_stop)
        while True:
            try:
                content, more = next(self.from_workers)
                break
            except RuntimeError as error:
                # A timeout of DataLoader, after POLL seconds, has no type of its own.
                if "timed out" not in str(error):
                    raise
                self.check_stop()
        if isinstance(content, Exception):
            raise content from RuntimeError(more)
        return unpacked(content, more)

    def close(self) -> None:
        """End the workers; one that is drawing ends before its next table, or is killed after five seconds."""
        if self.from_workers is not None:
            # Tell them: those that still wait for the first step get none, and those that draw see the last one.
            self.begin(self.stream.steps.stop)
            self.first_step.get_obj().value = self.stream.steps.stop
            # Let DataLoader wait up to five seconds for each, and take them off the list of processes whose death torch
            # reports as an error of this one. The finalizer of its iterator does the same, but too late if a traceback
            # or a thread that waits for an item still holds the iterator: then `kill` would cause that error.
            self.from_workers._shutdown_workers()
            self.from_workers = None
            # DataLoader sends SIGTERM, which workers ignore.
            for worker in self.workers:
                worker.kill()

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()


def as_it_is(content: Any) -> Any:
    return content


def packed(item: StepItem) -> Content:
    """Return an item without its packs, and the packs as NumPy arrays."""
    packs = []
    for pack in item.packs:
        layout = None if pack.layout is None else (pack.layout.values.numpy(), pack.layout[1:])
        packs.append((pack.X.numpy(), pack.y.numpy(), pack.sizes.numpy(), pack.shapes, layout))
    return replace(item, packs=[]), packs


def unpacked(item: StepItem, packs: list[Arrays]) -> StepItem:
    """Undo `packed`; copies to torch's memory, since the rounding of matrix products may depend on the alignment."""
    for X, y, sizes, shapes, flat in packs:
        layout = None if flat is None else FlatLayout(torch.tensor(flat[0]), *flat[1])
        item.packs.append(Pack(torch.tensor(X), torch.tensor(y), torch.tensor(sizes), shapes, layout))
    return item


def pinned(items: Iterator[StepItem], device: torch.device) -> Iterator[StepItem]:
    """Pin the items in a thread, one ahead. The thread starts with the first item, after the workers were forked."""
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as executor:
        ahead = executor.submit(pin_next, items)
        while (item := ahead.result()) is not None:
            ahead = executor.submit(pin_next, items)
            yield item


def pin_next(items: Iterator[StepItem]) -> StepItem | None:
    item = next(items, None)
    if item is None:
        return None
    return replace(item, packs=[pack.pin_memory() for pack in item.packs])
