"""Processes that draw the stream's items ahead of the training process, and hand them over in order.

The processes are those of torch's DataLoader: worker w of W draws the steps start + w, start + w + W, ... An item is
sent as arrays in one message. Tensors in shared memory would be requested from the worker one by one, and wait for the
interpreter lock of a process that is busy drawing: 8 ms for a step of the demo. In five paired runs of the demo on two
cores this trained 1.01 to 1.09 times as many tables per second (one pair 1.8) as our own pipes and memory files.
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

# Forked workers start in 0.1 s and are children of this process; with Python 3.14's default they are the forkserver's.
CONTEXT = get_context("fork" if sys.platform == "linux" else None)

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[Shape, ...], Any]  # of a pack, with its layout
Content = tuple[StepItem, list[Arrays]]

POLL = 1.0  # seconds between checks of stop signals (and of a cluster) while an item is awaited


class WorkerDied(RuntimeError):
    """A process that draws tables ended without an error message: it was killed, or crashed in native code."""


class TablesUnavailable(Exception):
    """The machines that draw the tables are gone; the run can be continued when they are back."""


class StopRequested(Exception):
    """The run was asked to stop while an item was drawn or awaited."""


class Steps(IterableDataset):
    """The items of a stream as a worker sends them: each as the arguments of `unpacked`, or an error and where it was.

    Parameters
    ----------
    stream : StepStream
        The stream.
    first_step : Value
        The step to begin with, in memory that is shared with the training process. A worker waits for its lock, which
        the training process holds until the step is known. Behind the last step, later, it ends the workers.
    """

    def __init__(self, stream: StepStream, first_step: Any) -> None:
        self.stream: StepStream | bytes = stream  # pickled in a worker that was spawned
        self.first_step = first_step

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker that is spawned, where the stream needs its plug-ins first."""
        needed = plugins.Needed(tuple(plugins.named()))
        return {"stream": pickle.dumps((needed, self.stream)), "first_step": self.first_step}

    def __iter__(self) -> Iterator[Content | tuple[Exception, str]]:
        worker = get_worker_info()
        assert worker is not None
        stream = self.stream
        if isinstance(stream, bytes):
            try:
                _, stream = pickle.loads(stream)
            except Exception as error:  # such as a plug-in that has changed
                yield picklable(error), f"in worker {worker.id}:\n{traceback.format_exc()}"
                return
        assert isinstance(stream, StepStream)
        with self.first_step.get_lock():  # waits
            first = self.first_step.value
        stop = stream.steps.stop

        def check_close(_: int) -> None:
            if self.first_step.get_obj().value == stop:  # without its lock, since a process may be killed here
                raise StopRequested

        for step in range(first + worker.id, stop, worker.num_workers):
            try:
                yield packed(stream.draw(step, check_close))
            except StopRequested:
                return
            except (Exception, SystemExit) as error:  # of a prior of a plug-in, too
                yield picklable(error), f"in worker {worker.id}:\n{traceback.format_exc()}"


def start_worker(parent: int, number: int) -> None:
    """Prepare a worker: it ends with its parent, and ignores stop signals, which reach the whole process group."""
    # With low priority it uses the time in which the training processes wait: two ranks on two cores trained 8 to 28 %
    # more tables per second.
    die_with_parent(parent)
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    os.nice(19)


class Loader(AbstractContextManager):
    """The items of a stream, in order.

    1. The constructor forks workers, before this process has threads or a CUDA context; it must run in the main thread.
       Which step is the first one is not known yet, since no checkpoint has been read. So the workers wait.
    2. `start` gives them the first step.
    3. `next` hands over the items.
    4. `close` ends the workers.

    Attributes
    ----------
    drawers : int
        Processes that draw tables, beside this one.
    workers : set of Process
        Those that this object has started.
    waited : float
        Seconds that the training process has waited for items.
    unavailable : bool
        Whether no tables can be drawn any more.
    """

    def __init__(self, stream: StepStream, config: StreamConfig, device: torch.device | None = None) -> None:
        config = config.local()
        self.stream = stream
        self.device = device
        self.drawers = config.workers
        self.waited = 0.0
        self.unavailable = False
        self.stop: Stop | None = None
        self.from_workers: Any = None  # iterator over what they send; None without workers, and once they have ended
        self.workers: set[Any] = set()
        if config.workers:
            self.open_workers(config)

    def open_workers(self, config: StreamConfig) -> None:
        """Start the workers; they wait for the lock of `first_step` until `begin` releases it."""
        # Each worker would import the loops of the prior, 2 CPU seconds, and compile those that are not yet on disk.
        self.stream.prior.import_loops()
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
        """Start drawing at step `first`, by default the stream's first one."""
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
        """Give the workers their first step, once."""
        if self.first_step.value < 0:
            self.first_step.value = first
            self.first_step.get_lock().release()

    def next(self) -> StepItem | None:
        """Wait for the next item; None if the run was asked to stop meanwhile, or no tables are available any more."""
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
        """Wait for the item of a step; raises the error of its worker."""
        if self.from_workers is None:
            return self.stream.draw(step, self.check_stop)
        while True:
            try:
                content, more = next(self.from_workers)
                break
            except RuntimeError as error:  # DataLoader has no type of its own for a timeout, here POLL
                if "timed out" not in str(error):
                    raise
                self.check_stop()
        if isinstance(content, Exception):
            raise content from RuntimeError(more)
        return unpacked(content, more)

    def close(self) -> None:
        """End the workers: those that are drawing at their next table, or after five seconds."""
        if self.from_workers is not None:
            self.begin(self.stream.steps.stop)  # for those that still wait: there are no steps
            self.first_step.get_obj().value = self.stream.steps.stop  # for those that are drawing
            # DataLoader waits up to five seconds for each, and takes them off the list of processes whose death torch
            # reports as an error of this one. The finalizer of its iterator does the same, but too late where a thread
            # that waits for an item, or a traceback, holds the iterator: then `kill` would cause that error.
            self.from_workers._shutdown_workers()
            self.from_workers = None
            for worker in self.workers:
                worker.kill()  # as they ignore SIGTERM, by which DataLoader would end them

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self.close()


def as_it_is(content: Any) -> Any:
    return content


def packed(item: StepItem) -> Content:
    """Return an item without its packs, and these as arrays."""
    packs = []
    for pack in item.packs:
        layout = None if pack.layout is None else (pack.layout.values.numpy(), pack.layout[1:])
        packs.append((pack.X.numpy(), pack.y.numpy(), pack.sizes.numpy(), pack.shapes, layout))
    return replace(item, packs=[]), packs


def unpacked(item: StepItem, packs: list[Arrays]) -> StepItem:
    """Copy the arrays to torch's memory, since the rounding of matrix products may depend on the alignment."""
    for X, y, sizes, shapes, flat in packs:
        layout = None if flat is None else FlatLayout(torch.tensor(flat[0]), *flat[1])
        item.packs.append(Pack(torch.tensor(X), torch.tensor(y), torch.tensor(sizes), shapes, layout))
    return item


def pinned(items: Iterator[StepItem], device: torch.device) -> Iterator[StepItem]:
    """Pin the items in a thread, one ahead; it starts with the first one, so that workers fork before CUDA starts."""
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
